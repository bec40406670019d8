"""Workers on CPU: each stage of a lane has a thread, which all models of the process share."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import ClassVar, final

import torch

from thinwire.collectives.job.current import DEFAULT_TIMEOUT, job
from thinwire.program.timeline import WAITING
from thinwire.sharding.lanes.worker import Body, Recorder, Ticket, Worker, nothing


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
