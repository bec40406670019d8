"""What lanes need of a worker, which runs the bodies of one stage, of the tickets that it returns, and of the recorder
to which all workers of a model report."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

from thinwire.collectives.links.streams import StreamEvent, Streams
from thinwire.program.timeline import COMPUTE, Timeline

Body: TypeAlias = Callable[[], None]


Mark: TypeAlias = float | StreamEvent | None
"""A moment of computation: seconds of ``time.perf_counter``, or an event on a stream; ``None`` without a timeline."""


def nothing() -> None:
    """The body of a ticket whose work is done."""


class Ticket(ABC):
    """A submitted body. The ticket keeps the body's memory alive until the body has finished.

    Attributes:
        failed: Whether the body, or what it had to wait for, has raised on a thread of its own.
    """

    failed = False

    @abstractmethod
    def wait(self) -> None:
        """Let computation continue only after the body has finished; re-raises the body's error."""

    @abstractmethod
    def settle(self) -> None:
        """Block the host until the body has finished; re-raises the body's error."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the body has finished; does not wait."""


class Recorder:
    """Collects the spans of all workers while a timeline is recorded.

    On CUDA the host knows when work was queued, but not when it ran. Pairs of events are therefore kept and read at the
    end, relative to an event that was recorded at the beginning.
    """

    def __init__(self, streams: Streams | None) -> None:
        self.timeline: Timeline | None = None
        self._streams = streams
        self._origin: StreamEvent | None = None
        self._events: list[tuple[str, str, StreamEvent, StreamEvent]] = []

    def start(self) -> Timeline:
        """Begin a new timeline: the work of every stage of every lane, and the waits of computation."""
        if self._streams is not None:
            self._origin = self._streams.event(timed=True)
            self._origin.record(self._streams.current())
        self.timeline = Timeline()
        return self.timeline

    def mark(self) -> Mark:
        """The current time of computation, for :meth:`computed`; ``None`` while no timeline is recorded."""
        if self.timeline is None or self._streams is None:
            return None if self.timeline is None else time.perf_counter()
        event = self._streams.event(timed=True)
        event.record(self._streams.current())
        return event

    def computed(self, label: str, since: Mark) -> None:
        """Record a span of computation from a mark until now, if a timeline was recorded then."""
        now = self.mark()
        if self.timeline is None:
            return
        if isinstance(since, float) and isinstance(now, float):
            self.timeline.add(COMPUTE, label, since, now)
        elif not isinstance(since, float | None) and not isinstance(now, float | None):
            self.measure(COMPUTE, label, since, now)

    def measure(self, track: str, label: str, begun: StreamEvent, ended: StreamEvent) -> None:
        """Keep a pair of events for the timeline."""
        if self.timeline is not None:
            self._events.append((track, label, begun, ended))

    def stop(self) -> None:
        """End the timeline; on CUDA this waits for the device, once."""
        timeline, self.timeline = self.timeline, None
        if timeline is None or self._origin is None or self._streams is None:
            return
        self._streams.synchronize()
        for track, label, begun, ended in self._events:
            start, end = (self._origin.elapsed_time(event) / 1e3 for event in (begun, ended))
            timeline.add(track, label, start, end)
        self._events.clear()


class Worker(ABC):
    """Runs the bodies of one stage of a lane."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    @abstractmethod
    def submit(self, body: Body, after: Sequence[Ticket], label: str) -> Ticket: ...

    @abstractmethod
    def exposed(self) -> float:
        """Seconds that computation waited for this worker since the last call."""

    @abstractmethod
    def worked(self) -> float:
        """Seconds that the worker's bodies took since the last call, including waiting for peers."""

    @abstractmethod
    def drain(self) -> None:
        """Block until everything submitted has run."""

    @abstractmethod
    def close(self) -> None: ...
