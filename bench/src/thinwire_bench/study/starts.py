"""From a command to the first step, for several systems and numbers of ranks on this machine, interleaved.

A sample ends when rank 0 reports its first step. Wall time says how long a user waits. Processor time, of all processes
of the command until then, hardly depends on what else the machine does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from thinwire.errors import SpecError
from thinwire.report import Sheet
from thinwire.spec import Plan
from thinwire.units import format_bytes
from thinwire_bench.systems.protocol import BenchError

__all__ = ["COMMAND", "PEERS", "LargeStart", "Start", "checked", "large_start", "sheets", "time_starts"]

COMMAND: Final = "thinwire train"
"""The system whose launcher is ours."""

PEERS: Final = ("ddp", "fsdp2")
"""Systems that are not ours; like our presets, they are started by ``torchrun``."""

REFERENCE: Final = "fsdp2"

_OURS: Final = "tw:"
"""Prefix of the names of our presets."""

MOST: Final = 1.1
"""The goal: our time over that of :data:`REFERENCE`."""

_PHASES: Final = {
    "started": "launcher",
    "imports": "imports",
    "model": "model",
    "sharding": "joining, sharding",
    "step": "first step",
}
"""What rank 0 has done when it stamps the time."""

_MODEL: Final = {"vocab": 1024, "hidden": 128, "layers": 4, "heads": 4, "ffn": 352}
_SEQ: Final = 64
_TICKS: Final = os.sysconf("SC_CLK_TCK")

_RECIPE: Final = """
plan = {{ preset = "zero3", compute_dtype = "float32" }}
[model]
layers = {layers}
hidden = {hidden}
heads = {heads}
kv_heads = {heads}
ffn = {ffn}
vocab = {vocab}
[data]
source = "text"
paths = ["text.txt"]
cache = "{cache}"
vocab = 300
[train]
steps = 2
seq = {seq}
micro_batch = 1
micro_batches = 1
validation_samples = 1
tensorboard = false
[cluster]
device = "cpu"
"""


@dataclass(frozen=True)
class Start:
    """One command up to its first step.

    Attributes:
        system: Its name.
        ranks: Number of ranks.
        round: Number of the round.
        seconds: From the command to the end of rank 0's first step.
        cpu: Processor seconds of all processes of the command until then.
        phases: Seconds of rank 0's phases, by name; empty where the command does not tell.
    """

    system: str
    ranks: int
    round: int
    seconds: float
    cpu: float
    phases: Mapping[str, float]


@dataclass(frozen=True)
class LargeStart:
    """A model of 7B on the meta device.

    Attributes:
        seconds: Seconds of each phase, by name.
        cpu: Processor seconds of each phase.
        peak: Most resident memory of the process in bytes.
    """

    seconds: Mapping[str, float]
    cpu: Mapping[str, float]
    peak: int


def checked(systems: Sequence[str], ranks: Sequence[str]) -> tuple[list[str], list[int]]:
    """The systems and the numbers of ranks that a user has named.

    Raises:
        SpecError: One of them does not exist.
    """
    known = (*PEERS, *(f"{_OURS}{name}" for name in Plan.preset_names(islands=False)), COMMAND)
    problems = [f"there is no system {name!r}; valid are {', '.join(known)}" for name in systems if name not in known]
    problems += [
        f"{word!r} is not a number of ranks: valid are whole numbers above 0" for word in ranks if not _is_count(word)
    ]
    if not systems or not ranks:
        problems.append("--systems and --ranks each need a value; one of them has none")
    if problems:
        raise SpecError("bench start", problems)
    return list(dict.fromkeys(systems)), sorted({int(word) for word in ranks})


def _is_count(word: str) -> bool:
    return word.isdecimal() and int(word) > 0


def time_starts(
    systems: Sequence[str], ranks: Sequence[int], rounds: int, report: Callable[[str], None], *, timeout: float
) -> list[Start]:
    """Start every system on every number of ranks, round by round.

    Args:
        systems: Names from :func:`checked`.
        ranks: Numbers of ranks.
        rounds: Number of rounds. A start of each system before them fills the caches and does not count.
        report: Called with a line after every start.
        timeout: Seconds that a system may take.

    Raises:
        BenchError: A system has not made its first step.
    """
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-starts-") as name:
        directory = Path(name)
        _write_recipe(directory)
        for system in systems:
            _start(system, min(ranks), -1, directory, timeout)
        for number in range(rounds):
            first = number % len(systems)
            for count in ranks:
                for system in [*systems[first:], *systems[:first]]:
                    start = _start(system, count, number, directory, timeout)
                    starts.append(start)
                    report(
                        f"round {number + 1}/{rounds}: {system} on {count} ranks: {start.seconds:.2f} s, processors "
                        f"{start.cpu:.2f} s"
                    )
    return starts


def large_start(timeout: float) -> LargeStart:
    """Build a model of 7B on the meta device, plan it and lower it, in a process of its own.

    Args:
        timeout: Seconds that it may take.
    """
    done = subprocess.run(
        [sys.executable, "-m", "thinwire_bench.peers.seven_billion"],
        env=_environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=timeout,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    phases: dict[str, dict[str, float]] = said["phases"]
    return LargeStart(
        {name: phase["seconds"] for name, phase in phases.items()},
        {name: phase["cpu"] for name, phase in phases.items()},
        said["peak"],
    )


def sheets(starts: Sequence[Start], large: LargeStart | None) -> list[Sheet]:
    """Tables: times, phases, and the large model.

    Args:
        starts: Every start that counts.
        large: The large model; ``None`` if it was not measured.
    """
    tables = [_times(starts), _phases(starts)] if starts else []
    return tables if large is None else [*tables, _large(large)]


def _times(starts: Sequence[Start]) -> Sheet:
    rows = []
    for ranks, system in _groups(starts):
        group, reference = _of(starts, ranks, system), _of(starts, ranks, REFERENCE)
        wall = [a.seconds / b.seconds for a, b in zip(group, reference, strict=False)]
        cpu = [a.cpu / b.cpu for a, b in zip(group, reference, strict=False)]
        is_ours = bool(reference) and (system.startswith(_OURS) or system == COMMAND)
        verdict = ("reached" if statistics.median(wall) <= MOST else "missed") if is_ours else ""
        cells = (_spread([start.seconds for start in group]), _spread(wall), _spread([start.cpu for start in group]))
        rows.append((str(ranks), system, *cells, _spread(cpu), verdict))
    columns = ("ranks", "system", "seconds", f"over {REFERENCE}", "processor s", f"over {REFERENCE}", f"<= {MOST}")
    return Sheet("From the command to the first step: median of rounds, least to most", columns, 2, rows)


def _phases(starts: Sequence[Start]) -> Sheet:
    names = list(dict.fromkeys(name for start in starts for name in start.phases))
    rows = []
    for ranks, system in _groups(starts):
        phases = [start.phases for start in _of(starts, ranks, system)]
        if phases[0]:
            medians = [statistics.median(phase[name] for phase in phases) for name in names]
            rows.append((str(ranks), system, *(f"{median:.2f}" for median in medians)))
    return Sheet("Phases of rank 0 under torchrun: seconds, median of rounds", ("ranks", "system", *names), 2, rows)


def _large(large: LargeStart) -> Sheet:
    rows: list[tuple[str, ...]] = [
        (name, f"{seconds:.2f}", f"{large.cpu[name]:.2f}") for name, seconds in large.seconds.items()
    ]
    work = [name for name in large.seconds if name != "imports"]
    total = [sum(values[name] for name in work) for values in (large.seconds, large.cpu)]
    rows.append(("without imports", *(f"{value:.2f}" for value in total)))
    title = f"A Llama of 7B on the meta device: seconds; most memory {format_bytes(large.peak)}"
    return Sheet(title, ("phase", "seconds", "processor s"), 1, rows)


def _groups(starts: Sequence[Start]) -> list[tuple[int, str]]:
    """Numbers of ranks and systems, in the order of the first round."""
    return list(dict.fromkeys((start.ranks, start.system) for start in starts))


def _of(starts: Sequence[Start], ranks: int, system: str) -> list[Start]:
    found = [start for start in starts if start.ranks == ranks and start.system == system]
    return sorted(found, key=lambda start: start.round)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


# -- one start -------------------------------------------------------------------------------------------------


def _start(system: str, ranks: int, number: int, directory: Path, timeout: float) -> Start:
    """Run a command until its first step, then end it."""
    arguments = _command(system, ranks, directory)
    with (directory / "errors").open("w+b") as errors:
        begun = time.time()
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=errors, env=_environment(), cwd=directory, start_new_session=True
        )
        assert process.stdout is not None
        watch = threading.Timer(timeout, process.kill)
        watch.start()
        try:
            line = _first_step(process.stdout)
            ended, family = time.time(), dict(_family(process.pid))
        finally:
            watch.cancel()
            _kill(process)
        if line is None:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-2000:]
            raise BenchError(f"{system} on {ranks} ranks has not made its first step: {said or 'it said nothing'}")
    stamps = {} if system == COMMAND else {"begun": begun, **json.loads(line)["stamps"]}
    moments = list(stamps.items())
    phases = {_PHASES[name]: moment - before for (_, before), (name, moment) in itertools.pairwise(moments)}
    return Start(system, ranks, number, stamps.get("step", ended) - begun, sum(family.values()), phases)


def _command(system: str, ranks: int, directory: Path) -> list[str]:
    python = [sys.executable, "-m"]
    if system == COMMAND:
        out = tempfile.mkdtemp(prefix="run-", dir=directory)
        return [
            *python,
            "thinwire.cli.main",
            "train",
            "recipe.toml",
            "--nproc",
            str(ranks),
            "--nodes",
            "1",
            "--out",
            out,
        ]
    sizes = [str(size) for size in (*_MODEL.values(), _SEQ)]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*python, *torchrun, "-m", "thinwire_bench.peers.first_step", system, *sizes]


def _environment() -> dict[str, str]:
    """The environment of this process, without what would make a start differ from a user's."""
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def _write_recipe(directory: Path) -> None:
    words = random.Random(0).choices(("one", "two", "three", "four", "five", "six"), k=40_000)
    lines = [" ".join(words[start : start + 10]) for start in range(0, len(words), 10)]
    (directory / "text.txt").write_text("\n\n".join(lines))
    (directory / "recipe.toml").write_text(_RECIPE.format(**_MODEL, seq=_SEQ, cache=directory / "cache"))


def _first_step(output: IO[bytes]) -> str | None:
    """The line in which rank 0 reports its first step; ``None`` if the output ends before."""
    for line in output:
        text = line.decode(errors="replace").strip()
        if text.startswith(('{"stamps"', "step 1/")):
            return text
    return None


def _family(root: int) -> Iterator[tuple[int, float]]:
    """A process and its descendants: each one's number, and processor seconds, those of its ended children included."""
    children: dict[int, list[int]] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = entry.read_text().rpartition(") ")[2].split()
            process = int(entry.parent.name)
            children.setdefault(int(words[1]), []).append(process)
            spent[process] = sum(int(word) for word in words[11:15]) / _TICKS
    left = [root]
    while left:
        process = left.pop()
        left += children.get(process, [])
        yield process, spent.get(process, 0.0)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    for number, _ in list(_family(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.communicate()
