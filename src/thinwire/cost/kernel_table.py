"""Seconds of a part's kernels from measured ones.

A kernel of a shape that was measured takes the measured time. Between and beyond measured shapes of products and of
attention, the model of :mod:`thinwire.cost.kernels` says how time grows with the shape, and the nearest measurements
say by how much the model is off there. Kernels that memory bounds have one size: between two, time is a straight line;
beyond the largest, it grows as the size does; below the smallest, it is the smallest one's, a launch for the most part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from thinwire.cost.blocks import ModelPart
from thinwire.cost.kernels import Kernels
from thinwire.errors import SpecError
from thinwire.spec.machines.kernels import KernelRow, KernelTable

_NEAR: Final = math.log(2.0)
"""Natural logarithm of the factor within which each dimension of a measured shape counts as the same."""

_NEEDED: Final = ("matmul", "elementwise")
"""Kernels that every model has."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A measured kernel: logarithms of its dimensions, and of its seconds over the model's."""

    shape: tuple[float, ...]
    correction: float


class TabledKernels(Kernels):
    """Kernels of one accelerator, of which some were measured.

    Args:
        table: The measurements.
        peak: Peak FLOP/s of matrix products.
        memory: Bytes per second of memory that kernels reach.

    Raises:
        SpecError: The table lacks a kind of kernel that every model has.
    """

    def __init__(self, table: KernelTable, peak: float, memory: float) -> None:
        super().__init__(peak, 0.8, memory, 0.35)
        self.table = table
        self._known: dict[str, list[_Known]] = {}
        self._lines: dict[str, list[tuple[int, float]]] = {}
        models: dict[str, Callable[[KernelRow], float]] = {
            "matmul": lambda row: super(TabledKernels, self).product(row.rows, row.columns, row.depth),
            "attention": lambda row: self._modelled_attention(row)[0],
            "attention_backward": lambda row: self._modelled_attention(row)[1],
        }
        for row in sorted(table.rows, key=lambda row: row.rows):
            if row.kernel not in models:
                self._lines.setdefault(row.kernel, []).append((row.rows, row.seconds))
                continue
            known = _Known(_logs(row.rows, row.columns, row.depth), math.log(row.seconds / models[row.kernel](row)))
            self._known.setdefault(row.kernel, []).append(known)
        lacking = [kernel for kernel in _NEEDED if kernel not in self._known and kernel not in self._lines]
        if lacking:
            raise SpecError(
                "kernels",
                f"the times of {table.device} lack {' and '.join(lacking)}: use thinwire kernels",
            )
        self._correction = cache(self._corrected)

    def product(self, rows: int, columns: int, depth: int, count: int = 1) -> float:
        """Seconds of ``count`` products of ``rows x depth`` and ``depth x columns``, corrected as a single one is."""
        return super().product(rows, columns, depth, count) * self._correction("matmul", (rows, columns, depth))

    def elementwise(self, values: float) -> float:
        """Seconds of kernels that read or write ``values`` values and are bound by memory."""
        return self._on_line("elementwise", values) if values else 0.0

    def attention(self, tokens: int, seq: int, width: int, heads: int) -> tuple[float, float]:
        """Seconds of the forward and of the backward of attention."""
        forward, backward = super().attention(tokens, seq, width, heads)
        shape = tokens, width, seq
        return (
            forward * self._correction("attention", shape),
            backward * self._correction("attention_backward", shape),
        )

    def per_element(self, kernel: str, numel: float) -> float | None:
        """Seconds of ``update`` or ``copy`` on ``numel`` elements; ``None`` if it was not measured."""
        if kernel not in self._lines:
            return None
        return self._on_line(kernel, numel) if numel else 0.0

    def covers(self, part: ModelPart, sequences: int, seq: int) -> bool:
        """Whether shapes within a factor of two of all matrix products and of attention were measured.

        Products of all experts in one kernel are not among the measurements.
        """
        if part.routed is not None:
            return False
        tokens = sequences * seq
        shapes = [("matmul", (tokens, rows, columns)) for rows, columns in part.matrices]
        if part.attention_width:
            shapes.append(("attention", (tokens, part.attention_width, seq)))
        return all(self._distance(kernel, shape) <= _NEAR for kernel, shape in shapes)

    def _modelled_attention(self, row: KernelRow) -> tuple[float, float]:
        return super().attention(row.rows, row.depth, row.columns, max(1, row.heads))

    def _distance(self, kernel: str, shape: tuple[float, ...]) -> float:
        """Largest difference of the logarithms of a dimension to the nearest measured shape."""
        logs = _logs(*shape)
        known = (max(abs(a - b) for a, b in zip(logs, row.shape, strict=True)) for row in self._known.get(kernel, ()))
        return min(known, default=math.inf)

    def _on_line(self, kernel: str, size: float) -> float:
        """Seconds of a kernel that memory bounds."""
        sizes, seconds = zip(*self._lines[kernel], strict=True)
        if size > sizes[-1]:
            return float(seconds[-1] * size / sizes[-1])
        return float(np.interp(size, sizes, seconds))

    def _corrected(self, kernel: str, shape: tuple[float, ...]) -> float:
        """Measured over modelled seconds near a shape: the geometric mean, weighted by 1 over distance squared."""
        logs, total, weights = _logs(*shape), 0.0, 0.0
        for row in self._known.get(kernel, ()):
            square = sum((a - b) ** 2 for a, b in zip(logs, row.shape, strict=True))
            if square < 1e-12:
                return math.exp(row.correction)
            total += row.correction / square
            weights += 1 / square
        return math.exp(total / weights) if weights else 1.0


def _logs(*sizes: float) -> tuple[float, ...]:
    return tuple(math.log(size) for size in sizes)
