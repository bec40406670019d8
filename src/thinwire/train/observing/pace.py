"""Which rank holds up the others.

All ranks leave a step together, so wall time does not tell: the slow one is the one that waits least. What counts is
the time that a rank spends on its own work, measured by its own clock, with what it waited for communication taken out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

from thinwire.units import format_duration

RECORDS: Final = 8
"""Records that a judgement is made of: medians over them forgive a rank that something disturbed once."""

SLOWER: Final = 1.25
"""Times as long as the median of the others, from which on a rank is called slow."""

_LEAST: Final = 1e-3
"""Seconds of a step below which nobody is held up."""


class Pace:
    """Compares the ranks of a data-parallel job; held by one of them.

    Args:
        hosts: name of every rank's host, by rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = tuple(hosts)
        self._records: deque[tuple[float, ...]] = deque(maxlen=RECORDS)
        self._slow: int | None = None

    def add(self, own: Sequence[float]) -> str | None:
        """Take a record's measurements.

        Args:
            own: seconds of a step that every rank spent on its own work, by rank.

        Returns:
            A sentence when a rank has become slow, or keeps up again; else None.
        """
        self._records.append(tuple(own))
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
        return (
            f"{self._name(slow)} is slow: a step takes it {format_duration(usual[rank])} of its own work and the "
            f"others {format_duration(others)} in the median, {usual[rank] / others - 1:.0%} more; all wait for it"
        )

    def _name(self, rank: int | None) -> str:
        assert rank is not None
        return f"rank {rank} on {self._hosts[rank]}"


def summarized(own: Sequence[float]) -> dict[str, float]:
    """What a record keeps of all ranks' times.

    Args:
        own: seconds of a step that every rank spent on its own work, by rank.

    Returns:
        ``median``, and ``slowest``, which is that of ``rank``.
    """
    rank = max(range(len(own)), key=own.__getitem__)
    return {"median": statistics.median(own), "slowest": own[rank], "rank": rank}
