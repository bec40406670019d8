"""How flat buffers are padded, and how optimizer shards are dealt: the arithmetic that runtime and planner share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from thinwire.spec import Plan

__all__ = ["ALIGNMENT_BYTES", "deal", "flat_numel", "padded"]

ALIGNMENT_BYTES = 16


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
