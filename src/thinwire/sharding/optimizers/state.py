"""The state of an optimizer, fragment by fragment, also before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from thinwire.sharding.fragments import OwnedFragment

if TYPE_CHECKING:
    from thinwire.sharding.optim import ShardedOptimizer

__all__ = ["make_state", "state_of"]


def state_of(optim: ShardedOptimizer | None, owned: OwnedFragment) -> dict[str, Any]:
    """What the optimizer keeps for a fragment; nothing before its first step, and without an optimizer."""
    if optim is None:
        return {}
    return {key: value for key, value in optim.state.get(owned.value, {}).items() if value is not None}


@torch.no_grad()
def make_state(optim: ShardedOptimizer) -> list[OwnedFragment]:
    """Let the optimizer allocate missing state, with a step on zero gradients and a learning rate of zero.

    Returns:
        Fragments that had no state before.
    """
    made = [owned for owned in optim.fragments if not state_of(optim, owned)]
    rates = [group.get("lr") for group in optim.param_groups]
    for owned in optim.fragments:
        owned.value.grad = None
    for owned in made:
        owned.value.grad = torch.zeros_like(owned.value)
    for group in optim.param_groups:
        if "lr" in group:
            group["lr"] = 0.0
    optim.inner.step()
    for group, rate in zip(optim.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    for owned in made:
        owned.value.grad = None
    return made
