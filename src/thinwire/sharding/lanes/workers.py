"""Workers: each runs the bodies of one stage of a lane, and reports to its model's recorder.

On CPU a worker is a thread, which all models of the process share. On devices with streams it is a stream, which the
computing thread feeds.
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias, final

import torch

from thinwire.collectives.job.current import DEFAULT_TIMEOUT, job
from thinwire.collectives.links.streams import EventPairs, Stream, StreamEvent, Streams
from thinwire.program.timeline import COMPUTE, WAITING, Timeline

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


# -- threads -----------------------------------------------------------------------------------------------------------


@final
class _ThreadTicket(Ticket):
    def __init__(self, worker: ThreadWorker, body: Body, after: Sequence[Ticket], label: str) -> None:
        self._worker, self._body, self._after, self._label = worker, body, after, label
        # A lock that is released once is the cheapest way to wait, and every hop of every collective needs one.
        self._running = threading.Lock()
        self._running.acquire()
        self._finished = False
        self._error: BaseException | None = None
        self.started = 0.0  # time.perf_counter() at which the body began; 0 before

    def run(self) -> None:
        try:
            for ticket in self._after:
                assert isinstance(ticket, _ThreadTicket)
                ticket.join()
            self.started = started = time.perf_counter()
            self._body()
            self._worker.spent += time.perf_counter() - started
            self._worker.note(self._worker.name, self._label, started)
        except BaseException as error:
            self._error, self.failed = error, True
        self._body, self._after = nothing, ()  # drops the references to buffers
        self._finished = True
        self._running.release()

    def join(self) -> None:
        """Wait without counting the time as exposed, because another lane waits rather than computation."""
        self.finished()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        if not self._finished:
            started = time.perf_counter()
            watcher = job.rollcall
            watcher.blocked_since = started
            with self._running:
                pass
            watcher.blocked_since = None
            self._worker.waited += time.perf_counter() - started
            if self._worker.recorder.timeline is not None:
                self._worker.note(WAITING, f"for {self._label}", started)
        if self._error is not None:
            raise self._error

    settle = wait

    def done(self) -> bool:
        return self._finished

    def finished(self, timeout: float = -1) -> bool:
        """Wait at most ``timeout`` seconds, or without limit if it is negative. Errors are not raised."""
        if not self._finished and self._running.acquire(timeout=timeout):
            self._running.release()
        return self._finished


@final
class _Thread:
    """A worker's thread, which all models of the process share. They also share the process groups, so their transfers
    must run in the same order on every rank: the order in which computation submits them."""

    by_name: ClassVar[dict[str, _Thread]] = {}

    def __init__(self, name: str) -> None:
        self.queue: queue.SimpleQueue[_ThreadTicket] = queue.SimpleQueue()
        self.newest: _ThreadTicket | None = None
        self._current: _ThreadTicket | None = None
        # A daemon, so that the process can exit even if a peer is stuck.
        self._thread = threading.Thread(target=self._loop, name=f"thinwire-{name}", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        with torch.no_grad():
            while True:
                self._current = self.queue.get()
                self._current.run()
                self._current = None

    @classmethod
    def busy(cls) -> set[int]:
        """Identifiers of the threads that compute or exchange, rather than wait for another."""
        current = [(thread._thread.ident, thread._current) for thread in list(cls.by_name.values())]
        running = [(ident, ticket) for ident, ticket in current if ticket is not None and ticket.started]
        return {ident for ident, ticket in running if ident is not None and not ticket.done()}


@atexit.register
def _rest() -> None:
    """Bring the threads to rest before the interpreter exits: a thread inside the transport's C++ would abort the
    process at that moment. The wait is limited, because after an error a ticket may never finish."""
    deadline = time.monotonic() + (1.0 if hasattr(sys, "last_value") else DEFAULT_TIMEOUT.total_seconds())
    for thread in _Thread.by_name.values():
        if thread.newest is not None:
            thread.newest.finished(max(0.0, deadline - time.monotonic()))


@final
class ThreadWorker(Worker):
    """One model's use of a stage of a lane on CPU."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        super().__init__(name, recorder)
        job.rollcall.busy_threads = _Thread.busy
        self.waited = self.spent = 0.0
        self._last: _ThreadTicket | None = None

    def submit(self, body: Body, after: Sequence[Ticket], label: str) -> Ticket:
        thread = _Thread.by_name.get(self.name)
        if thread is None:
            thread = _Thread.by_name[self.name] = _Thread(self.name)
        # One that has failed already passes its error on: what it was to bring is not there.
        ticket = _ThreadTicket(self, body, [t for t in after if not t.done() or t.failed], label)
        self._last = thread.newest = ticket
        thread.queue.put(ticket)
        return ticket

    def note(self, track: str, label: str, started: float) -> None:
        """Add a span from ``started`` until now to the timeline, if one is recorded."""
        if (timeline := self.recorder.timeline) is not None:
            timeline.add(track, label, started, time.perf_counter())

    def exposed(self) -> float:
        taken, self.waited = self.waited, 0.0
        return taken

    def worked(self) -> float:
        taken, self.spent = self.spent, 0.0
        return taken

    def drain(self) -> None:
        if self._last is not None:
            self._last.finished()

    def close(self) -> None:
        if self._last is not None and not self._last.finished(timeout=1.0):
            _Thread.by_name.pop(self.name, None)  # the thread is stuck, so the next job gets a new one
        self._last = None


