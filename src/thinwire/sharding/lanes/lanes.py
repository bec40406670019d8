"""Lanes: in-order queues of communication that run in parallel with computation.

A lane has a worker for every stage of its collectives: hop 1 of one collective runs while hop 2 of the one before
crosses nodes. On CUDA a worker is a stream and a ticket an event; on CPU a worker is a thread. Streams, threads and the
lifetime of buffers in flight live in this file only. The rules:

- Buffers are allocated and freed by the compute thread, on the compute stream. A body starts after everything the
  compute stream had queued when it was submitted, so memory that was reused is free by then.
- A ticket holds what its body reads and writes until the body has finished; nothing needs ``record_stream``.
- Bodies make few, long calls that release the interpreter lock: a lane in pure Python would slow computation down.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, final

import torch

from thinwire.collectives.group import DEFAULT_TIMEOUT, rollcall
from thinwire.collectives.moves import Move, Moves
from thinwire.program import Axis, Event
from thinwire.program import Lane as LaneName
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.program.timeline import COMPUTE, WAITING, Timeline
from thinwire.sharding.lanes.journal import Journal, Load

__all__ = ["Lanes", "Mark", "Ticket"]

Body = Callable[[], None]
Mark = float | torch.cuda.Event | None
UNNAMED = Load("", Axis.WORLD)


class Ticket(ABC):
    """A submitted body. The ticket keeps the body's memory alive until the body has finished."""

    @abstractmethod
    def wait(self) -> None:
        """Let computation continue only after the body has finished; re-raises the body's error."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the body has finished; does not wait."""

    @abstractmethod
    def raise_error(self) -> None:
        """Raise the body's error, if it has finished with one; does not wait."""


class _Worker(ABC):
    """Runs the bodies of one stage of a lane."""

    def __init__(self, name: str, recorder: _Recorder) -> None:
        self.name, self._recorder = name, recorder

    def waited_for(self, ticket: Ticket) -> None:
        """Record that computation waits for a ticket."""
        if (journal := self._recorder.journal) is not None:
            journal.waited(ticket)

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


# -- CPU -------------------------------------------------------------------------------------------------------


@final
class _ThreadTicket(Ticket):
    def __init__(self, worker: _ThreadWorker, body: Body, after: Sequence[Ticket], label: str) -> None:
        self._worker, self._body, self._after, self._label = worker, body, after, label
        # A lock that is released once is the cheapest way to wait, and every hop of every collective needs one.
        self._running = threading.Lock()
        self._running.acquire()
        self._finished = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            for ticket in self._after:
                assert isinstance(ticket, _ThreadTicket)
                ticket.join()
            started = time.perf_counter()
            self._body()
            self._worker.spent += time.perf_counter() - started
            self._worker.note(self._worker.name, self._label, started)
        except BaseException as error:
            self._error = error
        self._body, self._after = _nothing, ()  # drops the references to buffers
        self._finished = True
        self._running.release()

    def join(self) -> None:
        """Wait without counting the time as exposed, because another lane waits rather than computation."""
        self.finished()
        self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        self._worker.waited_for(self)
        if not self._finished:
            started = time.perf_counter()
            watcher = rollcall()
            watcher.blocked_since = started
            self.finished()
            watcher.blocked_since = None
            self._worker.waited += time.perf_counter() - started
            self._worker.note(WAITING, f"for {self._label}", started)
        self.join()

    def done(self) -> bool:
        return self._finished

    def finished(self, timeout: float = -1) -> bool:
        """Wait at most ``timeout`` seconds, or without limit if it is negative. Errors are not raised."""
        if not self._finished and self._running.acquire(timeout=timeout):
            self._running.release()
        return self._finished


def _nothing() -> None:
    """The body of a ticket whose work is done."""


