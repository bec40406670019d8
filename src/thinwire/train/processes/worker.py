"""The process of one rank: :func:`be_rank` under thinwire's launcher, :func:`train` under others.

If a rank fails, it writes one sentence to a file for the launcher, and its traceback to the run's ``logs``. It prints
nothing, because the terminal shows rank 0's progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from thinwire.agreement import Typed
from thinwire.collectives import group
from thinwire.errors import OutOfMemoryError, ThinwireError
from thinwire.train.data.packing import Dataset, prepare
from thinwire.train.environment import join, rank_device
from thinwire.train.launching.resolved import ResolvedRun, Timing
from thinwire.train.loop import StopRequest, timed_steps, train_rank

_LAST_WORDS: Final = 8192
"""Bytes reserved for the file in which a rank reports the cause of its failure."""


def train(run: ResolvedRun, *, launched: bool) -> None:
    """Join a run, whose directory rank 0 has opened, as one rank, train, and leave it. ``launched`` says whether
    thinwire's launcher started this process."""
    with _joined(run) as (dataset, device):
        # Rank 0 decides: it has opened the directory, and other ranks may already see files that it has written.
        run = dataclasses.replace(run, resume=group.control().all_gather_typed(run.resume, Typed[bool](bool))[0])
        with StopRequest(run.directory.stop_file, launched=launched) as stop:
            train_rank(run, dataset, device, stop)


@contextlib.contextmanager
def _joined(run: ResolvedRun) -> Iterator[tuple[Dataset, torch.device]]:
    """Be one rank of a run's job; gives its tokens and the device of this rank."""
    cluster = run.recipe.cluster
    device = rank_device(cluster.device, int(os.environ.get("LOCAL_RANK", "0")))
    dataset = prepare(run.recipe.data)
    join(device, cluster.timeout, cluster.keys)
    try:
        yield dataset, device
    finally:
        group.shutdown()


@contextlib.contextmanager
def recorded_failure(logs: Path) -> Iterator[None]:
    """Write a sentence for the launcher and a traceback to the directory of the run's logs, then re-raise the error."""
    try:
        yield
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        file = logs / f"rank-{rank}.traceback"
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            file.write_text(traceback.format_exc(), encoding="utf-8")
        _record(error, file)
        raise


def _reserve() -> None:
    """Reserve disk space for the message of a failure in advance, because a full disk may be the cause of it."""
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:
        with contextlib.suppress(OSError):
            Path(path).write_bytes(json.dumps({"message": ""}).encode().ljust(_LAST_WORDS))


def _record(error: Exception, log: Path) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    expected = isinstance(error, ThinwireError)
    room = dataclasses.asdict(error.room) if isinstance(error, OutOfMemoryError) else None
    sentence = str(error) if expected else f"{type(error).__name__}: {error} (traceback: {log})"
    about: dict[str, Any] = {
        "message": sentence[: _LAST_WORDS // 2],
        "extraInfo": {
            "timestamp": str(int(time.time())),
            "error": type(error).__name__,
            "expected": expected,
            "room": room,
        },
    }
    words = json.dumps({"message": about}).encode().ljust(_LAST_WORDS)
    with contextlib.suppress(OSError), Path(path).open("r+b" if Path(path).exists() else "wb") as file:
        file.write(words)


def be_rank(run: ResolvedRun) -> int:
    """Be one rank of a run that our launcher has opened, in a process of its own; returns its exit status."""
    with contextlib.suppress(OSError):  # the name that ps and top show
        Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}", encoding="utf-8")
    _reserve()
    warnings.simplefilter("ignore")  # torch's own, once per rank; errors are ours to report
    try:
        with recorded_failure(run.directory.logs):
            if run.timing is None:
                train(run, launched=True)
            else:
                _time(run, run.timing)
    except Exception:
        return 1
    return 0


def _time(run: ResolvedRun, timing: Timing) -> None:
    with _joined(run) as (dataset, device):
        seconds = timed_steps(run, dataset, device, timing.deadline, timing.soon)
        if group.control().rank == 0:
            timing.result.write_text(json.dumps(seconds), encoding="utf-8")
