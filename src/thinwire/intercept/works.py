"""Collectives that finish later: one thread for each group performs them in the order in which they were started."""

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

__all__ = ["AllOf", "Courier", "Promise", "Stopwatch", "Watched", "done"]


class Promise(dist.Work):
    """A piece of work that somebody will keep or break.

    Args:
        tensors: what it fills: the value of its future.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: Any = None

    def end(self, error: BaseException | None = None) -> None:
        """It is done, or has failed."""
        with self._lock:
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._tell(future)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Until it is done.

        Args:
            timeout: of no effect: the transport has its own.

        Raises:
            BaseException: what it failed with.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """``torch.futures.Future`` of the list of tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = torch.futures.Future[list[torch.Tensor]]()
            ended = self._ended.is_set()
        if ended:
            self._tell(future)
        return future

    def is_completed(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """What it failed with."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """:meth:`wait`, as torch also calls it."""
        self.wait()

    def _tell(self, future: Any) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)


class AllOf(Promise):
    """Several pieces of work as one; done by whoever waits for it.

    Args:
        works: the pieces.
        tensors: what they fill.
        held: memory that they read.
    """

    def __init__(
        self, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor] = (), held: torch.Tensor | None = None
    ) -> None:
        super().__init__(tensors)
        self._works = list(works)
        self._held = held
        self._joining = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Until all are done."""
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
        """As of any promise; somebody has to wait meanwhile."""
        future = super().get_future()
        if not self._ended.is_set():
            threading.Thread(target=self.wait, daemon=True).start()
        return future

    def is_completed(self) -> bool:
        """Whether all are."""
        return self._ended.is_set() or all(work.is_completed() for work in self._works)


class Stopwatch:
    """Adds up how long computation stands still for an axis."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Computation stands still inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - started

    def read(self, *, reset: bool) -> float:
        """Seconds so far."""
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds


class Watched(dist.Work):
    """A piece of work whose waiting is timed.

    Args:
        work: somebody else's.
        watch: runs while computation waits for it.
    """

    def __init__(self, work: dist.Work, watch: Stopwatch) -> None:
        super().__init__()
        self._work, self._watch = work, watch

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Until it is done."""
        with self._watch.running():
            return self._work.wait() if timeout is None else self._work.wait(timeout)

    def synchronize(self) -> None:
        """:meth:`wait`, as torch also calls it."""
        with self._watch.running():
            self._work.synchronize()

    def get_future(self) -> Any:
        """The work's own."""
        return self._work.get_future()

    def is_completed(self) -> bool:
        """Whether :meth:`wait` returns at once."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is done and has not failed."""
        return self._work.is_success()

    def exception(self) -> Any:
        """What it failed with."""
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return self._work.result()


def done(tensors: Sequence[torch.Tensor]) -> Promise:
    """Work that was done before anybody could wait."""
    promise = Promise(tensors)
    promise.end()
    return promise


class Courier:
    """A thread that performs what it is given, in order; it starts with the first task.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Promise] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    def perform(self, body: Callable[[], None], promise: Promise, *, wait: bool) -> None:
        """Perform ``body`` after all that came before.

        Args:
            body: the work.
            promise: ended when it is done.
            wait: return only then; where nothing came before, the work is done on the caller's thread.
        """
        with self._lock:
            idle = self._waiting == 0
            if not (wait and idle):
                self._waiting += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._tasks.put((body, promise))
        if wait and idle:
            _keep(body, promise)
        elif wait:
            promise._ended.wait()

    def close(self) -> None:
        """Finish what has been started."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._tasks.put(None)
            thread.join()

    def _work(self) -> None:
        with torch.no_grad():  # a thread's own setting
            while (task := self._tasks.get()) is not None:
                body, promise = task
                try:
                    body()
                    error = None
                except BaseException as failure:
                    error = failure
                # Counted before it ends: whoever waits for the promise may start the next at once.
                with self._lock:
                    self._waiting -= 1
                promise.end(error)


def _keep(body: Callable[[], None], promise: Promise) -> None:
    try:
        with torch.no_grad():
            body()
    except BaseException as error:
        promise.end(error)
    else:
        promise.end()
