"""Clips gradients by their norm, with one pass over this rank's share and one small exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from thinwire.errors import NonFiniteError, UsageError
from thinwire.sharding.runtime.runtime import Runtime, runtime_of

__all__ = ["clip_grad_norm_", "multiply_gradients", "scale_to_norm", "spoil"]


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
    if norm_type != 2.0:
        return _clip_by(runtime, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    result = runtime.close_step(measure=True)
    if error_if_nonfinite and not result.finite:
        raise _nonfinite(result.norm)
    scale_to_norm([runtime], result.norm, max_norm)
    return result.norm.float()


def _clip_by(runtime: Runtime, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
    """Clip by a norm of another order than 2, which the step's agreement does not include."""
    if runtime.outside is None:
        raise UsageError(f"norm_type = {norm_type}: with tp or pp only the 2-norm is available; use norm_type = 2")
    runtime.close_step()
    norm = runtime.outside.gradients.norms.total(float(norm_type)) / runtime.step_check.gradient_scale
    if runtime.sharded.world is None:
        norm = norm.cpu()
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise _nonfinite(norm)
    if multiply_gradients(runtime, _clip_factor(runtime, norm.double(), max_norm)):
        runtime.outside.gradients.changed()
    return norm


def scale_to_norm(runtimes: Sequence[Runtime], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients of all parts of a model so that their norm is at most ``max_norm``.

    Args:
        runtimes: Runtimes of this rank's parts, whose norms are measured.
        norm: Norm of the whole model's gradient; 0-D, fp64.
        max_norm: Upper bound of the norm.
    """
    for runtime in runtimes:
        multiply_gradients(runtime, _clip_factor(runtime, norm, max_norm))
    spoil(runtimes, norm)


def multiply_gradients(runtime: Runtime, factor: torch.Tensor | float) -> bool:
    """Multiply the combined gradients by a factor, and divide them by the loss scale that they still contain, in one
    pass.

    Args:
        runtime: Runtime of a model, whose ranks have agreed on the step.
        factor: The factor; on the device 0-D, fp64.

    Returns:
        Whether gradients have changed. A factor on the device counts as a change, because the host does not know it.
    """
    step_check, arena = runtime.step_check, runtime.arena
    total = factor / step_check.gradient_scale
    step_check.multiplied(factor)
    if isinstance(total, torch.Tensor):
        # torch would round a factor without dimensions to the dtype of the gradients.
        torch.mul(arena, total.float().view(1), out=arena)
        return True
    if total != 1.0:
        arena.mul_(total)
    return total != 1.0


def spoil(runtimes: Sequence[Runtime], norm: torch.Tensor) -> None:
    """Make the norms of all parts of a model NaN if that of the whole model is not finite, so that no part is updated.

    Args:
        runtimes: Runtimes of this rank's parts, whose norms are measured.
        norm: Norm of the whole model's gradient; 0-D, fp64.
    """
    for runtime in runtimes:
        runtime.step_check.spoil(norm)


def _clip_factor(runtime: Runtime, norm: torch.Tensor, max_norm: float) -> torch.Tensor | float:
    """The factor that clips gradients. As in torch, a norm that is not finite spoils them, so that it does not go
    unnoticed."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return float(factor) if runtime.sharded.world is None else factor


def _nonfinite(norm: torch.Tensor) -> NonFiniteError:
    return NonFiniteError(f"the gradient norm is {float(norm)}; lower the learning rate or look at the data")
