"""A rank of a system under benchmark: builds the system once, then trains when its turn comes.

Between turns the process is stopped: gloo's threads would go on polling, a hundred times a second each.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import os
import resource
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any, Final

from thinwire.collectives import group
from thinwire.errors import ThinwireError
from thinwire.sharding.memory.initial import give_back_freed_memory
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.systems.protocol import Failed, Hello, Launch, Ready, Settled, TurnRequest, receive

_TRIM_SECONDS: Final = 5e-4
"""Seconds between two times that a lean process gives back what has been freed."""


def serve(address: str, launch: Launch, local_rank: int) -> None:
    """Be one rank until the controller closes the connection."""
    place = Place(launch.host * launch.local + local_rank, launch.nodes, launch.local)
    _redirect_output(launch.log)
    pipe: Connection[Any, Any] = Client(address, family="AF_UNIX")
    pipe.send(Hello(launch.host, launch.system.label, place.rank))
    try:
        _enter(launch, place)
        module, function = launch.system.builder.split(":")
        system: System = getattr(importlib.import_module(module), function)(place, launch.system.options)
        pipe.send(Ready())
        while (turn := receive(pipe)) is not None:
            _take(turn, system, pipe)
    except BaseException as error:
        if not isinstance(error, ThinwireError):
            traceback.print_exc()
        pipe.send(Failed(f"{type(error).__name__}: {str(error).strip()}"))
        raise


def _redirect_output(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)


def _enter(launch: Launch, place: Place) -> None:
    """The environment that torchrun would make, and the job."""
    os.environ.update(launch.environment)
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.local_rank))
    os.environ.update(WORLD_SIZE=str(place.world), LOCAL_WORLD_SIZE=str(place.local))
    if launch.system.joined:
        group.init("gloo", timeout=datetime.timedelta(seconds=launch.timeout))


def _take(turn: TurnRequest, system: System, pipe: Connection[Any, Any]) -> None:
    with _Lean() if turn.lean else contextlib.nullcontext():
        values = [system.step(turn.options) for _ in range(turn.warmup)]
        pipe.send(Ready())
        pipe.recv()
        system.waited()  # forget the warm-up's
        used = time.process_time()
        values += [system.step(turn.options) for _ in range(turn.steps)]
        finished, cpu_seconds = time.monotonic(), time.process_time() - used
        waited = system.waited()
        system.settle()
    peak = _peak_of_turn() if turn.lean else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(Settled(finished, cpu_seconds, waited, tuple(values), peak, system.predicted()))


class _Lean(threading.Thread):
    """A context in which the process holds hardly more than it uses: a thread gives back what is freed all the time.

    Settings of glibc are not enough, which reuses holes between what is in use and keeps their pages. On entering, the
    peak of memory so far is forgotten.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self._trim = ctypes.CDLL(None).malloc_trim

    def __enter__(self) -> None:
        give_back_freed_memory()
        self._trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5 resets VmHWM
        self.start()

    def run(self) -> None:
        while not self._ended.wait(_TRIM_SECONDS):
            self._trim(0)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def _peak_of_turn() -> int:
    """Peak resident memory since it was reset, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
