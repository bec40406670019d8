"""Runs a command on every rank or every host of a lab: starts it, shows its output, and ends it everywhere together."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final, Literal

from thinwire.errors import UsageError
from thinwire.lab.lab import Host, Lab

Per = Literal["rank", "host"]
"""What is started once for each: ranks by us, or hosts whose command (torchrun) starts the ranks."""

_POLL: Final = 0.05
"""Seconds between two checks of the processes."""

_TERMINATION: Final = 5.0
"""Seconds between SIGTERM and SIGKILL."""

_LAST_WORDS: Final = 2.0
"""Seconds to wait for output after a process has ended."""

_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch")

_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: 0, or the exit status of the process that failed first; 128 + number if a signal ended it.
        seconds: Seconds from the first start to the last end.
        failure: Which process failed first and how, or None.
    """

    status: int
    seconds: float
    failure: str | None


def starts_ranks(command: Sequence[str]) -> bool:
    """Whether a command is a launcher (``torchrun ...`` or ``python -m torch.distributed.run ...``), which is started
    once per host and starts the ranks itself."""
    if Path(command[0]).name == "torchrun":
        return True
    return any(flag == "-m" and module in _LAUNCHERS for flag, module in itertools.pairwise(command))


def default_environment(num_ranks: int, now: Mapping[str, str]) -> dict[str, str]:
    """Variables that a user may set and that a job gets if not."""
    cores = len(os.sched_getaffinity(0))
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        "PYTHONUNBUFFERED": "1",
        # `thinwire train` wants one directory for all ranks.
        "THINWIRE_OUT": str(Path("runs") / time.strftime("lab-%Y%m%d-%H%M%S")),
    }
    # Programs that are installed next to this interpreter, such as torchrun.
    path = os.pathsep.join((str(Path(sys.executable).parent), now.get("PATH", os.defpath)))
    return {name: value for name, value in wanted.items() if name not in now} | {"PATH": path}


class Job:
    """One command in a lab. The first process owns the terminal; the others' output comes with their name before it.

    Args:
        lab: An open lab.
        command: Program and arguments.
        per: Unit for which one process starts, ``rank`` or ``host``.
        grace: Seconds that the others have to exit by themselves after a process failed, or after a signal.
        logs: Directory for the output of all but the first process; None shows it on stderr.
    """

    def __init__(self, lab: Lab, command: Sequence[str], per: Per, *, grace: float, logs: Path | None) -> None:
        self._lab, self._command, self._per, self._grace, self._logs = lab, list(command), per, grace, logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by label
        self._readers: list[threading.Thread] = []
        self._signal: int | None = None

    def run(self) -> Outcome:
        """Start the command everywhere and wait for its end.

        Raises:
            UsageError: the output cannot be written to its directory; nothing has started.
        """
        common = self._environment()
        started = time.monotonic()
        with ExitStack() as files, self._forwarding():
            places = list(self._places())
            outputs = [None, *(self._output(label, files) for _, label, _ in places[1:])]
            for (host, label, variables), output in zip(places, outputs, strict=True):
                self._start(host, label, common | variables, output)
            failed = self._wait()
            ended = time.monotonic()
            for reader in self._readers:
                # What a process has left running in the background may hold its end open.
                reader.join(timeout=max(0.0, ended + _LAST_WORDS - time.monotonic()))
        if failed is None:
            return Outcome(0, ended - started, None)
        label, code = failed
        if code > 0:
            return Outcome(code, ended - started, f"{label} ended with status {code}")
        return Outcome(128 - code, ended - started, f"{label} was ended by {signal.Signals(-code).name}")

    def _environment(self) -> dict[str, str]:
        """Variables of all processes; made once, so that all agree on what depends on the time."""
        spec = self._lab.spec
        inherited = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        return inherited | default_environment(spec.nodes * spec.ranks, inherited)

    def _places(self) -> Iterator[tuple[Host, str, dict[str, str]]]:
        """Host, label and variables of every process."""
        for host in self._lab.hosts:
            if self._per == "host":
                yield host, host.name, host.environment()
            else:
                for local_rank in range(self._lab.spec.ranks):
                    variables = host.rank_environment(local_rank)
                    yield host, f"{host.name}.{variables['RANK']}", variables

    def _start(self, host: Host, label: str, variables: dict[str, str], output: int | IO[bytes] | None) -> None:
        popen = subprocess.Popen(
            host.command(self._command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            # The terminal's Ctrl-C comes to us, who pass it on once.
            start_new_session=True,
        )
        self._processes[label] = popen
        if popen.stdout is not None:
            reader = threading.Thread(target=_show, args=(label, popen.stdout), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _output(self, label: str, files: ExitStack) -> int | IO[bytes]:
        if self._logs is None:
            return subprocess.PIPE
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            return files.enter_context((self._logs / f"{label}.log").open("wb"))
        except OSError as error:
            raise UsageError(f"logs = {str(self._logs)!r} cannot be written: {error.strerror}") from error

    def _wait(self) -> tuple[str, int] | None:
        """Wait until all have ended; end those that outlive the grace after a failure or a signal. Returns label and
        exit status of the process that failed first."""
        failed: tuple[str, int] | None = None
        deadline: float | None = None
        ending = signal.SIGTERM
        while running := [process for process in self._processes.values() if process.poll() is None]:
            failed = failed or self._first_failed()
            if deadline is None and (failed is not None or self._signal is not None):
                deadline = time.monotonic() + self._grace
            if deadline is not None and time.monotonic() > deadline:
                for process in running:
                    process.send_signal(ending)
                ending, deadline = signal.SIGKILL, time.monotonic() + _TERMINATION
            time.sleep(_POLL)
        return failed or self._first_failed()

    def _first_failed(self) -> tuple[str, int] | None:
        return next(((label, code) for label, one in self._processes.items() if (code := one.returncode)), None)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Pass the first signal on to all processes and kill them on the second."""

        def forward(number: int, frame: FrameType | None) -> None:
            passed = signal.SIGKILL if self._signal is not None else number
            self._signal = number
            for process in self._processes.values():
                process.send_signal(passed)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        previous = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _show(label: str, pipe: IO[bytes]) -> None:
    prefix = f"[{label}] ".encode()
    for line in pipe:
        with suppress(OSError):  # whether or not somebody reads it, the pipe must not fill up
            sys.stderr.buffer.write(prefix + line if line.endswith(b"\n") else prefix + line + b"\n")
            sys.stderr.buffer.flush()
