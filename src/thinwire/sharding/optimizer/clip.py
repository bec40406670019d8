"""Clips gradients by their norm, with one pass over this rank's share and one small exchange."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.errors import NonFiniteError, UsageError
from thinwire.sharding.runtime.runtime import runtime_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Args:
        model: A sharded model.
        max_norm: Upper bound of the norm; ``inf`` only measures.
        norm_type: Order of the norm, as in torch: 2, 1, ``inf``, ...
        error_if_nonfinite: Whether to raise an error instead of returning NaN or infinity.

    Returns:
        The norm before clipping: a 0-D fp32 tensor, equal on every rank. It stays on the device if ranks exchange
        over NCCL, so that the host waits only if it reads the norm. Otherwise it is on the CPU.

    Raises:
        UsageError: ``norm_type`` is not 2, and the model is cut by tensor or pipeline parallelism.
        NonFiniteError: The norm is not finite, and ``error_if_nonfinite`` is true.
        MismatchError: Ranks ran different steps.
    """
    runtime = runtime_of(model)
    if norm_type == 2.0:
        norm = runtime.close_step(measure=True).norm
    elif (gradients := runtime.gradients) is None:
        raise UsageError(f"norm_type = {norm_type}: with tp or pp only the 2-norm is available; use norm_type = 2")
    else:
        runtime.close_step()
        norm = gradients.norm(float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(f"the gradient norm is {float(norm)}; lower the learning rate or look at the data")
    runtime.clip_gradients(norm.double(), max_norm)
    return norm.float()
