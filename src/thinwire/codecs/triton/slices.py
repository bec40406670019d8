# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Slices of a tensor that become messages in one launch: row i of the grid makes message i."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Slices", "slice_of"]


@dataclass(frozen=True, slots=True)
class Slices:
    """How a kernel finds them: ``same`` for all of the tensor, ``regular`` for slices of one length and at one
    distance, ``table`` for any others."""

    mode: str
    table: Tensor
    start: int
    step: int
    """Values between slices; with a table, values in its unit."""

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]] | None, source: Tensor) -> Slices:
        """Of (start, stop) of each slice of ``source``, which also stands in for a table where none is needed."""
        if bounds is None:
            return cls("same", source, 0, 0)
        starts = [start for start, _ in bounds]
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        same = len({stop - start for start, stop in bounds}) == 1
        if same and all(start == starts[0] + index * step for index, start in enumerate(starts)):
            return cls("regular", source, starts[0], step)
        # In units of 16 values where that goes, so that the compiler knows: loads stay wide.
        unit = 1 if any(start % 16 for start in starts) else 16
        return cls("table", _table(tuple(bounds), unit, source.device), 0, unit)


@functools.lru_cache(maxsize=64)
def _table(bounds: tuple[tuple[int, int], ...], unit: int, device: torch.device) -> Tensor:
    """Starts and lengths of slices. Kept, since a training loop asks for the same again and again and the copy to the
    device should not be part of its steps."""
    return torch.tensor([[start // unit, stop - start] for start, stop in bounds], dtype=torch.int64).to(device)


# ------------------------------------------------------------------------------------------------------ device


@triton.jit
def slice_of(table, numel, start, step, row, MODE: tl.constexpr):
    """Where slice ``row`` (int64) starts in the tensor, and how many values it has; both in 64 bits."""
    offset = row * 0
    numel = offset + numel
    if MODE == "regular":
        offset = start + row * step
    elif MODE == "table":
        offset = tl.load(table + 2 * row) * step
        numel = tl.load(table + 2 * row + 1)
    return offset, numel
