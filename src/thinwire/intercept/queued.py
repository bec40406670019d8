"""Asynchronous work on devices with streams: the caller's thread queues it, and the host waits for nothing.

The semantics are NCCL's. A queue has a stream of its own. A task begins after everything that the caller's stream has
queued so far, and ``wait()`` lets the caller's stream, not the host, wait for its end.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.links.streams import Stream, StreamEvent, Streams


class QueuedWork(dist.Work):
    """A task on the stream of a queue, which fills ``tensors``. ``held`` is what it uses; the list is emptied once the
    caller's stream is ordered after the task."""

    def __init__(
        self,
        queue: StreamQueue,
        caller: Stream,
        event: StreamEvent,
        tensors: Sequence[torch.Tensor],
        held: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._queue, self._caller, self._event = queue, caller, event
        self._tensors, self._held = list(tensors), held
        self._future: Any = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Let the current stream wait for the task. The timeout has no effect, because the host does not wait."""
        current = self._queue.streams.current()
        current.wait_event(self._event)
        if current == self._caller:
            self._held.clear()
        return True

    def get_future(self) -> Any:
        """A ``torch.futures.Future`` whose value is the list of tensors; waiting for it waits as :meth:`wait` does."""
        if self._future is None:
            self._future = self._queue.future(self)
        return self._future

    def is_completed(self) -> bool:
        """Whether the device has finished the task."""
        return self._event.query()

    def is_success(self) -> bool:
        """Whether the device has finished the task."""
        return self.is_completed()

    def exception(self) -> BaseException | None:
        """Always ``None``: a task that cannot be queued raises its error at once."""
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        """:meth:`wait`, as torch also calls it."""
        self.wait()


class StreamQueue:
    """Tasks of one device, in order, on a stream of their own."""

    def __init__(self, streams: Streams, device: torch.device) -> None:
        self.streams, self._device = streams, device
        self._stream = streams.stream()
        self._flying: deque[tuple[StreamEvent, list[torch.Tensor]]] = deque()
        self._lock = threading.Lock()  # a backward pass calls from a thread of its own

    def perform(
        self, body: Callable[[], None], tensors: Sequence[torch.Tensor], held: Sequence[torch.Tensor], *, wait: bool
    ) -> QueuedWork:
        """Queue ``body``, which fills ``tensors`` and uses ``held``, after all earlier tasks, for the caller's stream
        to ``wait`` for."""
        with self._lock:
            while self._flying and (not self._flying[0][1] or self._flying[0][0].query()):
                self._flying.popleft()
            caller = self.streams.current()
            self._stream.wait_stream(caller)
            with self.streams.use(self._stream), torch.no_grad():
                body()
                event = self.streams.event()
                event.record(self._stream)
            used = [*tensors, *held]
            work = QueuedWork(self, caller, event, tensors, used)
            if wait:
                work.wait()
            self._flying.append((event, used))
            return work

    def future(self, work: QueuedWork) -> Any:
        """A future of a task. CUDA's futures carry events: whoever waits for one orders the own stream after it."""
        if self._device.type != "cuda":
            work.wait()
            future = torch.futures.Future[list[torch.Tensor]]()
            future.set_result(work.result())
            return future
        future = torch.futures.Future[list[torch.Tensor]](devices=[self._device])
        with self.streams.use(self._stream):
            future.set_result(work.result())
        return future
