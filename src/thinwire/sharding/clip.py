"""The gradient norm, and clipping to it: one pass over this rank's share and one small exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from thinwire.errors import NonFiniteError, UsageError
from thinwire.sharding.runtime import Runtime, runtime_of

__all__ = ["clip_grad_norm_", "poison", "scale_to_norm"]


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their norm over the whole model is at most ``max_norm``.

    Args:
        model: a sharded model.
        max_norm: the bound; ``inf`` only measures.
        norm_type: order of the norm, as in torch: 2, 1, ``inf``, ...
        error_if_nonfinite: raise on NaN or infinity instead of returning it.

    Returns:
        The norm before clipping, a 0-D fp32 tensor on the CPU, equal on every rank.

    Raises:
        UsageError: for a norm other than 2 of a model that tensor or pipeline parallelism has cut.
        NonFiniteError: if asked for.
        MismatchError: if ranks ran different steps.
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
    """Clip to a norm that the step's agreement does not carry."""
    if runtime.outside is None:
        raise UsageError(f"norm_type = {norm_type}: with tp or pp only the 2-norm is available; use norm_type = 2")
    runtime.agree(measure=False)
    runtime.reducer.join()
    norm = runtime.outside.norms.total(float(norm_type))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(f"the gradient norm is {float(norm)}; lower the learning rate or look at the data")
    coefficient = max_norm / (float(norm) + 1e-6)
    if not coefficient >= 1.0:  # a norm that is not a number poisons the gradients, as in torch
        runtime.arena.mul_(coefficient)
        runtime.outside.changed_gradients()
    return norm


def scale_to_norm(runtimes: Sequence[Runtime], norm: float, max_norm: float) -> None:
    """Scale the gradients of all parts of a model so that their norm is at most ``max_norm``.

    Args:
        runtimes: of this rank's parts, whose ranks have agreed on their norms.
        norm: of the whole model's gradient.
        max_norm: the bound.
    """
    coefficient = max_norm / (norm + 1e-6)
    # As in torch, a norm that is not finite poisons the gradients rather than being hidden.
    if coefficient >= 1.0:
        return
    for runtime in runtimes:
        runtime.arena.mul_(coefficient)
    if not math.isfinite(norm):
        poison(runtimes)
        return
    for runtime in runtimes:
        agreement = runtime.agree(measure=True)
        runtime.set_norm(agreement.norm * coefficient)


def poison(runtimes: Sequence[Runtime]) -> None:
    """Have no part of a model take a step whose gradient is finite in this part and not in another.

    Args:
        runtimes: of this rank's parts, whose ranks have agreed on their norms.
    """
    for runtime in runtimes:
        runtime.agree(measure=True)
        runtime.set_norm(math.nan)
