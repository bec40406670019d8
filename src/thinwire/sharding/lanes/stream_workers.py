"""Workers on devices with streams: each stage of a lane has a stream, which the computing thread feeds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import final

import torch

from thinwire.collectives.streams import StreamEvent, Streams
from thinwire.program.timeline import WAITING
from thinwire.sharding.lanes.recorder import Recorder
from thinwire.sharding.lanes.worker import Body, Ticket, Worker, nothing

__all__ = ["StreamWorker"]


@final
class _StreamTicket(Ticket):
    def __init__(
        self, worker: StreamWorker, event: StreamEvent, body: Body, after: Sequence[_StreamTicket], label: str
    ) -> None:
        self._worker, self.event, self._label = worker, event, label
        self._body, self._after = body, tuple(after)

    def wait(self) -> None:
        self._worker.waited_for(self)
        streams = self._worker.streams
        compute = streams.current()
        if not self.done():
            before, after = streams.event(), streams.event()
            before.record(compute)
            compute.wait_event(self.event)
            after.record(compute)
            self._worker.stalled(before, after, self._label)
        # The compute stream is now ordered after the body, so memory freed from now on is reused only after the body.
        self._release()

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._release()
        return True

    def raise_error(self) -> None:
        pass  # a body is queued when it is submitted, and raises its error then

    def _release(self) -> None:
        """Release the memory of this body, and of the bodies that it has waited for."""
        waiting = [self]
        while waiting:
            ticket = waiting.pop()
            waiting += ticket._after
            ticket._body, ticket._after = nothing, ()


class _Stopwatch:
    """Adds up the time between pairs of events. Finished pairs are added at once, so that they do not accumulate."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[StreamEvent, StreamEvent]] = deque()
        self._seconds = 0.0

    def add(self, begun: StreamEvent, ended: StreamEvent) -> None:
        """Count the time between two recorded events."""
        while self._pairs and self._pairs[0][1].query():
            first, last = self._pairs.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        self._pairs.append((begun, ended))

    def take(self) -> float:
        """Seconds counted since the last call; waits for pairs that have not finished."""
        while self._pairs:
            begun, ended = self._pairs.popleft()
            ended.synchronize()
            self._seconds += begun.elapsed_time(ended) / 1e3
        taken, self._seconds = self._seconds, 0.0
        return taken


@final
class StreamWorker(Worker):
    """One model's use of a stage of a lane: one stream of high priority, fed by the computing thread.

    Attributes:
        streams: Streams of the device.
    """

    def __init__(self, name: str, streams: Streams, recorder: Recorder) -> None:
        super().__init__(name, recorder)
        self.streams = streams
        self._stalls, self._bodies = _Stopwatch(), _Stopwatch()
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
            begun, event = self.streams.event(), self.streams.event()
            begun.record(self._stream)
            body()
            event.record(self._stream)
        self._bodies.add(begun, event)
        self._recorder.measure(self.name, label, begun, event)
        ticket = _StreamTicket(self, event, body, before, label)
        self._flying.append(ticket)
        return ticket

    def stalled(self, before: StreamEvent, after: StreamEvent, label: str) -> None:
        """Record that computation waited between two events."""
        self._recorder.measure(WAITING, f"for {label}", before, after)
        self._stalls.add(before, after)

    def exposed(self) -> float:
        return self._stalls.take()

    def worked(self) -> float:
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
