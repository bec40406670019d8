"""Delays of random length in lanes or in computation, under which a missing wait changes the numbers.

Two streams run in any order unless an event orders them, but they mostly run in the order of their calls: code that
forgets an event computes the right numbers almost always. If lanes are late, computation that does not wait for them
reads too early; if computation is late, lanes do. So train twice, with delays and without: if losses are not equal bit
for bit, a wait is missing. :func:`delay_streams` does this to real streams, :func:`delay_threads` to the lanes of CPUs.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, final
from unittest import mock

import torch

from thinwire.collectives.links.streams import CudaStreams, Streams, replace_streams
from thinwire.sharding.lanes.lanes import ThreadWorker, Ticket
from thinwire.sharding.lanes.streams import Body

Place = Literal["lanes", "home"]
"""What is late: the bodies of lanes, or the computation that goes on after it has given a lane something to do."""


def sleep_on_device(seconds: float) -> None:
    """Queue a sleep on the current stream of CUDA."""
    torch.cuda._sleep(int(seconds * 1e9))


@final
class Delays:
    """Makes delays."""

    def __init__(self, sleep: Callable[[float], object], longest: float, seed: int) -> None:
        self._sleep, self._longest, self._random = sleep, longest, random.Random(seed)
        self._lock = threading.Lock()
        self.number = 0

    def make(self) -> None:
        with self._lock:
            self.number += 1
            seconds = self._random.uniform(0.0, self._longest)
        self._sleep(seconds)


class _DelayedStreams:
    """The streams of a device, of which some are late."""

    def __init__(self, streams: Streams, delays: Delays, place: Place) -> None:
        self._streams, self._delays, self._place = streams, delays, place
        self.stream, self.event, self.current = streams.stream, streams.event, streams.current
        self.synchronize, self.send, self.pin = streams.synchronize, streams.send, streams.pin

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        """Queue operations on a stream inside the context."""
        with self._streams.use(stream):
            if self._place == "lanes":
                self._delays.make()
            yield
        if self._place == "home":
            self._delays.make()


@contextlib.contextmanager
def delay_streams(
    place: Place,
    *,
    streams: Callable[[torch.device], Streams] = CudaStreams,
    sleep: Callable[[float], object] = sleep_on_device,
    longest: float = 0.01,
    seed: int = 0,
) -> Iterator[Delays]:
    """Delay the streams of models that are sharded inside the context, by at most ``longest`` seconds; ``sleep`` queues
    a sleep of so many on the current stream."""
    delays = Delays(sleep, longest, seed)
    with replace_streams(lambda device: _DelayedStreams(streams(device), delays, place)):
        yield delays


@contextlib.contextmanager
def delay_threads(place: Place, *, longest: float = 0.005, seed: int = 0) -> Iterator[Delays]:
    """Delay the lanes of CPUs, which are threads, or the thread that computes, by at most ``longest`` seconds."""
    delays, submit = Delays(time.sleep, longest, seed), ThreadWorker.submit

    def late(worker: ThreadWorker, body: Body, after: Sequence[Ticket], label: str) -> Ticket:
        def delayed() -> None:
            delays.make()
            body()

        ticket = submit(worker, delayed if place == "lanes" else body, after, label)
        if place == "home":
            delays.make()
        return ticket

    with mock.patch.object(ThreadWorker, "submit", late):
        yield delays
