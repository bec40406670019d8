"""Starts the ranks of a run on this machine through torch's elastic launcher, and restarts them.

The launcher's own restarts are not used, as it restarts after any failure, a wrong learning rate included. Here, a lost
rank (killed, or disconnected) restarts all ranks from the last checkpoint, with a new rendezvous each time. A failure
that a restart cannot cure is reported at once.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from thinwire.errors import OutOfMemoryError, Room, ThinwireError
from thinwire.train.checkpoint import checkpoints
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import num_cores
from thinwire.train.launching.resolved import ResolvedRun

Report = Callable[[str], None]

_CURABLE: Final = ("CollectiveError",)
"""Expected errors that a restart may cure: other ranks raise them when a rank is lost."""


_LOOPBACK: Final = "lo"

_SHUTDOWN: Final = 10
"""Seconds that ranks have to exit before they are killed. In torch 2.11 it is always 30."""


class LostRankError(ThinwireError, RuntimeError):
    """A rank failed and no restart was left, or none could help."""


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


def launch(run: ResolvedRun, report: Report) -> None:
    """Run all ranks until the run is complete or is asked to stop.

    Args:
        run: The run, whose directory has been opened.
        report: Called with one line for every restart.

    Raises:
        LostRankError: A rank failed and no restart is left, or none can help; the message names the rank and the cause.
        OutOfMemoryError: A rank ran out of memory.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    directory, max_restarts = run.directory, run.recipe.cluster.max_restarts
    with _environment(_worker_environment(run.plan.ranks)), _stop_on_signal(directory, report), _quiet():
        for restart in range(max_restarts + 1):
            try:
                failure = _attempt(run, resume=run.resume or restart > 0)
            except SignalException as error:
                raise LostRankError("ended at once; continue from the last checkpoint with --resume") from error
            if failure is None:
                return
            report(_next_attempt(failure, directory, restart, max_restarts))


def _next_attempt(failure: Failure, directory: RunDirectory, restart: int, max_restarts: int) -> str:
    """One line about the restart that follows a failure; raises an error if there is none."""
    if failure.room is not None:
        raise OutOfMemoryError(failure.sentence, failure.room)
    if not failure.curable:
        raise LostRankError(failure.sentence)
    lost = f"rank {failure.rank} {failure.sentence}"
    if directory.stop_file.exists():
        raise LostRankError(f"{lost} while the run was stopping; continue with --resume")
    if restart == max_restarts:
        times = f" after {restart} restart{'s' if restart > 1 else ''}" if restart else ""
        raise LostRankError(f"{lost}{times}; see {directory.logs}, then continue with --resume")
    saved = checkpoints(directory.checkpoints)
    origin = f"step {saved[-1].step}" if saved else "the beginning"
    return f"{lost}; restarting all ranks from {origin} ({restart + 1} of {max_restarts})"


def _attempt(run: ResolvedRun, *, resume: bool) -> Failure | None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    directory, num_ranks = run.directory, run.plan.ranks
    meeting = Path(tempfile.mkdtemp(prefix="thinwire-"))
    patience: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN}
    config = LaunchConfig(
        # A file that only this user can open: torch's store for launchers would listen on every interface.
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=time.strftime("%Y%m%d-%H%M%S"),  # names the directory of its logs
        rdzv_backend="c10d",
        rdzv_endpoint=str(meeting / "launcher"),
        # Heartbeats are for other hosts, and a file store only grows.
        rdzv_configs={"store_type": "file", "keep_alive_interval": 3600},
        local_addr="localhost",
        max_restarts=0,
        # Rank 0 owns the terminal; the output of the others goes to files.
        logs_specs=DefaultLogsSpecs(log_dir=str(directory.logs), redirects=dict.fromkeys(range(1, num_ranks), Std.ALL)),
        signals_to_handle="SIGHUP,SIGQUIT",
        **{name: value for name, value in patience.items() if name in LaunchConfig.__dataclass_fields__},
    )
    arguments = ["-u", "-m", "thinwire.train.worker", str(directory.path), "--stream", run.stream]
    arguments += ["--launcher", str(os.getpid()), "--node-ranks", str(run.node_ranks)]
    try:
        elastic_launch(config, sys.executable)(*arguments, *(["--resume"] if resume else []))
    except ChildFailedError as error:
        return _cause(error.failures)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return None


def _cause(failures: Mapping[int, Any]) -> Failure:
    """The failure that explains the others, from the launcher's ``ProcessFailure`` objects."""
    all_failures = [_failure(rank, failures[rank]) for rank in sorted(failures)]
    return min(all_failures, key=lambda failure: failure.weight)


def _failure(rank: int, failure: Any) -> Failure:
    message = failure.error_file_data.get("message")
    if isinstance(message, dict):
        about = message["extraInfo"]
        room = Room(**about["room"]) if about.get("room") else None
        return Failure(
            rank, message["message"], error=about.get("error"), expected=bool(about.get("expected")), room=room
        )
    if failure.exitcode < 0:
        name = failure.signal_name()
        return Failure(rank, f"was killed by {name}", signal=-failure.exitcode)
    return Failure(rank, f"exited with status {failure.exitcode} and said nothing")


def _worker_environment(num_ranks: int) -> dict[str, str]:
    """Environment variables of the ranks, except those that the user has set."""
    wanted = {
        # The launcher's store would listen on every interface; rank 0's store listens only at the given address.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_ranks)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if _LOOPBACK in (name for _, name in socket.if_nameindex()):
        wanted["GLOO_SOCKET_IFNAME"] = _LOOPBACK  # all ranks are on this host
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextmanager
def _stop_on_signal(directory: RunDirectory, report: Report) -> Iterator[None]:
    """The first signal asks the ranks to save and exit; the second kills them."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def stop(number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if directory.stop_file.exists():
            raise SignalException(f"second {name}", signal.SIGTERM)
        directory.stop_file.write_text(name)
        report(f"{name}: finishing the step and saving; once more to end at once")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        directory.stop_file.unlink(missing_ok=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the launcher, which prints two screens for every failure; we report one sentence."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
