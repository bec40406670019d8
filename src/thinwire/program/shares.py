"""Padding of flat buffers and assignment of optimizer shards: arithmetic that the runtime and the planner share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import overload

from thinwire.spec import Plan

ALIGNMENT_BYTES = 16

CHUNK_MULTIPLE = 8192
"""The part of a piece in a chunk has a multiple of this many elements, unless it is the last: codecs' blocks stay
whole."""

Span = tuple[int, int]
"""Begin and end of a chunk in every piece of a vector. A piece that ends earlier has less of the chunk, or nothing."""

LARGE_LEAF = 100
"""A leaf outside the blocks (embedding, head) becomes a unit if it holds at least 1/LARGE_LEAF of all parameters."""


@dataclass(frozen=True, slots=True)
class Even(Sequence[int]):
    """``number`` pieces of ``size`` elements each, in constant space, so that plans for 100,000 ranks stay small."""

    size: int
    number: int

    def __len__(self) -> int:
        return self.number

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Even: ...
    def __getitem__(self, index: int | slice) -> int | Even:
        if isinstance(index, slice):
            return Even(self.size, len(range(*index.indices(self.number))))
        if not -self.number <= index < self.number:
            raise IndexError(index)
        return self.size


def compact(pieces: Sequence[int]) -> Sequence[int]:
    """The sizes as :class:`Even` if they are all equal, otherwise as a tuple."""
    if isinstance(pieces, Even):
        return pieces
    even = len(set(pieces)) == 1
    return Even(pieces[0], len(pieces)) if even else tuple(pieces)


def summed(pieces: Sequence[int], size_of: Callable[[int], int] = int) -> int:
    """The sum of ``size_of(piece)`` over all pieces."""
    return pieces.number * size_of(pieces.size) if isinstance(pieces, Even) else sum(map(size_of, pieces))


def together(shares: Sequence[Sequence[int]]) -> Sequence[int]:
    """Each owner's number of elements, summed over several buffers."""
    if all(isinstance(of_buffer, Even) for of_buffer in shares):
        return Even(sum(of_buffer[0] for of_buffer in shares), len(shares[0]))
    return tuple(sum(column) for column in zip(*shares, strict=True))


def chunk_spans(longest: int, chunks: int, members: int = 1) -> list[Span]:
    """Cut the pieces of a vector into chunks, each with a part of every piece.

    Args:
        longest: Number of elements of the longest piece.
        chunks: Largest number of chunks. Short pieces have fewer, so that no chunk but the last has less than
            ``CHUNK_MULTIPLE`` elements of each part.
        members: Number of parts that a piece's part in a chunk is cut into later.

    Returns:
        The chunks, at least one. Their lengths are equal multiples of ``members``.
    """
    if chunks == 1:
        return [(0, padded(max(longest, 1), members))]
    step = members * padded(-(-longest // (chunks * members)), CHUNK_MULTIPLE)
    return [(begin, begin + step) for begin in range(0, max(longest, 1), max(step, 1))]


def within(pieces: Sequence[int], span: Span) -> Sequence[int]:
    """Number of elements of each piece in a chunk."""
    begin, end = span
    if isinstance(pieces, Even):
        return Even(max(0, min(end, pieces.size) - begin), pieces.number)
    return tuple(max(0, min(end, piece) - begin) for piece in pieces)


def padded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def flat_numel(payload: int, plan: Plan, itemsize: int, block: int | None = None) -> int:
    """Padded length of a flat buffer whose last parameter ends at ``payload``; shards of every factor are equal and
    16-byte aligned. With a ``block``, P shards consist of whole blocks of so many elements."""
    if block is not None:  # nobody owns shares of it
        return padded(max(payload, 1), plan.params.ranks * block)
    return padded(max(payload, 1), plan.world * max(1, ALIGNMENT_BYTES // itemsize))


def slot_offsets(numels: Iterable[int], itemsize: int, block: int | None = None) -> list[int]:
    """The first element of each parameter in a flat buffer.

    Each begins at a multiple of 16 bytes, as tensors of their own do: matrix multiplications are slow on others. What
    is left between two parameters is padding.

    Args:
        numels: Number of elements of each parameter.
        itemsize: Bytes of an element.
        block: Elements of a codec's block, none of which then holds elements of two parameters; a multiple of 8.
    """
    offsets, end = [], 0
    for numel in numels:
        offsets.append(padded(end, block or max(1, ALIGNMENT_BYTES // itemsize)))
        end = offsets[-1] + numel
    return offsets


def deal(lengths: Sequence[int], owners: int) -> list[int]:
    """Assign pieces greedily, largest first and equals in this order, to the owner that holds the fewest elements so
    far."""
    heap = [(0, owner) for owner in range(min(owners, len(lengths)))]  # further owners get nothing
    owner_of = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, owner = heapq.heappop(heap)
        owner_of[index] = owner
        heapq.heappush(heap, (load + lengths[index], owner))
    return owner_of
