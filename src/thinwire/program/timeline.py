"""Timelines of measured or simulated steps, and their export as Chrome/Perfetto traces."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COMPUTE = "compute"
"""The track of computation."""
WAITING = "waiting"
"""The track of the time that computation waits for a lane."""
STEP = "step"
"""The track of whole steps."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of activity on one track, which is computation or a stage of a lane, in seconds of the timeline's
    clock."""

    track: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Level:
    """An amount of memory in bytes from a point in time on, in seconds of the timeline's clock."""

    name: str
    time: float
    amount: int


class Timeline:
    """Spans of one rank, in the order in which they ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def add(self, track: str, name: str, start: float, end: float) -> None:
        """Record that an activity ran from ``start`` to ``end`` (seconds)."""
        with self._lock:
            self._spans.append(Span(track, name, start, end))

    @property
    def spans(self) -> tuple[Span, ...]:
        with self._lock:
            return tuple(self._spans)


def chrome_trace(
    by_rank: Mapping[int, Iterable[Span]], levels: Mapping[int, Iterable[Level]] | None = None
) -> dict[str, Any]:
    """Convert spans to Chrome's trace-event format, which Perfetto and chrome://tracing display.

    Each rank becomes a process, each track a thread and each level a counter. Time starts at the first span.
    """
    spans_of = {rank: list(spans) for rank, spans in by_rank.items()}
    origin = min((span.start for spans in spans_of.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, spans in sorted(spans_of.items()):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        tracks = sorted({span.track for span in spans}, key=_track_order)
        for number, track in enumerate(tracks):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}
            )
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.track,
                "pid": rank,
                "tid": tracks.index(span.track),
                "ts": round((span.start - origin) * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
            }
            for span in sorted(spans, key=lambda span: (span.start, -span.end))
        ]
    for rank, of_rank in (levels or {}).items():
        events += [
            {
                "ph": "C",
                "name": level.name,
                "pid": rank,
                "ts": (level.time - origin) * 1e6,
                "args": {"MiB": level.amount / 2**20},
            }
            for level in of_rank
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _track_order(track: str) -> tuple[bool, bool, bool, str]:
    return track != STEP, track != COMPUTE, track != WAITING, track