# -- streams -----------------------------------------------------------------------------------------------------------


@final
class _StreamTicket(Ticket):
    # A body is queued when it is submitted, and raises its error then.

    def __init__(
        self, worker: StreamWorker, event: StreamEvent, body: Body, after: Sequence[_StreamTicket], label: str
    ) -> None:
        self._worker, self.event, self._label = worker, event, label
        self._body, self._after = body, tuple(after)

    def wait(self) -> None:
        compute = self._worker.streams.current()
        if not self.done():
            before = self._worker.time_of(compute)
            compute.wait_event(self.event)
            if before is not None and (after := self._worker.time_of(compute)) is not None:
                self._worker.stalled(before, after, self._label)
        # The compute stream is now ordered after the body, so memory freed from now on is reused only after the body.
        self._release()

    def settle(self) -> None:
        self.event.synchronize()
        self._release()

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._release()
        return True

    def _release(self) -> None:
        """Release the memory of this body, and of the bodies that it has waited for."""
        waiting = [self]
        while waiting:
            ticket = waiting.pop()
            waiting += ticket._after
            ticket._body, ticket._after = nothing, ()


@final
class StreamWorker(Worker):
    """One model's use of a stage of a lane: one stream of high priority, fed by the computing thread.

    Times are taken once somebody has asked for them, and while a timeline is recorded: an event that takes the time
    costs microseconds on every body.

    Attributes:
        streams: Streams of the device.
    """

    def __init__(self, name: str, streams: Streams, recorder: Recorder) -> None:
        super().__init__(name, recorder)
        self.streams = streams
        self._stalls, self._bodies = EventPairs(), EventPairs()
        self._is_asked = False  # whether somebody reads the stopwatches
        self._stream = streams.stream()
        self._flying: deque[_StreamTicket] = deque()

    def submit(self, body: Body, after: Sequence[Ticket], label: str) -> Ticket:
        while self._flying and self._flying[0].done():
            self._flying.popleft()
        self._stream.wait_stream(self.streams.current())
        before: list[_StreamTicket] = []
        for other in after:
            assert isinstance(other, _StreamTicket)
            self._stream.wait_event(other.event)
            before.append(other)
        with self.streams.use(self._stream), torch.no_grad():
            begun = self.time_of(self._stream)
            body()
            if (event := self.time_of(self._stream)) is None:
                event = self.streams.event()
                event.record(self._stream)
        if begun is not None:
            self._bodies.add(begun, event)
            self.recorder.measure(self.name, label, begun, event)
        ticket = _StreamTicket(self, event, body, before, label)
        self._flying.append(ticket)
        return ticket

    def time_of(self, stream: Stream) -> StreamEvent | None:
        """The time at the current end of a stream; ``None`` if nobody has asked for times."""
        if not self._is_asked and self.recorder.timeline is None:
            return None
        event = self.streams.event(timed=True)
        event.record(stream)
        return event

    def stalled(self, before: StreamEvent, after: StreamEvent, label: str) -> None:
        """Record that computation waited between two events."""
        self.recorder.measure(WAITING, f"for {label}", before, after)
        self._stalls.add(before, after)

    def exposed(self) -> float:
        self._is_asked = True
        return self._stalls.take()

    def worked(self) -> float:
        self._is_asked = True
        return self._bodies.take()

    def drain(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        deadline = time.monotonic() + 1.0
        while self._flying and time.monotonic() < deadline:
            if self._flying[0].done():
                self._flying.popleft()
            else:
                time.sleep(0.001)
        self._flying.clear()
