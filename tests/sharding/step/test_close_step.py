"""A step is closed once: ranks exchange its order and its norm once, no matter how many ask for the result."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.collectives.group import recording
from thinwire.program import NORM_BYTES, Lane, control_bytes
from thinwire.sharding.api import runtime
from thinwire.sharding.step.passes import Passes

pytestmark = pytest.mark.ranks

STEPS = 3


@pytest.mark.parametrize("measures", ["", "clip", "skip", "clip and skip"])
@on_ranks(2)
def test_a_step_is_closed_by_one_exchange_and_measured_by_another(measures: str) -> None:
    """In calls, and in exchanges and bytes of the control lane."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), tw.Plan.preset("zeropp", nodes=2, local=1))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3, skip_nonfinite="skip" in measures)
    engine = runtime(model)
    row = control_bytes([unit.info for unit in engine.units])
    expected = row + (NORM_BYTES if measures else 0)
    for _ in range(STEPS):
        tw.traffic(model)
        reach_step = mock.patch.object(Passes, "reach_step", autospec=True, side_effect=Passes.reach_step)
        with reach_step as closed, recording() as records:
            model(torch.randn(4, 8)).square().mean().backward()
            if "clip" in measures:
                tw.clip_grad_norm_(model, 1.0)
            optim.step()
            optim.zero_grad()
        assert closed.call_count == 1
        assert sum(record.lane is Lane.CONTROL for record in records) == (2 if measures else 1)
        assert sum(tw.traffic(model)["control"].values()) == expected


@on_ranks(2)
def test_gradients_that_come_later_open_the_step_again() -> None:
    """Gradients come in two backwards with a look at the norm between them."""
    model = tw.shard(nn.Linear(8, 2), tw.Plan.preset("zero3", nodes=2, local=1))
    engine = runtime(model)
    with mock.patch.object(Passes, "reach_step", autospec=True, side_effect=Passes.reach_step) as closed:
        for times in (1, 2):
            model(torch.ones(4, 8)).sum().backward()
            first = engine.close_step(measure=True)
            assert engine.close_step() is first
            assert engine.step_check.result is first
            assert closed.call_count == times
