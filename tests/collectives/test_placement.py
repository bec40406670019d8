"""A plan's ``placement`` says which rank takes each position of the mesh: groups follow it, numbers stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.training.edge import TOLERANCE, build, close, gap, plan, raised, samples, whole
from tests.support.training.models import Stack
from torch import nn

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.errors import SpecError
from thinwire.program import Scope
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

ORDERS = ((1, 0, 2, 3), (2, 3, 0, 1), (3, 2, 0, 1))


def start(name: str, placement: tuple[int, ...] | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tw.shard(build(Stack), plan(name, placement=placement))
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range, place: int | None = None) -> list[float]:
    """Train on the samples of this rank, or of ``place``."""
    place = dist.get_rank() if place is None else place
    norms = []
    for number in steps:
        model(samples(number, 1, 4)[0, place]).square().mean().backward()
        norms.append(float(tw.clip_grad_norm_(model, 1.0)))
        optim.step()
        optim.zero_grad()
    return norms


def check_groups(names: Sequence[str]) -> None:
    for name in names:
        expected = None
        for placement in (None, *ORDERS):
            model, optim = start(name, placement)
            with recording() as records:
                order = placement or tuple(range(4))
                # What codecs round depends on the position that holds it, and on the samples that it saw.
                norms = train(model, optim, range(2), order.index(dist.get_rank()))
            for record in records:
                places = [order.index(rank) for rank in record.ranks]
                nodes = {place // 2 for place in places}
                if record.scope is Scope.INSIDE:
                    assert len(nodes) == 1, f"{record} leaves its node under {placement}"
                else:
                    assert len({place % 2 for place in places}) == 1, f"{record} joins other places under {placement}"
                    assert len(nodes) == len(places)
            if expected is None:
                expected = norms, whole(model)
            assert gap(whole(model), expected[1]) <= TOLERANCE, f"{name} with {placement}"
            assert all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(norms, expected[0], strict=True))
            close(model)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("zero3", "zero1-node"), ("zero1", "hpz", "inter", "zeropp")], ids=" ".join)
def test_groups_follow_the_placement(names: Sequence[str]) -> None:
    run_ranks(4, check_groups, names)


def check_checkpoints(path: Path) -> None:
    """A run resumes from a checkpoint under the same placement or another one."""
    reference, optim = start("zero3", None)
    train(reference, optim, range(4))
    for saving, loading in (((3, 2, 0, 1), None), (None, (1, 0, 2, 3)), ((2, 3, 0, 1), (2, 3, 0, 1))):
        model, optim = start("zero3", saving)
        train(model, optim, range(2))
        tw.save(model, optim, path)
        close(model)
        model, optim = start("zero3", loading)
        tw.load(model, optim, path)
        train(model, optim, range(2, 4))
        assert gap(whole(model), whole(reference)) <= TOLERANCE
        close(model)
    close(reference)


@pytest.mark.slow
def test_checkpoints_travel_between_placements(tmp_path: Path) -> None:
    run_ranks(4, check_checkpoints, tmp_path / "checkpoint")


def check_refusals() -> None:
    model = build(Stack)
    assert "keep nodes whole" in raised(SpecError, tw.shard, model, plan("zero3", placement=(0, 2, 1, 3)))
    assert "should name each of the ranks 0 to 3 exactly once" in raised(
        SpecError, plan, "zero3", placement=(0, 0, 1, 2)
    )


def test_placements_that_do_not_fit_are_refused() -> None:
    run_ranks(4, check_refusals)
