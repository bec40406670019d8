# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Slices of a tensor that one launch encodes: row i of the grid makes message i."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slices:
    """How a kernel finds slices: ``same`` for the whole tensor, ``regular`` for slices of equal length and distance,
    ``table`` for all others."""

    mode: str
    table: Tensor
    start: int
    step: int
    """Distance between slices in values; with a table, the number of values in its unit."""

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]] | None, source: Tensor) -> Slices:
        """Make slices from the (start, stop) of each. ``source`` also replaces the table if none is needed."""
        if bounds is None:
            return cls("same", source, 0, 0)
        starts = [start for start, _ in bounds]
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        same = len({stop - start for start, stop in bounds}) == 1
        if same and all(start == starts[0] + index * step for index, start in enumerate(starts)):
            return cls("regular", source, starts[0], step)
        # In units of 16 values if possible, so that the compiler knows the alignment and loads stay wide.
        unit = 1 if any(start % 16 for start in starts) else 16
        return cls("table", _table(tuple(bounds), unit, source.device), 0, unit)


@functools.cache
def _table(bounds: tuple[tuple[int, int], ...], unit: int, device: torch.device) -> Tensor:
    """Starts and lengths of slices on the device. They are cached, because a training loop uses the same slices in
    every step, and should not copy them to the device each time. None is ever given back: its memory would go to the
    stream that made it, while a kernel of another stream may still read it."""
    return torch.tensor([[start // unit, stop - start] for start, stop in bounds], dtype=torch.int64, device=device)


# ------------------------------------------------------------------------------------------------------ device


@triton.jit
def slice_of(table, numel, start, step, row, MODE: tl.constexpr):
    """Start of slice ``row`` (int64) in the tensor, and its number of values; both in 64 bits."""
    offset = row * 0
    numel = offset + numel
    if MODE == "regular":
        offset = start + row * step
    elif MODE == "table":
        offset = tl.load(table + 2 * row) * step
        numel = tl.load(table + 2 * row + 1)
    return offset, numel
