"""Seconds of a part's kernels from measured ones: the model of :mod:`thinwire.cost.kernels`, corrected by them.

A kernel of a shape that was measured takes the measured time. Between and beyond measured shapes, the model says how
time grows with the shape, and the nearest measurements say by how much the model is off there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from thinwire.cost.blocks import ModelPart
from thinwire.cost.kernels import Kernels
from thinwire.errors import SpecError
from thinwire.spec.machines.kernels import KernelRow, KernelTable

__all__ = ["TabledKernels"]

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
        models: dict[str, Callable[[KernelRow], float]] = {
            "matmul": lambda row: super(TabledKernels, self).product(row.rows, row.columns, row.depth),
            "attention": lambda row: self._modelled_attention(row)[0],
            "attention_backward": lambda row: self._modelled_attention(row)[1],
            "elementwise": lambda row: super(TabledKernels, self).elementwise(row.rows),
            "update": lambda row: float(row.rows),
            "copy": lambda row: float(row.rows),
        }
        for row in table.rows:
            known = _Known(_logs(row.rows, row.columns, row.depth), math.log(row.seconds / models[row.kernel](row)))
            self._known.setdefault(row.kernel, []).append(known)
        lacking = [kernel for kernel in _NEEDED if kernel not in self._known]
        if lacking:
            raise SpecError(
                "kernels",
                [f"the times of {table.device} lack {' and '.join(lacking)}: use thinwire kernels"],
            )
        self._correction = cache(self._corrected)

    def product(self, rows: int, columns: int, depth: int, count: int = 1) -> float:
        """Seconds of ``count`` products of ``rows x depth`` and ``depth x columns``, corrected as a single one is."""
        return super().product(rows, columns, depth, count) * self._correction("matmul", (rows, columns, depth))

    def elementwise(self, values: float) -> float:
        """Seconds of kernels that read or write ``values`` values and are bound by memory."""
        return super().elementwise(values) * self._correction("elementwise", (values, 1, 1)) if values else 0.0

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
        if kernel not in self._known or not numel:
            return None if kernel not in self._known else 0.0
        return numel * self._correction(kernel, (numel, 1, 1))

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
