"""What a freed parameter points at, since reading a storage of size zero crashes the process."""

from __future__ import annotations

import functools
import math

import torch


def husk_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a freed parameter of this shape points at. Parameters share it, except one that can be written to."""
    if math.prod(shape) == 1:
        return poison(dtype, device).clone().expand(shape)
    return _shared_husk(tuple(shape), dtype, device)


@functools.cache
def _shared_husk(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return poison(dtype, device).expand(shape)


@functools.cache
def poison(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A NaN, 0-D; zero in dtypes that have none."""
    with torch.inference_mode(False):
        return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
