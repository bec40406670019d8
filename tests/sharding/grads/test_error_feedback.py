"""Rounding errors follow their gradients to other buckets."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.sharding.api import runtime

pytestmark = pytest.mark.ranks

NAMES = ["a", "b", "c", "d", "e"]
WIDTH = 32


class Line(nn.Module):
    """Layers that run in the order of their names, whatever the order in which they are registered. Each has as many
    elements as four blocks of a codec, so that blocks are the same in any order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))
        values = torch.Generator().manual_seed(0)
        for _, weight in sorted(self.named_parameters()):
            nn.init.normal_(weight, std=0.2, generator=values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            x = torch.tanh(getattr(self, name)(x))
        return x


def trained(model: nn.Module, optim: torch.optim.Optimizer, *steps: int) -> dict[str, torch.Tensor]:
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(x).float().square().mean().backward()
        optim.step()
        optim.zero_grad()
    return tw.full_state_dict(model)


def entries(model: nn.Module) -> Counter[tuple[str, str]]:
    """In how many entries there are errors of a unit, by reduction and unit."""
    keys = [key.split("/") for key in runtime(model).reducer.feedback.lost]
    return Counter((what, unit) for what, units in keys for unit in set(units.split("-")))


@pytest.mark.parametrize(("world", "local"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
@on_ranks("world")
def test_errors_stay_with_gradients_when_units_run_in_another_order(world: int, local: int) -> None:
    """The first step's buckets hold units as they are registered, later ones as they run."""
    plan = tw.Plan.preset("thinwire", nodes=2, local=local, granularity="module", wire={"error_feedback": 1.0})
    for fields in ({}, {"bucket_bytes": 4096 // local}, {"bucket_bytes": 4096 // local, "bucket_chunks": 2}):
        results = []
        for names in (NAMES, NAMES[::-1]):
            model = tw.shard(Line(names), plan.with_(**fields))
            results.append(trained(model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2), 0, 1, 2))
            counts = entries(model)
            assert len({unit for _, unit in counts}) == len(NAMES)
            assert set(counts.values()) == {1}
        for name, weight in results[0].items():
            assert torch.equal(weight, results[1][name]), (fields, name)


@on_ranks(2)
def test_errors_stay_with_gradients_when_others_of_their_unit_are_unfrozen() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].weight.requires_grad_(False)
    model = tw.shard(model, tw.Plan.preset("thinwire", nodes=2, local=1, wire={"error_feedback": 1.0}))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    trained(model, optim, 0)
    before = entries(model)
    model[0].weight.requires_grad_(True)
    trained(model, optim, 1)
    assert entries(model) == before
