"""Asynchronous collectives: each group has one thread, which performs them in the order in which they were started."""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.links.streams import EventPairs, Streams


class Promise(dist.Work):
    """Work that completes or fails later, on another thread. The tensors that it fills are the value of its future."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: Any = None

    def end(self, error: BaseException | None = None) -> None:
        """Mark the work as complete, or as failed with ``error``."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._resolve(future)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until the work is complete. The timeout has no effect, because the transport has one of its own.

        Raises:
            BaseException: The error of the work, if it failed.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` whose value is the list of tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future[list[torch.Tensor]]()
            ended = self._ended.is_set()
        if ended:
            self._resolve(future)
        return future

    def is_completed(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether the work is complete and has not failed."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error of the work; ``None`` if it has not failed."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        """:meth:`wait`, as torch also calls it."""
        self.wait()

    def _resolve(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)


class AllOf(Promise):
    """Several works as one, which keeps the memory that they read. The thread that waits for it waits for each of them
    in turn."""

    def __init__(
        self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor] = (), held: torch.Tensor | None = None
    ) -> None:
        super().__init__(tensors)
        self._works = list(works)
        self._held = held
        self._joining = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Block until all works are complete."""
        with self._joining:
            if not self._ended.is_set():
                try:
                    for work in self._works:
                        work.wait()
                except BaseException as error:
                    self.end(error)
                else:
                    self.end()
                self._works, self._held = [], None
        return super().wait()

    def get_future(self) -> Any:
        """A future of the tensors. A thread waits for the works, because nothing else would complete the future."""
        future = super().get_future()
        if not self._ended.is_set():
            threading.Thread(target=self.wait, daemon=True).start()
        return future

    def is_completed(self) -> bool:
        return self._ended.is_set() or all(work.is_completed() for work in self._works)


class Stopwatch:
    """Adds up the time that computation waits for an axis."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pairs = EventPairs()

    @contextmanager
    def running(self, streams: Streams | None = None) -> Iterator[None]:
        """Count the time inside this context: that of the device's current stream, or of the host."""
        if streams is not None:
            current = streams.current()
            before, after = streams.event(timed=True), streams.event(timed=True)
            before.record(current)
            try:
                yield
            finally:
                after.record(current)
                self._seconds += self._pairs.take()  # so that pairs do not accumulate
                self._pairs.add(before, after)
            return
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def read(self, *, reset: bool) -> float:
        """Seconds counted so far. The host waits for streams that still wait."""
        self._pairs.synchronize()
        self._seconds += self._pairs.take()
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds


class Delegated(dist.Work):
    """Work that another work does; its methods are those of a :class:`Promise`."""

    @property
    def _work(self) -> dist.Work:
        raise NotImplementedError

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return self._work.wait() if timeout is None else self._work.wait(timeout)

    def synchronize(self) -> None:
        self._work.synchronize()

    def get_future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()


class Watched(Delegated):
    """Work of a transport, with a stopwatch that runs while computation waits for it."""

    def __init__(self, work: dist.Work, watch: Stopwatch, streams: Streams | None = None) -> None:
        super().__init__()
        self._transported, self._watch, self._streams = work, watch, streams

    @property
    def _work(self) -> dist.Work:
        return self._transported

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        with self._watch.running(self._streams):
            return super().wait(timeout)

    def synchronize(self) -> None:
        with self._watch.running(self._streams):
            super().synchronize()


class LateWork(Delegated):
    """Work that begins, after some other, when somebody asks for it: ``begin`` is called once and returns the work from
    then on."""

    def __init__(self, begin: Callable[[], dist.Work], after: LateWork | None = None) -> None:
        super().__init__()
        self._begin: Callable[[], dist.Work] | None = begin
        self._after = after
        self._begun: dist.Work | None = None
        self._lock = threading.Lock()

    @property
    def has_begun(self) -> bool:
        """Whether somebody has asked for it."""
        return self._begun is not None

    @property
    def _work(self) -> dist.Work:
        with self._lock:
            if self._begun is None:
                assert self._begin is not None
                if self._after is not None:
                    self._after.begin()
                self._begun = self._begin()
                self._begin = self._after = None
            return self._begun

    def begin(self) -> None:
        """Begin the work, unless it has begun."""
        _ = self._work


class Courier:
    """A thread that runs tasks in order. It starts with the first task."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Promise] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    def perform(self, body: Callable[[], None], promise: Promise, *, wait: bool) -> None:
        """Run ``body`` after all earlier tasks and end ``promise``. With ``wait``, return only then: if no task is
        pending, it runs on the caller's thread."""
        with self._lock:
            idle = self._waiting == 0
            if not (wait and idle):
                self._waiting += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._tasks.put((body, promise))
        if wait and idle:
            promise.end(_error_of(body))
        elif wait:
            promise._ended.wait()

    def close(self) -> None:
        """Finish the pending tasks and end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._tasks.put(None)
            thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            body, promise = task
            error = _error_of(body)
            # Counted before the promise ends: a thread that waits for it may submit the next task immediately.
            with self._lock:
                self._waiting -= 1
            promise.end(error)


def _error_of(body: Callable[[], None]) -> BaseException | None:
    """Run a task; returns its error."""
    try:
        with torch.no_grad():  # gradient mode is set per thread
            body()
    except BaseException as error:
        return error
    return None
