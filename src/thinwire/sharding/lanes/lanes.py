"""Lanes: in-order queues of communication that run in parallel with computation.

A lane has a worker for every stage of its collectives: hop 1 of one collective runs while hop 2 of the one before
crosses nodes. On CPU a worker is a thread, see below; on CUDA it is a stream and a ticket an event, see
:mod:`thinwire.sharding.lanes.streams`. Streams, threads and the lifetime of buffers in flight live in this package
only. The rules, which :mod:`thinwire.testing.streams` checks:

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
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, final

import torch

from thinwire.collectives.job.current import DEFAULT_TIMEOUT, job
from thinwire.collectives.links.streams import Streams, streams_of
from thinwire.collectives.moves import Move, Moves
from thinwire.program import AnyLane, Axis, HostLane, Lane
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.program.timeline import WAITING
from thinwire.sharding.lanes.streams import Body, HomeStream, Recorder, StreamWorker, Ticket, Worker, nothing

__all__ = ["Lanes", "Load", "Ticket"]

WATCHED = (Lane.GATHER, Lane.REDUCE, Lane.SYNC, Lane.SPREAD, Lane.OUTER)
"""Lanes whose waits and work are added up."""

_Locked: TypeAlias = list[tuple[torch.Tensor, Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class Load:
    """Description of a collective's data, and its axis.

    Attributes:
        label: Name of the collective in timelines.
        axis: Axis of the mesh that the collective runs along.
        units: Numbers of the units whose data the collective carries.
        encoded: Whether the plan's codecs apply to the data.
    """

    label: str
    axis: Axis
    units: tuple[int, ...] = ()
    encoded: bool = False


UNNAMED = Load("", Axis.WORLD)


class Lanes:
    """The lanes of one model, whose tensors are on a device; ``stages`` says whether stages of different collectives of
    a lane run at the same time.

    Attributes:
        home: The stream that the memory of units and gradients belongs to.
        recorder: What keeps timelines.
    """

    def __init__(self, device: torch.device, *, stages: bool = True) -> None:
        self._streams, self._stages = streams_of(device), stages
        self.home = HomeStream(self._streams)
        self._newest: dict[AnyLane, Ticket] = {}
        self._waited: dict[AnyLane, float] = {}  # by the computing thread, without a ticket
        self.recorder = Recorder(self._streams)
        self._workers: dict[tuple[AnyLane, Stage], Worker] = {}
        self._locked: _Locked = []  # memory of the host, and what unlocks it
        if self._streams is not None:
            dropped = weakref.finalize(self, _let_go, self._streams, self._locked)
            dropped.atexit = False

    def submit(
        self,
        lane: AnyLane,
        work: Moves | Body,
        *,
        after: Sequence[Ticket] = (),
        load: Load = UNNAMED,
    ) -> Ticket:
        """Queue a collective: its moves, at least one, or a single body for all of it, once the tickets ``after`` have
        finished. They must not allocate memory that outlives them. Moves of one stage of a lane run one after another.
        """
        moves = work if isinstance(work, Moves) else Moves([Move(Stage.SCATTER_INSIDE, work)])
        ready = (*after, self._newest[lane]) if not self._stages and lane in self._newest else tuple(after)
        for move in moves:
            worker = self._workers.get((lane, move.stage)) or self._make_worker(lane, move.stage)
            ticket = worker.submit(move.body, ready, load.label)
            ready = (ticket,)
        if not self._stages:
            self._newest[lane] = ticket
        return ticket

    def compute_on_host(self, body: Body, *, after: Sequence[Ticket], load: Load) -> Ticket:
        """Queue work of the host's processor, for a thread that runs beside the computing one, once copies to the host
        have ended."""
        key = HostLane.UPDATE, Stage.HOST_UPDATE
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = ThreadWorker(" ".join(key), self.recorder)
        if self._streams is None:
            return worker.submit(body, after, load.label)

        def once_there() -> None:
            for ticket in after:
                ticket.settle()
            body()

        return worker.submit(once_there, (), load.label)

    @contextlib.contextmanager
    def waiting(self, lane: AnyLane) -> Iterator[None]:
        """Count an exchange that the computing thread itself makes as waiting for a lane. A device that computes
        meanwhile waits for nothing, and then nothing is counted."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._streams is None:
                self._waited[lane] = self._waited.get(lane, 0.0) + time.perf_counter() - started
                if self.recorder.timeline is not None:
                    self.recorder.timeline.add(WAITING, f"for {lane}", started, time.perf_counter())

    def exposed(self) -> dict[AnyLane, float]:
        """Seconds that computation waited for each lane since the last call."""
        seconds: dict[AnyLane, float] = {**dict.fromkeys(WATCHED, 0.0), **self._waited}
        self._waited.clear()
        for (lane, _), worker in self._workers.items():
            seconds[lane] = seconds.get(lane, 0.0) + worker.exposed()
        return seconds

    def worked(self) -> dict[AnyLane, dict[str, float]]:
        """Seconds that each lane worked since the last call: transfers (including waiting for peers), and codecs."""
        seconds: dict[AnyLane, dict[str, float]] = {lane: {"transfer": 0.0, "codec": 0.0} for lane in WATCHED}
        for (lane, stage), worker in self._workers.items():
            if lane in seconds:
                seconds[lane]["transfer" if stage in TRANSFERS else "codec"] += worker.worked()
        return seconds

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a tensor of the device to memory of the host, inside of a body."""
        if self._streams is None:
            target.copy_(source)
        else:
            self._streams.send(source, target)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Memory of the host from which and to which the device copies beside the host, ``[nbytes]``, of bytes."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._streams is not None:
            self._locked.append((memory, self._streams.pin(memory)))
        return memory

    def settle(self, lane: AnyLane | None = None) -> None:
        """Block until all submitted work of a lane, or of all lanes, and that of computation before it, has run; raises
        no errors."""
        for (of_lane, _), worker in self._workers.items():
            if lane in (None, of_lane):
                worker.drain()
        if lane is None and self._streams is not None:
            self._streams.synchronize()

    def drain(self) -> None:
        """Block until all submitted work has run; does not raise errors."""
        for worker in self._workers.values():
            worker.drain()

    def close(self) -> None:
        """Wait at most a second for submitted work, then close the workers."""
        for worker in self._workers.values():
            worker.close()
        _unlock(self._locked)

    def _make_worker(self, lane: AnyLane, stage: Stage) -> Worker:
        name = f"{lane} {stage}"
        worker = self._workers[lane, stage] = (
            ThreadWorker(name, self.recorder)
            if self._streams is None
            else StreamWorker(name, self._streams, self.recorder)
        )
        return worker


def _let_go(streams: Streams, locked: _Locked) -> None:
    """Let the memory of a model that is dropped, which its last bodies may still read and write, be freed."""
    streams.synchronize()
    _unlock(locked)


def _unlock(locked: _Locked) -> None:
    for _, unlock in locked:
        unlock()
    locked.clear()


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
