"""The optimizer over a rank's fragments, and its state, fragment by fragment, also before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from thinwire.sharding.grads.optimizer_shards import OwnedFragment

__all__ = ["InnerOptimizer", "make_state", "state_of"]


@dataclass(frozen=True, eq=False)
class InnerOptimizer:
    """One of torch's optimizers, or of others with its interface, over the pieces of parameters that a rank updates.

    Attributes:
        optimizer: The optimizer.
        fragments: All fragments that this rank updates.
    """

    optimizer: torch.optim.Optimizer
    fragments: tuple[OwnedFragment, ...]


def state_of(inner: InnerOptimizer | None, owned: OwnedFragment) -> dict[str, Any]:
    """What the optimizer keeps for a fragment; nothing before its first step, and without an optimizer."""
    if inner is None:
        return {}
    return {key: value for key, value in inner.optimizer.state.get(owned.value, {}).items() if value is not None}


@torch.no_grad()
def make_state(inner: InnerOptimizer) -> list[OwnedFragment]:
    """Let the optimizer allocate missing state, with a step on zero gradients and a learning rate of zero.

    Returns:
        Fragments that had no state before.
    """
    made = [owned for owned in inner.fragments if not state_of(inner, owned)]
    groups = inner.optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    for owned in inner.fragments:
        owned.value.grad = None
    for owned in made:
        owned.value.grad = torch.zeros_like(owned.value)
    for group in groups:
        if "lr" in group:
            group["lr"] = 0.0
    inner.optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    for owned in made:
        owned.value.grad = None
    return made
