"""Records exchanges, and counts the bytes that a rank sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from thinwire.program import Kind, Lane, Scope

__all__ = [
    "Meter",
    "Record",
    "recording",
]


@dataclass(frozen=True, slots=True)
class Record:
    """An exchange that was performed; ``sent`` counts the bytes that this rank sent."""

    lane: Lane
    kind: Kind
    scope: Scope
    ranks: tuple[int, ...]
    sent: int


_recorders: list[list[Record]] = []
_recorder_lock = threading.Lock()


@contextlib.contextmanager
def recording() -> Iterator[list[Record]]:
    """Record every exchange of this process, for each lane in the order of execution."""
    records: list[Record] = []
    with _recorder_lock:
        _recorders.append(records)
    try:
        yield records
    finally:
        with _recorder_lock:
            _recorders[:] = [other for other in _recorders if other is not records]


class Meter:
    """Bytes sent by this rank, by lane and scope."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[Lane, dict[Scope, int]] = {}

    def add(self, lane: Lane, scope: Scope, sent: int) -> None:
        """Count bytes sent."""
        with self._lock:
            by_scope = self._sent.setdefault(lane, dict.fromkeys(Scope, 0))
            by_scope[scope] += sent

    def take(self) -> dict[Lane, dict[Scope, int]]:
        """Bytes sent since the last call."""
        with self._lock:
            taken, self._sent = self._sent, {}
        return {lane: taken.get(lane, dict.fromkeys(Scope, 0)) for lane in Lane}


def is_recording() -> bool:
    """Whether a recording is under way."""
    return bool(_recorders)


def note(record: Record) -> None:
    """Add an exchange to every recording that is under way."""
    with _recorder_lock:
        for records in _recorders:
            records.append(record)
