"""Which hooks of DeepSpeed fetch what, replayed from its rules: those that ZeRO++'s second shard depends on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

PREFETCH = 50_000_000
"""Elements that a hook asks for ahead (``stage3_prefetch_bucket_size``), the last tensor in whole."""


class _Hook(StrEnum):
    """The pass to which a hook belongs."""

    FORWARD = "forward"
    AGAIN = "forward again"
    BACKWARD = "backward"


class _Visit(NamedTuple):
    """One module of a step, which has one large tensor: its own number, and the pass."""

    tensor: int
    hook: _Hook


@lru_cache(maxsize=64)
def share_of_recomputation(blocks: tuple[tuple[int, ...], ...], ends: tuple[int, ...], live: int, reuse: int) -> float:
    """Share of what a backward with recomputation fetches that hooks of the repeated forward ask for.

    These hooks say that they are of a forward, for which ZeRO++ gathers over all ranks. Only hooks of the backward
    gather from the second shard inside the node (``all_gather_coalesced`` of DeepSpeed 0.10). Every hook fetches its
    module's tensors, and ahead of later visits up to :data:`PREFETCH` elements, while no more than ``live`` are
    gathered. A tensor is released after its module, unless it is needed again within ``reuse`` elements.

    Args:
        blocks: Elements of the large tensors of each block, in order.
        ends: The same of what lies outside of blocks.
        live: Elements that may be gathered at the same time (``stage3_max_live_parameters``).
        reuse: Elements within which a tensor stays (``stage3_max_reuse_distance``).

    Returns:
        The share; 0 if everything is still gathered.
    """
    sizes = [size for block in blocks for size in block] + list(ends)
    visits = _visits([len(block) for block in blocks], len(ends))
    fetched = dict.fromkeys(_Hook, 0)
    queue = deque(enumerate(visits))
    asked = [-1] * len(sizes)  # the last visit for which a tensor has been asked
    gathered: set[int] = set()
    live_now = 0
    for at, (tensor, hook) in enumerate(visits):
        wanted = [] if tensor in gathered else [(at, tensor)]
        if asked[tensor] < at:
            while queue and queue[0][0] <= at:
                visit, (passed, _) = queue.popleft()
                asked[passed] = visit
        live_now += sum(sizes[other] for _, other in wanted)
        room, ahead = min(live - live_now, PREFETCH), 0
        while queue and ahead < room:
            visit, (other, _) = queue.popleft()
            asked[other] = max(asked[other], visit)
            if other not in gathered and other != tensor and all(other != known for _, known in wanted):
                wanted.append((visit, other))
                ahead += sizes[other]
        live_now += ahead
        for visit, other in wanted:
            gathered.add(other)
            if visits[visit].hook is not _Hook.FORWARD:
                fetched[hook] += sizes[other]
        if asked[tensor] <= at and not _needed_soon(tensor, visits, at + 1, sizes, reuse):
            gathered.discard(tensor)
            live_now -= sizes[tensor]
    inside, across = fetched[_Hook.BACKWARD], fetched[_Hook.AGAIN]
    return across / (inside + across) if across else 0.0


def _visits(lengths: Sequence[int], ends: int) -> list[_Visit]:
    """The modules of a step in order. What lies outside of blocks is visited last in the forward."""
    starts = [sum(lengths[:block]) for block in range(len(lengths))]
    tensors = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    outside = range(sum(lengths), sum(lengths) + ends)
    visits = [_Visit(tensor, _Hook.FORWARD) for of_block in tensors for tensor in of_block]
    visits += [_Visit(tensor, _Hook.FORWARD) for tensor in outside]
    visits += [_Visit(tensor, _Hook.BACKWARD) for tensor in reversed(outside)]
    for of_block in reversed(tensors):
        visits += [_Visit(tensor, _Hook.AGAIN) for tensor in of_block]
        visits += [_Visit(tensor, _Hook.BACKWARD) for tensor in reversed(of_block)]
    return visits


def _needed_soon(tensor: int, visits: Sequence[_Visit], start: int, sizes: Sequence[int], reuse: int) -> bool:
    """Whether a tensor is visited again before so many elements have been."""
    passed = 0
    for other, _ in visits[start:]:
        if passed >= reuse:
            return False
        if other == tensor:
            return True
        passed += sizes[other]
    return False
