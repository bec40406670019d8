"""The ranks of a run on this machine as processes: how they start, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, Self

from thinwire.errors import Room
from thinwire.train.environment import free_port, num_cores
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.processes.server import end_with_launcher, leave_session, start

_CURABLE: Final = ("CollectiveError",)
"""Expected errors that a restart may cure: other ranks raise them when a rank is lost."""

_LOOPBACK: Final = "lo"

_LAST_WORDS: Final = 2.0
"""Seconds in which a rank whose connections have broken may be followed by the one that broke them."""

_SHUTDOWN: Final = 10.0
"""Seconds that ranks have to exit before they are killed."""


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Attributes:
        rank: Number of the rank.
        sentence: The message of its error, or the way in which it died.
        signal: Number of the signal that killed it; ``None`` if it exited.
        error: Name of the exception's class; ``None`` if the rank left no message.
        expected: Whether the error is one that thinwire raises on purpose.
        room: Memory of the rank, if it ran out of memory.
    """

    rank: int
    sentence: str
    signal: int | None = None
    error: str | None = None
    expected: bool = False
    room: Room | None = None

    @classmethod
    def of(cls, rank: int, exitcode: int, said: Mapping[str, Any]) -> Self:
        """The failure of a rank with an exit status, or the negative number of the signal that killed it, and what it
        said about its error; empty if it said nothing."""
        if said:
            about = said["extraInfo"]
            room = Room(**about["room"]) if about.get("room") else None
            return cls(rank, said["message"], error=about.get("error"), expected=bool(about.get("expected")), room=room)
        if exitcode < 0:
            return cls(rank, f"was killed by {signal.Signals(-exitcode).name}", signal=-exitcode)
        return cls(rank, f"exited with status {exitcode} and said nothing")

    @property
    def curable(self) -> bool:
        """Whether starting again may help."""
        return not self.expected or self.error in _CURABLE

    @property
    def weight(self) -> int:
        """Sort key by distance from the cause: a rank's own error or its death comes before a broken connection."""
        if self.error in _CURABLE:
            return 2
        # The launcher ends the survivors itself.
        return 3 if self.signal == signal.SIGTERM else 0 if self.expected else 1


def run_ranks(run: ResolvedRun, *, only: Mapping[str, str] | None = None, limit: float | None = None) -> Failure | None:
    """Start all ranks of a run, whose directory has been opened, and wait until they have ended; if others start the
    other ranks, only that of these environment variables. Returns the failure that explains the others; ``None`` if
    every rank has succeeded.

    Raises:
        TimeoutError: Ranks had not ended within the limit, in seconds, and were ended.
    """
    began, words = time.monotonic(), Path(tempfile.mkdtemp(prefix="thinwire-"))
    variables = _all_here(run.plan.ranks) if only is None else [dict(only)]
    processes: dict[int, BaseProcess] = {}
    try:
        for own in variables:
            rank = int(own["RANK"])
            own["TORCHELASTIC_ERROR_FILE"] = str(words / str(rank))
            # Rank 0 owns the terminal; the output of the others goes to files.
            log = run.directory.logs / f"rank-{rank}.log" if rank or only is not None else None
            processes[rank] = start(f"rank {rank}", _rank, dict(os.environ) | own, log, run)
        while not (failures := _failures(processes, words)) and (left := _running(processes)):
            patience = None if limit is None else began + limit - time.monotonic()
            if not wait([process.sentinel for process in left], patience):
                raise TimeoutError(f"ranks {sorted(processes)} have not ended within {limit:.0f} s")
        deadline = time.monotonic() + _LAST_WORDS
        while failures and cause(failures).error in _CURABLE and (left := _running(processes)):
            if not wait([process.sentinel for process in left], deadline - time.monotonic()):
                break
            failures = _failures(processes, words)
        return cause(failures) if failures else None
    finally:
        _end(processes)
        shutil.rmtree(words, ignore_errors=True)


def cause(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others, given by rank."""
    return min(failures, key=lambda failure: failure.weight)


def _rank(environment: Mapping[str, str], log: Path | None, run: ResolvedRun) -> None:
    """Be a rank, in a process that the server has forked."""
    leave_session()
    end_with_launcher()
    os.environ.clear()
    os.environ.update(environment)
    if log is not None:
        with log.open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(file.fileno(), stream.fileno())
    from thinwire.train.processes.worker import be_rank  # imported long ago, by the server

    raise SystemExit(be_rank(run))


def _all_here(num_ranks: int) -> list[dict[str, str]]:
    """Environment variables of every rank of a job on this machine; the user's own come first, except where ranks
    meet."""
    wanted = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if _LOOPBACK in (name for _, name in socket.if_nameindex()):
        wanted["GLOO_SOCKET_IFNAME"] = _LOOPBACK  # all ranks are on this host
    meeting = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    common = {name: value for name, value in wanted.items() if name not in os.environ} | meeting
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]


def _running(processes: Mapping[int, BaseProcess]) -> list[BaseProcess]:
    return [process for process in processes.values() if process.exitcode is None]


def _failures(processes: Mapping[int, BaseProcess], words: Path) -> list[Failure]:
    codes = {rank: process.exitcode for rank, process in processes.items()}
    return [Failure.of(rank, code, _said(words / str(rank))) for rank, code in codes.items() if code]


def _said(file: Path) -> Mapping[str, Any]:
    """What a rank has written about its error."""
    with contextlib.suppress(OSError, ValueError):
        message = json.loads(file.read_text(encoding="utf-8")).get("message")
        if isinstance(message, dict):
            return message
    return {}


def _end(processes: Mapping[int, BaseProcess]) -> None:
    """End the ranks that still run: ask first, and kill those that do not obey. Waits for none of them for ever."""
    for process in _running(processes):
        process.terminate()
    deadline = time.monotonic() + _SHUTDOWN
    for process in processes.values():
        process.join(max(0.0, deadline - time.monotonic()))
    for process in _running(processes):
        process.kill()
    deadline = time.monotonic() + _SHUTDOWN
    for process in processes.values():
        # A process in a call of a file system that hangs ends once the call returns, which may be never.
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is not None:
            process.close()
