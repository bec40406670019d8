"""Norms with running statistics, computed beside narrower parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["compute_beside_statistics", "keeps_statistics"]


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics and trainable factors."""
    return isinstance(module, _NormBase) and module.affine and module.running_mean is not None


def compute_beside_statistics(norm: nn.Module) -> Callable[[], None]:
    """Have a norm compute with its weight and bias in the dtype of its running statistics.

    torch takes an input in bf16 beside parameters in fp32, but no parameters in bf16 beside statistics in fp32, and
    statistics in bf16 would lose most of what a small momentum adds. What the norm returns has its input's dtype.

    Args:
        norm: for which :func:`keeps_statistics` holds; its parameters may change dtype between calls.

    Returns:
        A function that undoes it.
    """
    forward = norm.forward

    @functools.wraps(forward)
    def widened(*args: Any, **kwargs: Any) -> Any:
        statistics, table = norm.running_mean, norm._parameters
        assert isinstance(statistics, torch.Tensor)
        narrow = {
            name: parameter
            for name in ("weight", "bias")
            if isinstance(parameter := table[name], torch.Tensor) and parameter.dtype != statistics.dtype
        }
        try:
            for name, parameter in narrow.items():
                table[name] = parameter.to(statistics.dtype)  # type: ignore[assignment]  # no parameter: not trained
            return forward(*args, **kwargs)
        finally:
            for name, parameter in narrow.items():
                table[name] = parameter

    norm.forward = widened

    def undo() -> None:
        del norm.forward

    return undo
