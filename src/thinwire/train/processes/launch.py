"""Runs a training until it is complete: all ranks start again from the last checkpoint if one of them is lost.

A lost rank is one that was killed, or that has lost its connections. A failure that a restart cannot cure, such as a
wrong learning rate, is reported at once. This process never imports torch; :mod:`thinwire.train.processes.server` does.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from thinwire.errors import OutOfMemoryError, ThinwireError
from thinwire.train.checkpoint import checkpoints
from thinwire.train.directory import RunDirectory, write_atomically
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.processes.ranks import Failure, run_ranks

Report = Callable[[str], None]


class LostRankError(ThinwireError, RuntimeError):
    """A rank failed and no restart was left, or none could help."""


class _EndedBySignalError(Exception):
    """A signal asks to end at once."""


def launch(run: ResolvedRun, report: Report) -> None:
    """Run all ranks of a run, whose directory has been opened, until it is complete or is asked to stop. Every restart
    is reported in one line.

    Raises:
        LostRankError: A rank failed and no restart is left, or none can help; the message names the rank and the cause.
        OutOfMemoryError: A rank ran out of memory.
    """
    directory, max_restarts = run.directory, run.recipe.cluster.max_restarts
    with _stop_on_signal(directory, report):
        for restart in range(max_restarts + 1):
            try:
                failure = run_ranks(replace(run, resume=run.resume or restart > 0))
            except _EndedBySignalError as error:
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


@contextmanager
def _stop_on_signal(directory: RunDirectory, report: Report) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the ranks to save and exit. The second ends them, as does a terminal that is
    closed, unless ``nohup`` has said otherwise."""

    def stop(number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if directory.stop_file.exists():
            raise _EndedBySignalError(f"second {name}")
        write_atomically(directory.stop_file, name)  # a rank that saw the file empty would not know the reason
        report(f"{name}: finishing the step and saving; once more to end at once")

    def end(number: int, frame: FrameType | None) -> None:
        raise _EndedBySignalError(signal.Signals(number).name)

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGHUP: end, signal.SIGQUIT: end}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del handlers[signal.SIGHUP]
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)
        directory.stop_file.unlink(missing_ok=True)
