"""Cuts a contiguous piece of a flattened tensor into boxes of the tensor, which checkpoint formats can describe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor with contiguous elements.

    Attributes:
        offsets: First index in each dimension.
        sizes: Number of indices in each dimension.
        start: First element, relative to the piece.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], offset: int, length: int) -> list[Box]:
    """Cut elements ``[offset, offset + length)`` of a row-major tensor into as few boxes as possible.

    A piece of a matrix has at most three boxes: the end of a row, whole rows, and the beginning of a row. Each further
    dimension adds at most two boxes. A piece of length 0 has none.
    """
    shape = tuple(shape)
    cut: list[Box] = []
    position, end = offset, offset + length
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while position < end:
        # The outermost dimension along which a box can begin: all inner indices are zero, and one slice fits.
        dim = next(
            (dim for dim, stride in enumerate(strides) if position % stride == 0 and position + stride <= end),
            len(shape) - 1,
        )
        if not shape:
            cut.append(Box((), (), position - offset))
            break
        index, rest = [], position
        for stride in strides:
            index.append(rest // stride)
            rest %= stride
        count = min((end - position) // strides[dim], shape[dim] - index[dim])
        sizes = (*([1] * dim), count, *shape[dim + 1 :])
        cut.append(Box(tuple(index), sizes, position - offset))
        position += count * strides[dim]
    return cut