@final
class _Thread:
    """A worker's thread, which all models of the process share. They also share the process groups, so their transfers
    must run in the same order on every rank: the order in which computation submits them."""

    by_name: ClassVar[dict[str, _Thread]] = {}

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_ThreadTicket] = queue.SimpleQueue()
        self._newest: _ThreadTicket | None = None
        # A daemon, so that the process can exit even if a peer is stuck.
        threading.Thread(target=self._loop, name=f"thinwire-{name}", daemon=True).start()

    def put(self, ticket: _ThreadTicket) -> None:
        self._newest = ticket
        self._queue.put(ticket)

    def rest(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until all tickets are done."""
        if self._newest is not None:
            self._newest.finished(timeout)

    def _loop(self) -> None:
        with torch.no_grad():
            while True:
                ticket = self._queue.get()
                ticket.run()
                del ticket


@atexit.register
def _rest() -> None:
    """Bring the threads to rest before the interpreter exits: a thread inside the transport's C++ would abort the
    process at that moment. The wait is limited, because after an error a ticket may never finish."""
    deadline = time.monotonic() + (1.0 if hasattr(sys, "last_value") else DEFAULT_TIMEOUT.total_seconds())
    for thread in _Thread.by_name.values():
        thread.rest(max(0.0, deadline - time.monotonic()))


@final
class _ThreadWorker(_Worker):
    """One model's use of a stage of a lane on CPU."""

    def __init__(self, name: str, recorder: _Recorder) -> None:
        super().__init__(name, recorder)
        self.waited = self.spent = 0.0
        self._last: _ThreadTicket | None = None

    def submit(self, body: Body, after: Sequence[Ticket], label: str) -> Ticket:
        if self.name not in _Thread.by_name:
            _Thread.by_name[self.name] = _Thread(self.name)
        self._last = ticket = _ThreadTicket(self, body, [t for t in after if not t.done()], label)
        _Thread.by_name[self.name].put(ticket)
        return ticket

    def note(self, track: str, label: str, started: float) -> None:
        """Add a span from ``started`` until now to the timeline, if one is recorded."""
        if (timeline := self._recorder.timeline) is not None:
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


# -- CUDA ------------------------------------------------------------------------------------------------------


@final
class _StreamTicket(Ticket):
    def __init__(
        self, worker: _StreamWorker, event: torch.cuda.Event, body: Body, after: Sequence[_StreamTicket], label: str
    ) -> None:
        self._worker, self.event, self._label = worker, event, label
        self._body, self._after = body, tuple(after)

    def wait(self) -> None:
        self._worker.waited_for(self)
        compute = torch.cuda.current_stream(self._worker.device)
        if not self.done():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
            ticket._body, ticket._after = _nothing, ()


class _Stopwatch:
    """Adds up the time between pairs of events. Finished pairs are added at once, so that they do not accumulate."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def add(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
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
class _StreamWorker(_Worker):
    """A stage of a lane on CUDA: one stream of high priority, fed by the compute thread."""

    def __init__(self, name: str, device: torch.device, recorder: _Recorder) -> None:
        super().__init__(name, recorder)
        self.device = device
        self._stalls, self._bodies = _Stopwatch(), _Stopwatch()
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._flying: deque[_StreamTicket] = deque()

    def submit(self, body: Body, after: Sequence[Ticket], label: str) -> Ticket:
        while self._flying and self._flying[0].done():
            self._flying.popleft()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        before: list[_StreamTicket] = []
        for other in after:
            assert isinstance(other, _StreamTicket)
            self._stream.wait_event(other.event)
            before.append(other)
        with torch.cuda.stream(self._stream), torch.no_grad():
            begun, event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record(self._stream)
            body()
            event.record(self._stream)
        self._bodies.add(begun, event)
        self._recorder.measure(self.name, label, begun, event)
        ticket = _StreamTicket(self, event, body, before, label)
        self._flying.append(ticket)
        return ticket

    def stalled(self, before: torch.cuda.Event, after: torch.cuda.Event, label: str) -> None:
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


# -- the set of lanes ------------------------------------------------------------------------------------------


class _Recorder:
    """Collects the spans of all workers while a timeline is recorded.

    On CUDA the host knows when work was queued, but not when it ran. Pairs of events are therefore kept and read at the
    end, relative to an event that was recorded at the beginning.
    """

    def __init__(self, device: torch.device) -> None:
        self.timeline: Timeline | None = None
        self.journal: Journal | None = None
        self._device = device
        self._origin: torch.cuda.Event | None = None
        self._events: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> Timeline:
        """Begin a new timeline."""
        if self._device.type == "cuda":
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record(torch.cuda.current_stream(self._device))
        self.timeline = Timeline()
        return self.timeline

    def mark(self) -> Mark:
        """The current time of computation, for :meth:`computed`; ``None`` while no timeline is recorded."""
        if self.timeline is None or self._device.type != "cuda":
            return None if self.timeline is None else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def computed(self, label: str, since: Mark) -> None:
        """Record a span of computation from a mark until now."""
        now = self.mark()
        if self.timeline is None:
            return
        if isinstance(since, float) and isinstance(now, float):
            self.timeline.add(COMPUTE, label, since, now)
        elif isinstance(since, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self.measure(COMPUTE, label, since, now)

    def measure(self, track: str, label: str, begun: torch.cuda.Event, ended: torch.cuda.Event) -> None:
        """Keep a pair of events for the timeline."""
        if self.timeline is not None:
            self._events.append((track, label, begun, ended))

    def stop(self) -> None:
        """End the timeline; on CUDA this waits for the device, once."""
        timeline, self.timeline = self.timeline, None
        if timeline is None or self._origin is None:
            return
        torch.cuda.synchronize(self._device)
        for track, label, begun, ended in self._events:
            start, end = (self._origin.elapsed_time(event) / 1e3 for event in (begun, ended))
            timeline.add(track, label, start, end)
        self._events.clear()


class Lanes:
    """The lanes of one model.

    Args:
        device: Device of the model's tensors; CUDA uses streams, the CPU uses threads.
        stages: Whether stages of different collectives of a lane run at the same time.
    """

    def __init__(self, device: torch.device, *, stages: bool = True) -> None:
        self._device, self._stages = device, stages
        self._newest: dict[LaneName, Ticket] = {}
        self._recorder = _Recorder(device)
        self._workers: dict[tuple[LaneName, Stage], _Worker] = {}

    def submit(
        self,
        lane: LaneName,
        work: Moves | Body,
        *,
        after: Sequence[Ticket] = (),
        load: Load = UNNAMED,
    ) -> Ticket:
        """Queue a collective.

        Args:
            lane: Lane of the collective; moves of one stage of a lane run one after another.
            work: The moves, at least one, or a single body for the whole collective. They must not allocate memory that
                outlives them.
            after: Tickets that must finish first.
            load: Description of the data, for timelines and journals.
        """
        needed = (*after, self._newest[lane]) if not self._stages and lane in self._newest else after
        for move in work if isinstance(work, Moves) else (Move(Stage.SCATTER_INSIDE, work),):
            ticket = self._worker(lane, move.stage).submit(move.body, needed, load.label)
            needed = (ticket,)
        if not self._stages:
            self._newest[lane] = ticket
        if (journal := self._recorder.journal) is not None:
            journal.started(lane, load, ticket, tuple(after))
        return ticket

    def exposed(self) -> dict[LaneName, float]:
        """Seconds that computation waited for each lane since the last call."""
        seconds = dict.fromkeys((LaneName.GATHER, LaneName.REDUCE, LaneName.SYNC, LaneName.SPREAD), 0.0)
        for (lane, _), worker in self._workers.items():
            seconds[lane] += worker.exposed()
        return seconds

    def worked(self) -> dict[LaneName, dict[str, float]]:
        """Seconds that each lane worked since the last call: transfers (including waiting for peers), and codecs."""
        seconds: dict[LaneName, dict[str, float]] = {
            lane: {"transfer": 0.0, "codec": 0.0}
            for lane in (LaneName.GATHER, LaneName.REDUCE, LaneName.SYNC, LaneName.SPREAD)
        }
        for (lane, stage), worker in self._workers.items():
            seconds[lane]["transfer" if stage in TRANSFERS else "codec"] += worker.worked()
        return seconds

    def start_timeline(self) -> Timeline:
        """Start to record the work of every stage of every lane, and the waits of computation."""
        return self._recorder.start()

    def stop_timeline(self) -> None:
        """Stop recording, which completes the timeline."""
        self._recorder.stop()

    @property
    def journal(self) -> Journal | None:
        """The journal that is being kept; ``None`` if there is none."""
        return self._recorder.journal

    @contextlib.contextmanager
    def keep_journal(self, now: Callable[[], tuple[int, Event]]) -> Iterator[Journal]:
        """Keep a journal of the collectives that start, the waits of computation, and the units that are freed.

        Args:
            now: Returns the number of the current step and its current event.
        """
        self._recorder.journal = journal = Journal(now)
        try:
            yield journal
        finally:
            self._recorder.journal = None

    def mark(self) -> Mark:
        """The current time of computation; ``None`` while no timeline is recorded."""
        return self._recorder.mark()

    def computed(self, what: str, name: str, since: Mark) -> None:
        """Add a span of computation to the timeline, if one is recorded.

        Args:
            what: Kind of computation, for example ``forward``.
            name: Name of the unit.
            since: Mark of its beginning; without a mark, nothing is recorded.
        """
        if since is not None:
            self._recorder.computed(f"{what} {name}", since)

    def drain(self) -> None:
        """Block until all submitted work has run; does not raise errors."""
        for worker in self._workers.values():
            worker.drain()

    def close(self) -> None:
        """Wait at most a second for submitted work, then close the workers."""
        for worker in self._workers.values():
            worker.close()

    def _worker(self, lane: LaneName, stage: Stage) -> _Worker:
        key = lane, stage
        if key not in self._workers:
            name = f"{lane} {stage}"
            self._workers[key] = (
                _StreamWorker(name, self._device, self._recorder)
                if self._device.type == "cuda"
                else _ThreadWorker(name, self._recorder)
            )
        return self._workers[key]
