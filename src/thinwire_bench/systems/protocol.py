"""What controller, servers and ranks of a benchmark say to each other: plain data, pickled over local sockets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.errors import ThinwireError
from thinwire_bench.peers.interface import SystemSpec

__all__ = [
    "BenchError", "Ended", "Failed", "Hello", "Launch", "Ready", "Settled", "Sleep", "Turn", "Wake", "Warm",
]  # fmt: skip


class BenchError(ThinwireError, RuntimeError):
    """A rank of a benchmark failed, died or took too long; the message names system, rank and cause."""


@dataclass(frozen=True)
class Launch:
    """To a server: start this host's ranks of a system.

    Attributes:
        system: which.
        nodes: hosts of the run.
        local: ranks of each host.
        host: index of this one.
        environment: variables of the job, for all ranks.
        log: path of the file that takes what the ranks print.
        timeout: seconds until a collective fails.
    """

    system: SystemSpec
    nodes: int
    local: int
    host: int
    environment: Mapping[str, str]
    log: str
    timeout: float


@dataclass(frozen=True)
class Sleep:
    """To a server: stop this host's ranks of a system, threads that poll included.

    Attributes:
        label: of the system.
    """

    label: str


@dataclass(frozen=True)
class Wake:
    """To a server: let this host's ranks of a system go on.

    Attributes:
        label: of the system.
    """

    label: str


@dataclass(frozen=True)
class Turn:
    """To a rank: train some steps.

    Attributes:
        steps: timed ones.
        warmup: steps before them, not timed.
        options: passed to every step.
    """

    steps: int
    warmup: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Hello:
    """The first message of a process.

    Attributes:
        host: index of its host.
        label: of its system, for a rank.
        rank: of its system, for a rank.
    """

    host: int
    label: str | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Ready:
    """From a rank: the system is built."""


@dataclass(frozen=True)
class Warm:
    """From a rank: the steps that are not timed are done; it waits for the word."""


@dataclass(frozen=True)
class Settled:
    """From a rank: the turn is over and nothing is under way.

    Attributes:
        finished: when its last step ended, in seconds of the machine's monotonic clock.
        cpu_seconds: of all its threads, during the timed steps.
        waited: seconds that computation waited during the timed steps, by lane.
        values: what each step returned, those of the warm-up first.
        peak_rss: bytes, the most it ever had resident.
        predicted: bytes that it should send to other hosts in a step; None where its system does not tell.
        sent: bytes that it sent during the timed steps, by axis and codec.
    """

    finished: float
    cpu_seconds: float
    waited: Mapping[str, float]
    values: tuple[float, ...]
    peak_rss: int
    predicted: int | None
    sent: Mapping[str, int]


@dataclass(frozen=True)
class Failed:
    """From a rank: an exception ended it.

    Attributes:
        sentence: the exception in a line.
    """

    sentence: str


@dataclass(frozen=True)
class Ended:
    """From a server: a rank's process is no more.

    Attributes:
        label: of its system.
        rank: which.
        how: for example ``was killed by SIGKILL``.
    """

    label: str
    rank: int
    how: str
