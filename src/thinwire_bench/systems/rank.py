"""A rank of a system under benchmark: builds the system once, then trains when its turn comes.

Between turns the process is stopped: gloo's threads would go on polling, a hundred times a second each.
"""

from __future__ import annotations

import datetime
import importlib
import os
import resource
import time
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any

from thinwire.collectives import group
from thinwire.errors import ThinwireError
from thinwire_bench.peers.interface import Place, System
from thinwire_bench.systems.protocol import Failed, Hello, Launch, Ready, Settled, TurnRequest, Warm

__all__ = ["serve"]


def serve(address: str, launch: Launch, local_rank: int) -> None:
    """Be one rank until the controller closes the connection.

    Args:
        address: Address of the controller's socket.
        launch: What to start.
        local_rank: Index of this rank on its host.
    """
    place = Place(launch.host * launch.local + local_rank, launch.nodes, launch.local)
    _redirect_output(launch.log)
    pipe: Connection[Any, Any] = Client(address, family="AF_UNIX")
    pipe.send(Hello(launch.host, launch.system.label, place.rank))
    try:
        _enter(launch, place)
        system = build(launch, place)
        pipe.send(Ready())
        while (turn := _receive(pipe)) is not None:
            _take(turn, system, pipe)
    except BaseException as error:
        if not isinstance(error, ThinwireError):
            traceback.print_exc()
        pipe.send(Failed(f"{type(error).__name__}: {str(error).strip()}"))
        raise


def build(launch: Launch, place: Place) -> System:
    """The system, by its builder's name."""
    module, function = launch.system.builder.split(":")
    system: System = getattr(importlib.import_module(module), function)(place, launch.system.options)
    return system


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


def _receive(pipe: Connection[Any, Any]) -> Any:
    """The next message; None where the controller is gone or done."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _take(turn: TurnRequest, system: System, pipe: Connection[Any, Any]) -> None:
    values = [system.step(turn.options) for _ in range(turn.warmup)]
    pipe.send(Warm())
    pipe.recv()
    system.waited(), system.sent()  # forget the warm-up's
    used = time.process_time()
    values += [system.step(turn.options) for _ in range(turn.steps)]
    finished, cpu_seconds = time.monotonic(), time.process_time() - used
    waited = system.waited()
    system.settle()
    sent = system.sent()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send(Settled(finished, cpu_seconds, waited, tuple(values), peak, system.predicted(), sent))
