"""The streams, events and host memory of a simulated device, with vector clocks; :mod:`thinwire.testing.streams` checks
accesses by them."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

Answer = Literal["never", "always", "random"]
"""What queries of events that need not have been reached answer."""

_POISON: Final = 0xFF
"""Byte of memory that nothing has arrived in: NaN in every floating-point type."""

Clock = dict[int, int]


def merge(clock: Clock, other: Clock) -> None:
    for stream, position in other.copy().items():  # lanes may add to it on threads of their own
        if position > clock.get(stream, 0):
            clock[stream] = position


@final
class SimulatedStream:
    """A stream of a check; has the methods of ``torch.cuda.Stream`` that lanes use."""

    def __init__(self, streams: SimulatedStreams, number: int, name: str) -> None:
        self._streams, self.number, self.name = streams, number, name
        self.clock: Clock = {}

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Run later work after everything that another stream has queued so far."""
        self._streams.poll()
        merge(self.clock, stream.clock)

    def wait_event(self, event: SimulatedEvent) -> None:
        """Run later work after an event."""
        self._streams.poll()
        merge(self.clock, event.clock)

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        self._streams.poll()
        self._streams.reach(self.clock)


@final
class SimulatedEvent:
    """An event of a check; has the methods of ``torch.cuda.Event`` that lanes use."""

    def __init__(self, streams: SimulatedStreams, *, is_timed: bool) -> None:
        self._streams, self._is_timed = streams, is_timed
        self.clock: Clock = {}
        self._is_recorded = self._is_reached = False

    def record(self, stream: SimulatedStream) -> None:
        """Mark the current end of a stream."""
        self._streams.poll()
        self.clock = dict(stream.clock)
        self._is_recorded, self._is_reached = True, False

    def query(self) -> bool:
        """Whether the device has reached the event: certain if the host knows, else the choice of the check."""
        self._streams.poll()
        known = all(self._streams.host.get(stream, 0) >= position for stream, position in self.clock.items())
        if known or self._is_reached or self._streams.guesses():
            self._is_reached = True
            self._streams.reach(self.clock)
            return True
        return False

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self._streams.poll()
        self._streams.reach(self.clock)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Always zero milliseconds; as on CUDA, both events must take the time, and have been recorded and reached.

        Raises:
            RuntimeError: They do not, or have not.
        """
        if not (self._is_timed and end._is_timed):
            raise RuntimeError("both events must be made with timed=True")
        if not (self._is_recorded and end._is_recorded):
            raise RuntimeError("both events must have been recorded")
        if not (self.query() and end.query()):
            raise RuntimeError("both events must have been reached")
        return 0.0


@dataclass
class _Sent:
    """A copy to memory of the host, on its way.

    Attributes:
        stream: Number of the stream that copies.
        position: Number of the operation on that stream.
        address: Where the copy goes.
        content: What will be there.
        is_there: Whether it is there, because the device reads it afterwards. The host has still to wait for it.
    """

    stream: int
    position: int
    address: int
    content: bytes
    is_there: bool = False

    def land(self) -> None:
        """Put the content in its place, once."""
        if not self.is_there:
            ctypes.memmove(self.address, self.content, len(self.content))
            self.is_there = True


class SimulatedStreams:
    """The streams of a simulated device, as lanes use them.

    Args:
        answers: What queries of events answer if the host knows nothing.
        seed: Seed of random answers.
        poll: Called before anything that orders streams.

    Attributes:
        all: The streams by number; the first is that of computation.
        host: Operations that the host knows to have ended, by stream.
        events: Number of events made so far.
    """

    def __init__(self, answers: Answer, seed: int, poll: Callable[[], None]) -> None:
        self._answers, self._random = answers, random.Random(seed)
        self.poll = poll
        self.host: Clock = {}
        self.events = 0
        self._sent: list[_Sent] = []
        self._lock = threading.RLock()  # of what is sent, for which other threads wait as well
        self._on_host = WeakIdKeyDictionary()
        self.all: list[SimulatedStream] = []
        self._stack = [self._make("compute")]

    def stream(self) -> SimulatedStream:
        return self._make(f"stream {len(self.all)}")

    def event(self, *, timed: bool = False) -> SimulatedEvent:
        self.events += 1
        return SimulatedEvent(self, is_timed=timed)

    def current(self) -> SimulatedStream:
        """The stream that operations of this thread are queued on."""
        return self._stack[-1]

    @contextlib.contextmanager
    def use(self, stream: SimulatedStream) -> Iterator[None]:
        """Queue operations on a stream inside the context."""
        self.poll()
        self._stack.append(stream)
        try:
            yield
        finally:
            self.poll()
            self._stack.pop()

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        self.poll()
        for stream in self.all:
            self.reach(stream.clock)

    def reach(self, clock: Clock) -> None:
        """The host learns that the device has come so far; copies to its memory arrive."""
        with self._lock:
            merge(self.host, clock)
            arrived = [copy for copy in self._sent if self.host.get(copy.stream, 0) >= copy.position]
            self._sent = [copy for copy in self._sent if copy not in arrived]
            for copy in arrived:
                copy.land()

    def land(self, clock: Clock) -> None:
        """Put copies to the host's memory in their places that a stream of the device is ordered after."""
        with self._lock:
            for copy in self._sent:
                if clock.get(copy.stream, 0) >= copy.position:
                    copy.land()

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy to memory of the host, which holds nothing of use until the host has waited."""
        with self._lock:
            target.copy_(source)
            stream, address = self.current(), target.data_ptr()
            content = ctypes.string_at(address, target.nbytes)
            ctypes.memset(address, _POISON, target.nbytes)
            self._sent = [copy for copy in self._sent if copy.address != address or not copy.is_there]
            self._sent.append(_Sent(stream.number, stream.clock.get(stream.number, 0), address, content))
            self._on_host[target] = None

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Lock memory of the host in its place, which the simulated device does not need."""
        del memory
        return lambda: None

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is memory of the host that something was sent to."""
        return tensor in self._on_host

    def is_awaited(self, tensor: torch.Tensor) -> bool:
        """Whether what was sent to a tensor may not have arrived."""
        return any(copy.address == tensor.data_ptr() for copy in self._sent)

    def guesses(self) -> bool:
        """Whether an event that the host knows nothing of counts as reached."""
        return self._answers == "always" or (self._answers == "random" and self._random.random() < 0.5)

    def _make(self, name: str) -> SimulatedStream:
        made = SimulatedStream(self, len(self.all), name)
        self.all.append(made)
        return made
