"""Copies of sharded models hold the same bits on every rank, and have nothing in common with the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, held, raised, samples
from tests.support.training.models import Stack
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime

pytestmark = pytest.mark.ranks

WORLD = 4


def data(step: int, rank: int) -> torch.Tensor:
    return samples(step, 1, WORLD)[0, rank]


def train(model: nn.Module, rank: int, steps: int = 3) -> list[float]:
    optim, losses = tw.optimizer(model, torch.optim.AdamW, lr=1e-2), []
    for step in range(steps):
        loss = model(data(step, rank)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("thinwire", {}),
        ("zeropp", {}),
        ("zero1", {"compute_dtype": "bfloat16", "wire": {"spread": "int8:64", "spread_difference": True}}),
        ("zero3", {"recompute": True}),
    ],
    ids=["thinwire", "zeropp", "differences", "recomputed"],
)
@on_ranks(WORLD)
def test_a_copy_has_the_bits_of_every_rank(preset: str, options: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    plan = tw.Plan.preset(preset, nodes=2, local=2, **options)
    units = ["blocks.0", "blocks.1"] if preset == "zeropp" else None
    model = tw.shard(build(Stack), plan, units=units)
    train(model, rank)
    twin = copy.deepcopy(model)
    assert [unit.name for unit in runtime(twin).units] == [unit.name for unit in runtime(model).units]
    assert all(map(torch.equal, held(twin), held(model)))
    with torch.no_grad():
        assert torch.equal(twin(data(7, rank)), model(data(7, rank)))
    before = held(model)
    assert train(twin, rank)[0] == float(model(data(0, rank)).square().mean().detach())
    assert all(map(torch.equal, before, held(model)))
    assert not all(map(torch.equal, held(twin), held(model)))


class Scaled(Stack):
    """A stack with a parameter that sharding leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        tw.ignore(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@on_ranks(WORLD)
def test_parts_wrappers_and_refusals() -> None:
    rank = torch.distributed.get_rank()
    plan = tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32")
    model = tw.shard(build(Scaled), plan)
    model.scale.data.fill_(rank + 1.0)
    twin = copy.deepcopy(model)
    assert float(twin.scale.detach()) == rank + 1.0
    assert twin.scale is not model.scale
    holder = copy.deepcopy(nn.ModuleDict({"model": model, "again": model}))
    assert holder["model"] is holder["again"] is not model
    assert torch.equal(holder["model"](data(0, rank)), model(data(0, rank)))

    assert "cannot be copied alone" in raised(UsageError, copy.deepcopy, model.blocks)
    with tw.full_parameters(model):
        assert "full_parameters()" in raised(UsageError, copy.deepcopy, model)
    said: list[str] = []
    handle = model.blocks[0].register_forward_hook(
        lambda *_: said.append(raised(UsageError, copy.deepcopy, model))  # type: ignore[func-returns-value]
    )
    model(data(0, rank)).sum().backward()
    handle.remove()
    assert "inside its forward" in said[0]

    parts = build(Stack)
    for block in parts.blocks:
        tw.shard(block, plan)
    whole = tw.shard(parts, plan)
    assert train(copy.deepcopy(whole), rank) == train(whole, rank)
