"""Runs norms with fp32 running statistics whose parameters have a narrower dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is a batch or instance norm with running statistics, a weight and a bias."""
    return isinstance(module, _NormBase) and module.affine and module.running_mean is not None


def compute_beside_statistics(norm: nn.Module) -> Callable[[], None]:
    """Make a norm that :func:`keeps_statistics` widen its weight and bias to their dtype.

    torch accepts a bf16 input with fp32 parameters, but it rejects bf16 parameters with fp32 statistics. Statistics in
    bf16 would lose most of what a small momentum adds. The norm's output has the dtype of its input, and
    its parameters may change dtype between calls.

    Returns:
        A function that restores the norm.
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
    return functools.partial(delattr, norm, "forward")
