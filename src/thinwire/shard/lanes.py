"""Lanes: in-order queues of communication that run beside computation.

On CUDA a lane is a stream and a ticket an event; on CPU a lane is a worker thread. Streams, threads and the lifetime
of buffers in flight live in this file only. The rules:

- Buffers are allocated and freed by the compute thread, on the compute stream. A body starts after everything the
  compute stream had queued when it was submitted, so memory that was reused is free by then.
- A ticket holds what its body reads and writes until the body has finished; nothing needs ``record_stream``.
- Bodies make few, long calls that release the interpreter lock: a lane in pure Python would slow computation down.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, final

import torch

from thinwire.program import Lane as LaneName

__all__ = ["Lanes", "Ticket"]

Body = Callable[[], None]


class Ticket(ABC):
    """A submitted body: what waits for it, and what it keeps alive."""

    @abstractmethod
    def wait(self) -> None:
        """Let computation go on only when the body has finished; re-raises its error."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has finished, without waiting."""


class _Worker(ABC):
    """What runs one lane's bodies."""

    @abstractmethod
    def submit(self, body: Body, after: Sequence[Ticket], held: Sequence[torch.Tensor]) -> Ticket: ...

    @abstractmethod
    def exposed(self) -> float:
        """Seconds computation stood still for this lane since the last call."""

    @abstractmethod
    def close(self) -> None: ...


# -- CPU -------------------------------------------------------------------------------------------------------


@final
class _ThreadTicket(Ticket):
    def __init__(self, worker: _ThreadWorker, body: Body, after: Sequence[Ticket]) -> None:
        self._worker, self._body, self._after = worker, body, after
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            for ticket in self._after:
                assert isinstance(ticket, _ThreadTicket)
                ticket.join()
            self._body()
        except BaseException as error:
            self._error = error
        self._body, self._after = _nothing, ()  # lets go of the buffers
        self._finished.set()

    def join(self) -> None:
        """Wait without counting the time as exposed (another lane waits, not computation)."""
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        if not self._finished.is_set():
            started = time.perf_counter()
            self._finished.wait()
            self._worker.waited += time.perf_counter() - started
        self.join()

    def done(self) -> bool:
        return self._finished.is_set()

    def finished(self, timeout: float) -> bool:
        """Wait at most ``timeout`` seconds; errors are not raised."""
        return self._finished.wait(timeout)


def _nothing() -> None:
    """The body of a ticket whose work is done."""


@final
class _Thread:
    """A lane's thread: one for all models of the process. They share the lane's process groups, so their transfers must
    run in one order, the same on every rank: the order in which computation submits them."""

    by_name: ClassVar[dict[str, _Thread]] = {}

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_ThreadTicket] = queue.SimpleQueue()
        # A daemon, so that a stuck peer cannot keep the process from leaving.
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def put(self, ticket: _ThreadTicket) -> None:
        self._queue.put(ticket)

    def _loop(self) -> None:
        with torch.no_grad():
            while True:
                ticket = self._queue.get()
                ticket.run()
                del ticket


@final
class _ThreadWorker(_Worker):
    """One model's use of a lane on CPU."""

    def __init__(self, name: str) -> None:
        self.waited = 0.0
        self._name = name
        self._last: _ThreadTicket | None = None

    def submit(self, body: Body, after: Sequence[Ticket], held: Sequence[torch.Tensor]) -> Ticket:
        del held  # the body's closure holds them
        if self._name not in _Thread.by_name:
            _Thread.by_name[self._name] = _Thread(self._name)
        self._last = ticket = _ThreadTicket(self, body, [t for t in after if not t.done()])
        _Thread.by_name[self._name].put(ticket)
        return ticket

    def exposed(self) -> float:
        taken, self.waited = self.waited, 0.0
        return taken

    def close(self) -> None:
        if self._last is not None and not self._last.finished(timeout=1.0):
            _Thread.by_name.pop(self._name, None)  # stuck: the next job gets a thread of its own
        self._last = None


# -- CUDA ------------------------------------------------------------------------------------------------------


@final
class _StreamTicket(Ticket):
    def __init__(self, worker: _StreamWorker, event: torch.cuda.Event, held: Sequence[torch.Tensor]) -> None:
        self._worker, self.event, self._held = worker, event, tuple(held)

    def wait(self) -> None:
        compute = torch.cuda.current_stream(self._worker.device)
        if not self.done():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(compute)
            compute.wait_event(self.event)
            after.record(compute)
            self._worker.stalled(before, after)
        # The compute stream is now ordered behind the body: memory freed from here on is reused after it.
        self._held = ()

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._held = ()
        return True


@final
class _StreamWorker(_Worker):
    """A lane on CUDA: one stream of high priority, fed by the compute thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._flying: deque[_StreamTicket] = deque()

    def submit(self, body: Body, after: Sequence[Ticket], held: Sequence[torch.Tensor]) -> Ticket:
        while self._flying and self._flying[0].done():
            self._flying.popleft()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for other in after:
            assert isinstance(other, _StreamTicket)
            self._stream.wait_event(other.event)
        with torch.cuda.stream(self._stream), torch.no_grad():
            body()
            event = torch.cuda.Event()
            event.record(self._stream)
        ticket = _StreamTicket(self, event, held)
        self._flying.append(ticket)
        return ticket

    def stalled(self, before: torch.cuda.Event, after: torch.cuda.Event) -> None:
        """Computation waits between two events; what is over is added up, so that nothing piles up unread."""
        while self._stalls and self._stalls[0][1].query():
            first, last = self._stalls.popleft()
            self._seconds += first.elapsed_time(last) / 1e3
        self._stalls.append((before, after))

    def exposed(self) -> float:
        while self._stalls:
            before, after = self._stalls.popleft()
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1e3
        taken, self._seconds = self._seconds, 0.0
        return taken

    def close(self) -> None:
        deadline = time.monotonic() + 1.0
        while self._flying and time.monotonic() < deadline:
            if self._flying[0].done():
                self._flying.popleft()
            else:
                time.sleep(0.001)
        self._flying.clear()


# -- the set of lanes ------------------------------------------------------------------------------------------


class Lanes:
    """The lanes of one model.

    Args:
        device: where its tensors live; decides between threads and streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._workers: dict[LaneName, _Worker] = {
            name: _StreamWorker(device) if device.type == "cuda" else _ThreadWorker(f"thinwire-{name}")
            for name in (LaneName.GATHER, LaneName.REDUCE, LaneName.SYNC, LaneName.SPREAD)
        }

    def submit(
        self, lane: LaneName, body: Body, *, after: Sequence[Ticket] = (), held: Sequence[torch.Tensor] = ()
    ) -> Ticket:
        """Queue a body.

        Args:
            lane: where it runs; bodies of a lane run one after another.
            body: the work; it must not allocate what outlives it.
            after: tickets of other lanes it needs.
            held: tensors it reads or writes; kept alive until it has finished.
        """
        return self._workers[lane].submit(body, after, held)

    def exposed(self) -> dict[LaneName, float]:
        """Seconds computation stood still for each lane since the last call."""
        return {name: worker.exposed() for name, worker in self._workers.items()}

    def close(self) -> None:
        """Let what is under way finish, for a second at most."""
        for worker in self._workers.values():
            worker.close()
