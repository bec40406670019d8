"""Finds the rank that slows down the others, or whose GPU has no room.

All ranks finish a step together, so their wall times are equal; the slow rank is the one that waits least. The ranks
are therefore compared by the time that they spend on their own work: wall time minus the time spent waiting for
communication.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from thinwire.units import format_bytes, format_duration

RECORDS: Final = 8
"""Number of records per judgement. Their median tolerates a single disturbance of a rank."""

SLOWER: Final = 1.25
"""Factor over the median of the other ranks from which a rank is called slow."""

_LEAST: Final = 1e-3
"""Difference in seconds per step below which no rank is called slow."""

_EVERY: Final = 0.25
"""Seconds of steps from which they count as a record. A scheduler gives one rank more than another for tenths of a
second, which are many steps of a tiny model."""


class Pace:
    """Compares the ranks of a data-parallel job; only one rank has this object."""

    def __init__(self, hosts: Sequence[str], *, islands: int = 1) -> None:
        self._hosts, self._islands = tuple(hosts), islands
        self._records: deque[tuple[float, ...]] = deque(maxlen=RECORDS)
        self._pending: list[Sequence[float]] = []
        self._seconds = 0.0  # of what is pending
        self._slow: int | None = None

    def add(self, own: Sequence[float], seconds: float) -> str | None:
        """Add the seconds of a step that each rank spent on its own work, measured over ``seconds`` of steps. Returns a
        sentence if a rank has become slow or keeps up again."""
        self._pending.append(own)
        self._seconds += seconds
        if self._seconds < _EVERY:
            return None
        self._records.append(tuple(statistics.fmean(column) for column in zip(*self._pending, strict=True)))
        self._pending, self._seconds = [], 0.0
        if len(self._records) < RECORDS or len(own) < 2:
            return None
        usual = [statistics.median(column) for column in zip(*self._records, strict=True)]
        rank = max(range(len(usual)), key=usual.__getitem__)
        others = statistics.median(usual[:rank] + usual[rank + 1 :])
        slow = rank if usual[rank] > max(SLOWER * others, others + _LEAST) else None
        before, self._slow = self._slow, slow
        if slow == before:
            return None
        # The records that led here were made under both circumstances.
        self._records.clear()
        if slow is None:
            return f"{self._name(before)} keeps up with the others again"
        who = "all wait for it" if self._islands == 1 else "its island waits for it, and the others when they exchange"
        more = f", {usual[rank] / others - 1:.0%} more" if others else ""  # others may do nothing but wait
        return (
            f"{self._name(slow)} is slow: a step takes it {format_duration(usual[rank])} of its own work and the "
            f"others {format_duration(others)} in the median{more}; {who}"
        )

    def _name(self, rank: int | None) -> str:
        assert rank is not None
        return f"rank {rank} on {self._hosts[rank]}"


def summarized(own: Sequence[float], *, comparable: bool) -> dict[str, float]:
    """``median`` and ``slowest`` of the seconds of a step that each rank spent on its own work; ``rank`` is the
    slowest, where ranks are ``comparable``."""
    rank = max(range(len(own)), key=own.__getitem__)
    seconds = {"median": statistics.median(own), "slowest": own[rank]}
    return seconds | {"rank": rank} if comparable else seconds


class AllocatorWatch:
    """Says once for each rank that torch's caching allocator ran out of room on it.

    Gathered units of different sizes come and go, so memory may be free and yet of no use (DeepSpeed's ZeRO-3 on EFA
    spends most of its memory work on this). A retry stops the device: the allocator waits for all streams, gives cached
    memory back to the device, and asks again.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._told: set[int] = set()

    def add(self, retries: Sequence[int], memory: Mapping[str, Sequence[int]]) -> str | None:
        """Add the measurements of a record: how often each rank has retried since the start, and figures of GPUs.
        Returns a sentence if a rank has retried for the first time."""
        new = [rank for rank, count in enumerate(retries) if count and rank not in self._told]
        if not new:
            return None
        self._told.update(new)
        rank = max(new, key=retries.__getitem__)
        held, used, idle = (format_bytes(memory[name][rank]) for name in ("reserved", "cuda", "pieces"))
        others = f", and {len(new) - 1} more," if len(new) > 1 else ""
        return (
            f"rank {rank} on {self._hosts[rank]}{others} ran out of room: the allocator emptied its cache, which stops "
            f"the device. It held up to {held}, tensors {used}, and {idle} lay idle in pieces; set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True if it is not, or lower plan.micro_batch"
        )
