"""Clips gradients by their norm, with one pass over this rank's share and one small exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from thinwire.errors import NonFiniteError, UsageError
from thinwire.sharding.runtime import Runtime, runtime_of

__all__ = ["clip_grad_norm_", "multiply_gradients", "poison", "scale_to_norm"]


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
        The norm before clipping: a 0-D fp32 tensor on the CPU, equal on every rank.

    Raises:
        UsageError: ``norm_type`` is not 2, and the model is cut by tensor or pipeline parallelism.
        NonFiniteError: The norm is not finite, and ``error_if_nonfinite`` is true.
        MismatchError: Ranks ran different steps.
    """
    runtime = runtime_of(model)
    if norm_type != 2.0:
        return _clip_by(runtime, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
    agreement = runtime.agree(measure=True)
    if error_if_nonfinite and not agreement.finite:
        raise NonFiniteError(f"the gradient norm is {agreement.norm}; lower the learning rate or look at the data")
    scale_to_norm([runtime], agreement.norm, max_norm)
    return torch.tensor(agreement.norm, dtype=torch.float32)


def _clip_by(runtime: Runtime, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
    """Clip by a norm of another order than 2, which the step's agreement does not include."""
    if runtime.outside is None:
        raise UsageError(f"norm_type = {norm_type}: with tp or pp only the 2-norm is available; use norm_type = 2")
    runtime.agree(measure=False)
    runtime.reducer.join()
    norm = runtime.outside.norms.total(float(norm_type)) / runtime.agreements.gradient_scale
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(f"the gradient norm is {float(norm)}; lower the learning rate or look at the data")
    coefficient = max_norm / (float(norm) + 1e-6)
    # As in torch, a NaN norm turns the gradients into NaN.
    if not coefficient >= 1.0 or runtime.agreements.gradient_scale != 1.0:
        multiply_gradients(runtime, 1.0 if coefficient >= 1.0 else coefficient)
        runtime.outside.changed_gradients()
    return norm


def scale_to_norm(runtimes: Sequence[Runtime], norm: float, max_norm: float) -> None:
    """Scale the gradients of all parts of a model so that their norm is at most ``max_norm``.

    Args:
        runtimes: Runtimes of this rank's parts, whose ranks have agreed on their norms.
        norm: Norm of the whole model's gradient.
        max_norm: Upper bound of the norm.
    """
    coefficient = max_norm / (norm + 1e-6)
    # As in torch, a norm that is not finite spoils the gradients, so that it does not go unnoticed.
    for runtime in runtimes:
        runtime.agree(measure=True)
        multiply_gradients(runtime, 1.0 if coefficient >= 1.0 else coefficient)
    if not math.isfinite(norm):
        poison(runtimes)


def multiply_gradients(runtime: Runtime, factor: float) -> None:
    """Multiply the combined gradients by a factor, and divide them by the loss scale that they still contain, in one
    pass.

    Args:
        runtime: Runtime of a model, whose ranks have agreed on the step.
        factor: The factor.
    """
    total = factor / runtime.agreements.gradient_scale
    if total != 1.0:
        runtime.arena.mul_(total)
    runtime.agreements.multiplied(factor)


def poison(runtimes: Sequence[Runtime]) -> None:
    """Set the norm of all parts of a model to NaN, because the gradient of one part is not finite.

    Args:
        runtimes: Runtimes of this rank's parts, whose ranks have agreed on their norms.
    """
    for runtime in runtimes:
        runtime.agree(measure=True)
        runtime.set_norm(math.nan)
