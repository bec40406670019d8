"""Lanes: in-order queues of communication that run in parallel with computation.

A lane has a worker for every stage of its collectives: hop 1 of one collective runs while hop 2 of the one before
crosses nodes. On CUDA a worker is a stream and a ticket an event; on CPU a worker is a thread. Streams, threads and the
lifetime of buffers in flight live in this package only. The rules, which :mod:`thinwire.testing.streams` checks:

- Buffers are allocated and freed by the compute thread, on the compute stream. A body starts after everything the
  compute stream had queued when it was submitted, so memory that was reused is free by then.
- A ticket holds what its body reads and writes until the body has finished; nothing needs ``record_stream``.
- Bodies make few, long calls that release the interpreter lock: a lane in pure Python would slow computation down.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import torch

from thinwire.collectives.links.streams import Streams, streams_of
from thinwire.collectives.moves import Move, Moves
from thinwire.program import AnyLane, Axis, HostLane, Lane
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.program.timeline import WAITING
from thinwire.sharding.lanes.workers import Body, Recorder, StreamWorker, ThreadWorker, Ticket, Worker

__all__ = ["Lanes", "Load", "Ticket"]

WATCHED = (Lane.GATHER, Lane.REDUCE, Lane.SYNC, Lane.SPREAD, Lane.OUTER)
"""Lanes whose waits and work are added up."""

Hook = TypeVar("Hook", bound=Callable[..., Any])

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


class HomeStream:
    """The current stream at the time of its creation: the one on which a model was sharded, to which the memory of its
    units and gradients belongs.

    A model may run some of its modules on streams of its own, and autograd runs their backward there. The runtime does
    its work at home, whatever stream calls it.

    Args:
        streams: Streams of the device; ``None`` if it has none.

    Attributes:
        exists: Whether the device has streams.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._stream = None if streams is None else streams.current()
        self.exists = streams is not None

    def is_elsewhere(self) -> bool:
        """Whether the current stream is another one."""
        return self._streams is not None and self._streams.current() != self._stream

    @contextlib.contextmanager
    def visit(self) -> Iterator[bool]:
        """Queue what the block does on the home stream, after what the current stream has queued and before what it
        will queue.

        Yields:
            Whether the current stream is another one. Memory of that stream may be dropped after the block only.
        """
        streams, home = self._streams, self._stream
        if streams is None or home is None or (current := streams.current()) == home:
            yield False
            return
        home.wait_stream(current)
        with streams.use(home):
            yield True
        current.wait_stream(home)

    def visited_by(self, hook: Hook) -> Hook:
        """Decorator of hooks that are called on any stream."""
        if not self.exists:
            return hook

        @functools.wraps(hook)
        def visit(*args: Any, **kwargs: Any) -> Any:
            with self.visit():
                return hook(*args, **kwargs)

        return cast(Hook, visit)


class Lanes:
    """The lanes of one model.

    Args:
        device: Device of the model's tensors; CUDA uses streams, the CPU uses threads.
        stages: Whether stages of different collectives of a lane run at the same time.

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
        """Queue a collective.

        Args:
            lane: Lane of the collective; moves of one stage of a lane run one after another.
            work: The moves, at least one, or a single body for the whole collective. They must not allocate memory that
                outlives them.
            after: Tickets that must finish first.
            load: Description of the data, for timelines.
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
        """Queue work of the host's processor, for a thread that runs beside the computing one.

        Args:
            body: The work.
            after: Tickets of copies to the host that must end first.
            load: Description of the data, for timelines.
        """
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


def read_later(value: torch.Tensor) -> Callable[[], float]:
    """Send a 0-D tensor to the host, which reads it later, so that it does not wait for what the device computes now.

    Returns:
        The function that reads it there. The host waits until the device has computed it.
    """
    streams = streams_of(value.device)
    if streams is None:
        number = float(value)
        return lambda: number
    pinned = value.device.type == "cuda"  # the host waits for copies to other memory
    copy = torch.empty((), dtype=value.dtype, pin_memory=pinned, device="cpu")
    streams.send(value.detach(), copy)
    arrived = streams.event()
    arrived.record(streams.current())

    def read() -> float:
        arrived.synchronize()
        return float(copy)

    return read


def _let_go(streams: Streams, locked: _Locked) -> None:
    """Let the memory of a model that is dropped, which its last bodies may still read and write, be freed."""
    streams.synchronize()
    _unlock(locked)


def _unlock(locked: _Locked) -> None:
    for _, unlock in locked:
        unlock()
    locked.clear()
