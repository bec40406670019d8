"""The loss scale follows the rule of torch's ``GradScaler``, and says what it cannot do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import thinwire as tw
from thinwire.errors import CheckpointError, NonFiniteError, SpecError, UsageError
from thinwire.sharding.step.loss_scale import checked_state
from thinwire.spec.recipe import LossScaleRecipe


@pytest.mark.parametrize(
    ("growth", "backoff", "interval"), [(2.0, 0.5, 3), (1.3, 0.7, 1), (1.0, 0.5, 2), (4.0, 1.0, 2)]
)
def test_it_follows_the_rule_of_grad_scaler(growth: float, backoff: float, interval: int) -> None:
    rng = random.Random(interval)
    scale = tw.LossScale(65536.0, growth=growth, backoff=backoff, growth_interval=interval, floor=1e-30)
    theirs, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    for step in range(300):
        finite = rng.random() < 0.8
        before = scale.value
        ratio = scale.update(finite=finite)
        torch._amp_update_scale_(theirs, tracker, torch.tensor(float(not finite)), growth, backoff, interval)
        assert (scale.value, ratio) == (theirs.item(), scale.value / before), step
        assert scale.finite_steps == tracker.item()
    assert scale.skipped_steps > 20


def test_it_never_grows_beyond_fp32() -> None:
    scale = tw.LossScale(2.0**127, growth_interval=1)
    assert scale.update(finite=True) == 1.0
    assert scale.value == 2.0**127


def test_it_scales_a_loss_of_16_bits_without_overflow() -> None:
    scale = tw.LossScale(65536.0)
    loss = torch.tensor(3.0, dtype=torch.float16, requires_grad=True)
    scaled = scale.scale(loss)
    assert (scaled.dtype, scaled.item()) == (torch.float32, 3.0 * 65536.0)
    assert scale.scale(torch.tensor(1.0, dtype=torch.float64)).dtype == torch.float64


def test_the_floor_ends_training() -> None:
    scale = tw.LossScale(10.0, floor=4.0)
    assert scale.update(finite=False) == 0.5
    scale.update(finite=False)
    assert scale.value == 4.0
    with pytest.raises(NonFiniteError, match=r"loss_scale.floor = 4: lower the learning rate"):
        scale.update(finite=False)


def test_a_constant_scale_only_counts() -> None:
    scale = tw.LossScale(128.0, growth=1.0, backoff=1.0, growth_interval=1)
    for finite in (True, False, False):
        assert scale.update(finite=finite) == 1.0
    assert (scale.value, scale.skipped_steps, scale.is_dynamic) == (128.0, 2, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"growth": 0.5}, "growth should be at least 1"),
        ({"backoff": 0.0}, "backoff should be above 0 and at most 1"),
        ({"growth_interval": 0}, "growth_interval = 0 should be a whole number of at least 1"),
        ({"growth_interval": 1.5}, "growth_interval = 1.5 should be a whole number"),
        ({"floor": 0.0}, "floor should be above 0"),
        ({"initial": 0.5}, "initial should be from floor = 1.0 to"),
        ({"initial": float("inf")}, "initial should be from floor = 1.0 to"),
        ({"initial": float("nan")}, "initial should be from floor = 1.0 to"),
        ({"initial": "auto"}, "initial='auto'.*should be from floor = 1.0 to"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tw.LossScale(**options)


def test_its_state_is_checked() -> None:
    scale = tw.LossScale(growth_interval=5)
    scale.update(finite=False)
    scale.update(finite=True)
    other = tw.LossScale(2.0)
    state = checked_state(scale.state())
    assert state is not None
    other.restore(state)
    assert (other.value, other.finite_steps, other.skipped_steps) == (32768.0, 1, 1)
    for broken in ({}, {**scale.state(), "value": 0.0}, {**scale.state(), "finite_steps": True}, [1]):
        with pytest.raises(CheckpointError, match="its loss scale is"):
            checked_state(broken)


def test_a_recipe_has_the_same_defaults() -> None:
    recipe, scale = LossScaleRecipe(), tw.LossScale()
    assert {name: getattr(scale, name) for name in ("growth", "backoff", "growth_interval", "floor")} == {
        name: getattr(recipe, name) for name in ("growth", "backoff", "growth_interval", "floor")
    }
    assert scale.value == recipe.initial
    with pytest.raises(SpecError, match="initial = 2 should be at least floor = 4"):
        LossScaleRecipe(initial=2.0, floor=4.0)
