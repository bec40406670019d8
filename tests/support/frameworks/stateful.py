"""What loops register for checkpoints beside models and optimizers, the weights that they end with, and what they have
recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.integrations.common.optimizers import is_sharded

PLANNED = ("thinwire_zero1", "thinwire_zero2", "thinwire")
"""Names of Lightning's strategies over thinwire."""


def weights(model: nn.Module) -> dict[str, Any]:
    """Whole weights, and what else the state dict of a model has that is not sharded."""
    if is_sharded(model):
        return tw.full_state_dict(model)
    state = model.state_dict()
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


class Counter:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def assert_runs_alike(got: Mapping[str, Any], want: Mapping[str, Any], keys: Iterable[str], case: str) -> None:
    """What two runs have recorded under some keys, NaN included, and their weights are equal to rounding."""
    for key in keys:
        assert got[key] == pytest.approx(want[key], rel=1e-5, nan_ok=True), (case, key)
    for name, value in want["weights"].items():
        torch.testing.assert_close(got["weights"][name], value, rtol=1e-5, atol=1e-6, msg=f"{case}: {name}")
