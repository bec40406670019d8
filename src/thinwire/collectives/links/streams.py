"""The streams of a device, as lanes use them: CUDA's, or a simulation that checks how they are used."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class StreamEvent(Protocol):
    """A moment of a stream; see ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:
        """Mark the current end of a stream."""

    def query(self) -> bool:
        """Whether the device has reached the event."""

    def synchronize(self) -> None:
        """Block until the device has reached the event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to a later one; both must take the time and have been reached."""


class EventPairs:
    """Adds up the time between pairs of recorded events."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[StreamEvent, StreamEvent]] = deque()

    def add(self, begun: StreamEvent, ended: StreamEvent) -> None:
        """Count the time between two recorded events, which both take the time."""
        self._pairs.append((begun, ended))

    def take(self) -> float:
        """Seconds since the last call, of the pairs that the device has reached: the host does not wait for others,
        which a later call counts."""
        seconds = 0.0
        while self._pairs and self._pairs[0][1].query():
            begun, ended = self._pairs.popleft()
            seconds += begun.elapsed_time(ended) / 1e3
        return seconds

    def synchronize(self) -> None:
        """Block until the device has reached all pairs."""
        for _, ended in self._pairs:
            ended.synchronize()


class Stream(Protocol):
    """A queue of work on a device; see ``torch.cuda.Stream``."""

    def wait_stream(self, stream: Any) -> None:
        """Run later work after everything that another stream has queued so far."""

    def wait_event(self, event: Any) -> None:
        """Run later work after an event."""

    def synchronize(self) -> None:
        """Block until all queued work has run."""


class Streams(Protocol):
    """The streams of one device."""

    def stream(self) -> Stream:
        """Make a stream of high priority."""

    def event(self, *, timed: bool = False) -> StreamEvent:
        """Make an event. Events that take the time cost more."""

    def current(self) -> Stream:
        """The stream that operations of this thread are queued on."""

    def use(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Queue operations on a stream inside the context."""

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy to memory of the host, which holds the values once the host has waited for an event that was
        recorded afterwards. Contiguous tensors of one shape and dtype."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Lock memory of the host in its place, so that the host goes on while the device copies to it; returns what
        unlocks it, to be called before the memory is freed."""

    def synchronize(self) -> None:
        """Block until the device has done all its work."""


class CudaStreams(Streams):
    """CUDA's streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> Stream:
        return torch.cuda.Stream(self._device, priority=-1)

    def event(self, *, timed: bool = False) -> StreamEvent:
        return torch.cuda.Event(enable_timing=timed)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Lock memory of the host in its place. torch's own allocator of such memory rounds up to powers of two and
        gives nothing back."""
        cuda, address = torch.cuda.cudart(), memory.data_ptr()
        if not memory.numel() or cuda.cudaHostRegister(address, memory.nbytes, 0) != cuda.cudaError.success:
            return lambda: None  # copies to it are right all the same: the host waits for each

        def unpin() -> None:
            cuda.cudaHostUnregister(address)

        return unpin

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


_replacements: list[Callable[[torch.device], Streams]] = []


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; ``None`` if it has none, as CPUs."""
    if _replacements:
        return _replacements[-1](device)
    return CudaStreams(device) if device.type == "cuda" else None


@contextlib.contextmanager
def replace_streams(make: Callable[[torch.device], Streams]) -> Iterator[None]:
    """Give every device other streams inside the context, also CPUs; see :mod:`thinwire.testing.streams`."""
    _replacements.append(make)
    try:
        yield
    finally:
        _replacements.pop()
