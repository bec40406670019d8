"""What loops register for checkpoints beside models and optimizers, and the weights that they end with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import thinwire as tw
from thinwire.integrations.common.optimizers import is_sharded


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
