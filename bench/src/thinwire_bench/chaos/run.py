"""A run of ``thinwire train`` as processes: started, watched, signalled and ended."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POLL: Final = 0.01
"""Seconds between two looks at a run."""

_LONGEST_STEP: Final = 2.0
"""Seconds between two looks from which on this process must have been stopped, as a busy machine may do."""

_HIDDEN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "THINWIRE_OUT")

_SET_DEATH_SIGNAL: Final = 1
"""``PR_SET_PDEATHSIG`` of Linux."""

_PRCTL: Final = ctypes.CDLL(None).prctl
"""Looked up here: a child that has just been forked must not."""

_CLEARED: Final = 30.0
"""Seconds within which all processes of a run whose launcher is gone must be gone too."""


def environment(cache: Path) -> dict[str, str]:
    """Environment variables of every run, which trains on the processor."""
    kept = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    return kept | {"THINWIRE_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def losses(metrics: Path) -> dict[int, str]:
    """Loss, validation loss and gradient norm of a run by step, as text: equal text is equal to the last digit."""
    found: dict[int, str] = {}
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else ():
        with contextlib.suppress(ValueError):  # the last line may still be being written
            record = json.loads(line)
            found[record["step"]] = json.dumps([record["loss"], record["val_loss"], record["grad_norm"]])
    return found


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended.

    Attributes:
        status: Exit status, negative for a signal; ``None`` if it had to be killed because it hung.
        text: What it printed.
    """

    status: int | None
    text: str

    @property
    def sentence(self) -> str:
        """The last line of its output, which names the failure of a command that failed."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


@dataclass
class DisturbedRun:
    """One run, started again and again in one directory, by a command without ``--out`` and ``--resume``."""

    command: Sequence[str]
    directory: Path
    log: Path
    variables: Mapping[str, str]

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._begin = 0

    @property
    def running(self) -> bool:
        """Whether its launcher runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process of the launcher."""
        assert self._process is not None
        return self._process.pid

    @property
    def step(self) -> int:
        """The last step in its metrics; 0 before the first."""
        with contextlib.suppress(OSError):
            matches = re.findall(rb'"step": (\d+)', (self.directory / "metrics.jsonl").read_bytes()[-4096:])
            return int(matches[-1]) if matches else 0
        return 0

    @property
    def starts(self) -> int:
        """How often ranks have begun to train."""
        with contextlib.suppress(OSError):
            return len((self.directory / "starts.jsonl").read_bytes().splitlines())
        return 0

    def checkpoints(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted((self.directory / "checkpoints").glob("step-*"))
        return []

    def start(self) -> None:
        """Start it, or continue it if there is something to continue."""
        resume = ["--resume"] if (self.directory / "recipe.toml").is_file() else []
        arguments = ["--out", str(self.directory), *resume]
        _let_go(self._process)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._begin = log.tell()
            self._process = subprocess.Popen(
                [*self.command, *arguments], env=dict(self.variables), stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip

    def tell(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, the run has ended, or time is over; returns whether it holds."""
        for _ in _moments(seconds):
            if condition():
                return True
            if not self.running:
                return condition()
        return False

    def ended(self, seconds: float) -> CommandEnd:
        """Wait for its end; a run that has not ended by itself in time is killed and has hung."""
        assert self._process is not None
        status = None
        for _ in _moments(seconds):
            if (status := self._process.poll()) is not None:
                break
        else:
            self.kill_all()
        _let_go(self._process)
        text = self.log.read_bytes()[self._begin :].decode(errors="replace")
        return CommandEnd(status, text)

    def processes(self) -> dict[int, str]:
        """Its processes, from the launcher down, by id with their names."""
        children: dict[int, list[int]] = {}
        names: dict[int, str] = {}
        for process, parent, name in _table():
            children.setdefault(parent, []).append(process)
            names[process] = name
        found: dict[int, str] = {}
        waiting = [self.pid]
        while waiting:
            process = waiting.pop()
            if process in names:
                found[process] = names[process]
                waiting += children.get(process, [])
        return found

    def ranks(self) -> list[int]:
        """The processes of its ranks, in order of their numbers."""
        named = [(name, process) for process, name in self.processes().items() if re.fullmatch(r"rank \d+", name)]
        return [process for _, process in sorted(named)]

    def kill_all(self) -> None:
        """Kill every process of it at once, as if the host were gone."""
        doomed = list(self.processes())
        send(doomed, signal.SIGKILL)
        self.cleared(doomed)

    def cleared(self, processes: Sequence[int]) -> bool:
        """Wait until processes are gone; returns whether they are, in time. Those that are not are killed."""
        for _ in _moments(_CLEARED):
            left = [process for process in processes if _lives(process)]
            if self._process is not None and not left:
                _let_go(self._process)
                return True
        send(left, signal.SIGKILL)
        return False


def _let_go(process: subprocess.Popen[bytes] | None) -> None:
    """Close the standard input of a process that has ended."""
    if process is not None and process.stdin is not None and process.poll() is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _end_with_parent() -> None:
    """Let the kernel kill this process once the one that started it is gone, so that none outlives a campaign."""
    _PRCTL(_SET_DEATH_SIGNAL, signal.SIGKILL)


def send(processes: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes; those that are gone are left out."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _moments(seconds: float) -> Iterator[None]:
    """Moments at which to look, until time is over. Time for which this process itself was stopped does not count."""
    left, before = seconds, time.monotonic()
    while left > 0:
        yield
        time.sleep(_POLL)
        now = time.monotonic()
        left -= min(now - before, _LONGEST_STEP)
        before = now


def train_command(recipe: Path, nodes: int, local: int) -> list[str]:
    """``thinwire train`` of a recipe on logical nodes of this machine."""
    ranks = ["--nodes", str(nodes), "--nproc", str(local)]
    return [sys.executable, "-m", "thinwire.cli.main", "train", str(recipe), *ranks]


def _table() -> Iterator[tuple[int, int, str]]:
    """Every process of this machine: its id, its parent's, and its name."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, tail = (entry / "stat").read_text().rpartition(")")
            yield int(entry.name), int(tail.split()[1]), head.partition("(")[2]


def _lives(process: int) -> bool:
    """Whether a process runs; one that only waits for its parent to take note does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
