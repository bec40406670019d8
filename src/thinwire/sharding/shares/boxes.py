"""A contiguous piece of a flattened tensor as boxes of the tensor, which checkpoint formats know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Box", "boxes"]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor whose elements are contiguous.

    Attributes:
        offsets: first index in each dimension.
        sizes: extent in each dimension.
        start: first element within the piece.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], offset: int, length: int) -> list[Box]:
    """Cut elements ``[offset, offset + length)`` of a row-major tensor into as few boxes as there are.

    A piece of a matrix is at most the end of a row, whole rows, and the beginning of a row; each further dimension adds
    at most two boxes.

    Args:
        shape: of the tensor.
        offset: first element.
        length: elements; none give no box.
    """
    shape = tuple(shape)
    cut: list[Box] = []
    position, end = offset, offset + length
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while position < end:
        # The outermost dimension along which a box can begin here: all inner indices are zero, and one slice fits.
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
