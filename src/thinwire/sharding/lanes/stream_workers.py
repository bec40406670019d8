"""Workers on devices with streams: each stage of a lane has a stream, which the computing thread feeds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from thinwire.collectives.links.streams import EventPairs, Stream, StreamEvent, Streams
from thinwire.program.timeline import WAITING
from thinwire.sharding.lanes.worker import Body, Recorder, Ticket, Worker, nothing


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
