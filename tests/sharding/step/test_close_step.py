"""A step is closed once: ranks exchange its order and its norm once, no matter how many ask for the result."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.program import NORM_BYTES, Lane, control_bytes
from thinwire.sharding.api import runtime
from thinwire.sharding.step.passes import Passes
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 3


def closings(measures: str) -> list[tuple[int, int, int, int]]:
    """For each step: how often it was closed, and the exchanges and bytes of the control lane beside those expected."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), tw.Plan.preset("zeropp", nodes=2, local=1))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, skip_nonfinite="skip" in measures)
    engine = runtime(model)
    row = control_bytes([unit.info for unit in engine.units])
    expected = row + (NORM_BYTES if measures else 0)
    seen = []
    for _ in range(STEPS):
        tw.traffic(model)
        with mock.patch.object(Passes, "reach_step", autospec=True, side_effect=Passes.reach_step) as closed:
            with recording() as records:
                model(torch.randn(4, 8)).square().mean().backward()
                if "clip" in measures:
                    tw.clip_grad_norm_(model, 1.0)
                optim.step()
                optim.zero_grad()
            exchanges = sum(record.lane is Lane.CONTROL for record in records)
            seen.append((closed.call_count, exchanges, sum(tw.traffic(model)["control"].values()), expected))
    return seen


@pytest.mark.parametrize("measures", ["", "clip", "skip", "clip and skip"])
def test_a_step_is_closed_by_one_exchange_and_measured_by_another(measures: str) -> None:
    for steps in run_ranks(2, closings, measures):
        for closed, exchanges, sent, expected in steps:
            assert closed == 1
            assert exchanges == (2 if measures else 1)
            assert sent == expected


def reclosed() -> list[int]:
    """How often a step is closed whose gradients come in two backwards with a look at the norm between them."""
    model = tw.shard(nn.Linear(8, 2), tw.Plan.preset("zero3", nodes=2, local=1))
    engine = runtime(model)
    counts = []
    with mock.patch.object(Passes, "reach_step", autospec=True, side_effect=Passes.reach_step) as closed:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            first = engine.close_step(measure=True)
            assert engine.close_step() is first
            assert engine.step_check.result is first
            counts.append(closed.call_count)
    return counts


def test_gradients_that_come_later_open_the_step_again() -> None:
    assert run_ranks(2, reclosed) == [[1, 2], [1, 2]]
