"""The messages between controller, servers and ranks of a benchmark: plain data, pickled over local sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from signal import Signals
from typing import Any

from thinwire.errors import ThinwireError
from thinwire_bench.peers.interface import SystemSpec


def receive(connection: Connection[Any, Any]) -> Any:
    """The next message; None where the other side is gone or done."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


class BenchError(ThinwireError, RuntimeError):
    """A rank of a benchmark failed, died or took too long; the message names system, rank and cause."""


@dataclass(frozen=True)
class Launch:
    """To a server: start this host's ranks of a system, with their output in a file, and ``timeout`` seconds until a
    collective fails."""

    system: SystemSpec
    nodes: int
    local: int
    host: int
    environment: Mapping[str, str]
    log: str
    timeout: float


@dataclass(frozen=True)
class Order:
    """To a server: stop this host's ranks of a system by SIGSTOP, threads that poll included, or let them go on by
    SIGCONT."""

    label: str
    signal: Signals


@dataclass(frozen=True)
class TurnRequest:
    """To a rank: train some steps.

    Attributes:
        steps: Timed steps.
        warmup: Steps before them that are not timed.
        options: Options of every step.
        lean: Whether the allocator of the rank gives back at once what is freed, from this turn on, and the peak of its
            memory is that of this turn alone: what it needs, without what an allocator keeps for later.
    """

    steps: int
    warmup: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    lean: bool = False


@dataclass(frozen=True)
class Hello:
    """The first message of a process: a server's, or with label and rank that of a rank of a system."""

    host: int
    label: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Ready:
    """From a rank that waits for the word: the system is built, or the steps that are not timed are done."""


@dataclass(frozen=True)
class Settled:
    """From a rank: the turn is over and nothing is under way.

    Attributes:
        finished: When its last step ended, in seconds of the machine's monotonic clock.
        cpu_seconds: Processor time of all its threads during the timed steps, in seconds.
        waited: Seconds that computation waited during the timed steps, by lane.
        values: What each step returned, the warm-up steps first.
        peak_rss: Its peak resident memory in bytes.
        predicted: Bytes per step that it should send to other hosts; None where its system predicts none.
    """

    finished: float
    cpu_seconds: float
    waited: Mapping[str, float]
    values: tuple[float, ...]
    peak_rss: int
    predicted: int | None


@dataclass(frozen=True)
class Failed:
    """From a rank: an exception, here as one line, ended it."""

    sentence: str


@dataclass(frozen=True)
class Ended:
    """From a server: a rank's process is no more, for example because it ``was killed by SIGKILL``."""

    label: str
    rank: int
    how: str
