"""What a lane submits its work to: workers and their tickets, and those of devices with streams.

A worker runs the bodies of one stage of a lane, and reports to its model's recorder. Here it is a stream, which the
computing thread feeds; on CPU it is a thread, see :mod:`thinwire.sharding.lanes.lanes`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, cast, final

import torch

from thinwire.collectives.links.streams import EventPairs, Stream, StreamEvent, Streams, streams_of
from thinwire.program.timeline import COMPUTE, WAITING, Timeline

Body: TypeAlias = Callable[[], None]

Hook = TypeVar("Hook", bound=Callable[..., Any])

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


class HomeStream:
    """The current stream at the time of its creation: the one on which a model was sharded, to which the memory of its
    units and gradients belongs.

    A model may run some of its modules on streams of its own, and autograd runs their backward there. The runtime does
    its work at home, whatever stream calls it. It ``exists`` if the device has streams.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._stream = None if streams is None else streams.current()
        self.exists = streams is not None

    def is_elsewhere(self) -> bool:
        """Whether the current stream is another one."""
        return self._streams is not None and self._streams.current() != self._stream

    @contextlib.contextmanager
    def visit(self) -> Iterator[bool]:
        """Queue what the block does on the home stream, after what the current stream has queued and before what it
        will queue.

        Yields:
            Whether the current stream is another one. Memory of that stream may be dropped after the block only.
        """
        streams, home = self._streams, self._stream
        if streams is None or home is None or (current := streams.current()) == home:
            yield False
            return
        home.wait_stream(current)
        with streams.use(home):
            yield True
        current.wait_stream(home)

    def visited_by(self, hook: Hook) -> Hook:
        """Decorator of hooks that are called on any stream."""
        if not self.exists:
            return hook

        @functools.wraps(hook)
        def visit(*args: Any, **kwargs: Any) -> Any:
            with self.visit():
                return hook(*args, **kwargs)

        return cast(Hook, visit)


def read_later(value: torch.Tensor) -> Callable[[], float]:
    """Send a 0-D tensor to the host, which reads it later, so that it does not wait for what the device computes now.

    Returns:
        The function that reads it there. The host waits until the device has computed it.
    """
    streams = streams_of(value.device)
    if streams is None:
        number = float(value)
        return lambda: number
    pinned = value.device.type == "cuda"  # the host waits for copies to other memory
    copy = torch.empty((), dtype=value.dtype, pin_memory=pinned, device="cpu")
    streams.send(value.detach(), copy)
    arrived = streams.event()
    arrived.record(streams.current())

    def read() -> float:
        arrived.synchronize()
        return float(copy)

    return read
