"""The gradient norm, and clipping to it: one pass over this rank's share and one small exchange."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from thinwire.errors import NonFiniteError, UsageError
from thinwire.shard.runtime import runtime_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Args:
        model: a sharded model.
        max_norm: the bound; ``inf`` only measures.
        norm_type: 2; other norms are refused.
        error_if_nonfinite: raise on NaN or infinity instead of returning it.

    Returns:
        The norm before clipping, a 0-D fp32 tensor on the CPU, equal on every rank.

    Raises:
        UsageError: for a norm other than 2.
        NonFiniteError: if asked for.
        MismatchError: if ranks ran different steps.
    """
    if norm_type != 2.0:
        raise UsageError(f"norm_type = {norm_type}: only the 2-norm is available; use norm_type = 2")
    runtime = runtime_of(model)
    agreement = runtime.agree(measure=True)
    if error_if_nonfinite and not agreement.finite:
        raise NonFiniteError(f"the gradient norm is {agreement.norm}; lower the learning rate or look at the data")
    coefficient = max_norm / (agreement.norm + 1e-6)
    # As in torch, a norm that is not finite poisons the gradients rather than being hidden.
    if not coefficient >= 1.0:
        runtime.arena.mul_(coefficient)
        runtime.agreement = replace(agreement, norm=agreement.norm * coefficient)
    return torch.tensor(agreement.norm, dtype=torch.float32)
