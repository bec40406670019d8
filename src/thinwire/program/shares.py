"""How flat buffers are padded, and how optimizer shards are dealt: the arithmetic that runtime and planner share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

from thinwire.spec import Plan

__all__ = ["ALIGNMENT_BYTES", "LARGE_LEAF", "Even", "compact", "deal", "flat_numel", "padded", "summed", "together"]

ALIGNMENT_BYTES = 16

LARGE_LEAF = 100
"""A leaf outside the blocks (embedding, head) is a unit when it holds at least 1/LARGE_LEAF of the parameters."""


@dataclass(frozen=True, slots=True)
class Even(Sequence[int]):
    """``number`` pieces of ``size`` elements each, in constant space: plans are priced for 100,000 ranks too."""

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
    """The same sizes, as :class:`Even` if they are equal, else as a tuple."""
    if isinstance(pieces, Even):
        return pieces
    even = len(set(pieces)) == 1
    return Even(pieces[0], len(pieces)) if even else tuple(pieces)


def summed(pieces: Sequence[int], size_of: Callable[[int], int] = int) -> int:
    """The sum of ``size_of`` each piece."""
    return pieces.number * size_of(pieces.size) if isinstance(pieces, Even) else sum(map(size_of, pieces))


def together(shares: Sequence[Sequence[int]]) -> Sequence[int]:
    """What each owner has of several buffers in all."""
    if all(isinstance(of_buffer, Even) for of_buffer in shares):
        return Even(sum(of_buffer[0] for of_buffer in shares), len(shares[0]))
    return tuple(sum(column) for column in zip(*shares, strict=True))


def padded(numel: int, multiple: int) -> int:
    """``numel`` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def flat_numel(payload: int, plan: Plan, itemsize: int) -> int:
    """Length of a flat buffer of ``payload`` elements: every shard of every factor is equal and aligned to 16 bytes."""
    return padded(max(payload, 1), plan.world * max(1, ALIGNMENT_BYTES // itemsize))


def deal(lengths: Sequence[int], owners: int) -> list[int]:
    """Deal pieces greedily, largest first, each to the owner that holds least so far.

    Args:
        lengths: of the pieces, in an order that settles ties.
        owners: how many there are.

    Returns:
        The owner of each piece.
    """
    heap = [(0, owner) for owner in range(owners)]
    owner_of = [0] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, owner = heapq.heappop(heap)
        owner_of[index] = owner
        heapq.heappush(heap, (load + lengths[index], owner))
    return owner_of
