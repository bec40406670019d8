"""Elastic islands in the lab while faults happen to them, beside the same islands without faults.

Both run at the same time, so that the machine treats them alike. Islands are killed and started anew, cut off, stopped
and continued, and made five times slower, one or two at a time.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec
from thinwire.report import Sheet
from thinwire_bench.study.chaos_island import SLOWER

__all__ = ["ChaosResult", "ChaosRun", "ChaosSettings", "Fault", "chaos", "sheets"]

KINDS: Final = ("kill", "cut", "stop", "slow")
GOAL_THROUGHPUT: Final = 0.95
GOAL_STALL: Final = 30.0

_RECIPE: Final = """
[plan]
preset = "zero1"
compute_dtype = "float32"
[plan.islands]
count = {islands}
every = {every}
codec = "{codec}"
error_feedback = {feedback}
elastic = true
timeout = {timeout}
patience = 300
[model]
layers = 2
hidden = 64
heads = 2
ffn = 176
vocab = 1024
[data]
source = "stdlib"
vocab = 1024
[train]
steps = {steps}
seq = 64
micro_batch = 4
global_batch = {batch}
validation_samples = 128
log_every = 1
tensorboard = false
[optimizer]
lr = 3e-3
warmup = 40
weight_decay = 0.1
[cluster]
nodes = 1
nproc = 1
device = "cpu"
"""

_LIGHTHOUSE_PORT: Final = 29_510
_STARTING: Final = 1800.0
"""Seconds that all islands may take to meet for the first time."""

_LINGERING: Final = 30.0
"""Seconds that islands have for their last steps once another one has made them."""


@dataclass(frozen=True)
class ChaosSettings:
    """A chaos run.

    Attributes:
        minutes: Minutes of steps, without faults.
        faults: Number of faults in that time, evenly spread.
        islands: Number of islands.
        pace: Seconds of a step.
        every: Steps from one exchange to the next.
        codec: Codec of the changes.
        bandwidth: Bandwidth of each island's link in bits per second.
        wait: Longest wait for a late island, in seconds.
        silence: Seconds after which a silent island is gone.
        timeout: Longest wait for a message of an exchange, in seconds.
        seed: Seed of the faults.
    """

    minutes: float
    faults: int
    islands: int = 4
    pace: float = 0.5
    every: int = 8
    codec: str = "int4:256"
    bandwidth: float = 50e6
    wait: float = 1.0
    silence: float = 2.0
    timeout: float = 5.0
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps of the run, whole cycles of exchanges."""
        return max(1, round(60 * self.minutes / self.pace / self.every)) * self.every


@dataclass
class Fault:
    """What happened to an island.

    Attributes:
        kind: One of :data:`KINDS`.
        island: Number of the island.
        begin: Time, in seconds since 1970.
        end: Time at which the cause was gone, or the island was started again.
    """

    kind: str
    island: int
    begin: float
    end: float = 0.0


@dataclass(frozen=True)
class ChaosResult:
    """How a run went.

    Attributes:
        steps_per_second: Progress from the first exchange of all islands to the last step.
        val_loss: Validation loss at the end, the mean of all islands that reached it.
        stall: Longest time between two steps of an island that had no fault, in seconds.
        present: Mean number of islands in an exchange.
        exchanges: Number of exchanges.
        fetches: Number of states that islands fetched.
        unequal: Number of exchanges after which islands held different values.
    """

    steps_per_second: float
    val_loss: float
    stall: float
    present: float
    exchanges: int
    fetches: int
    unequal: int


@dataclass
class Archipelago:
    """Islands in a lab of their own, one on each host, and the lighthouse on one more.

    Attributes:
        directory: Directory of recipe and logs.
        settings: The run.
        faults: What has happened.
    """

    directory: Path
    settings: ChaosSettings
    faults: list[Fault] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _lives: dict[int, int] = field(default_factory=dict)
    _starts: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> Self:
        settings = self.settings
        self.directory.mkdir(parents=True)
        recipe = _RECIPE.format(
            islands=settings.islands,
            every=settings.every,
            codec=settings.codec,
            feedback=str(settings.codec not in ("none", "bf16")).lower(),
            timeout=settings.timeout,
            steps=settings.steps,
            batch=4 * settings.islands,
        )
        (self.directory / "recipe.toml").write_text(recipe, encoding="utf-8")
        spec = LabSpec(nodes=settings.islands + 1, ranks=1, bandwidth=settings.bandwidth)
        self._lab = self._stack.enter_context(Lab(spec))
        self._stack.callback(self._end)
        self._beacon = self._lighthouse()
        for island in range(settings.islands):
            self.start(island)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, island: int) -> None:
        """Start the job of an island, for the first time or anew."""
        life = self._lives[island] = self._lives.get(island, -1) + 1
        self._starts[island] = time.time()
        own = ["--island", str(island), "--pace", str(self.settings.pace), "--lighthouse", self._beacon]
        files = {"recipe": "recipe.toml", "out": f"island-{island}-{life}", "log": f"island-{island}.jsonl"}
        paths = [text for name, file in files.items() for text in (f"--{name}", str(self.directory / file))]
        command = [sys.executable, "-m", "thinwire_bench.study.chaos_island", *own, *paths]
        self._processes[island] = self._run(island, command, f"island-{island}.out")

    def suffer(self, fault: Fault, seconds: float) -> None:
        """Let a fault happen, and let its cause end after some seconds."""
        fault.begin = time.time()
        self.faults.append(fault)
        process = self._processes[fault.island]
        match fault.kind:
            case "kill":
                process.kill()
                process.wait()
            case "cut":
                self._lab.link(fault.island, up=False)
            case "stop":
                process.send_signal(signal.SIGSTOP)
            case "slow":
                process.send_signal(signal.SIGUSR1)
        time.sleep(seconds)
        match fault.kind:
            case "kill":
                self.start(fault.island)
            case "cut":
                self._lab.link(fault.island, up=True)
            case "stop":
                process.send_signal(signal.SIGCONT)
            case "slow":
                process.send_signal(signal.SIGUSR2)
        fault.end = time.time()

    def lines(self, island: int) -> list[dict[str, Any]]:
        """What an island has logged, step by step, in all its lives."""
        path = self.directory / f"island-{island}.jsonl"
        if not path.exists():
            return []
        found = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            # A life that was killed leaves a line without an end, which the next one continues.
            start = line.rfind('{"time"')
            if line.endswith("}\n") and start >= 0:
                found.append(json.loads(line[start:]))
        return found

    def met(self) -> float | None:
        """Time at which all islands exchanged together for the first time; ``None`` before."""
        for line in self.lines(0):
            if any(
                len(exchange["islands"]) == self.settings.islands and exchange["step"] for exchange in line["exchanges"]
            ):
                return float(line["time"])
        return None

    def ended(self) -> bool:
        """Whether all islands have ended.

        Raises:
            UsageError: One has failed.
        """
        for island, process in self._processes.items():
            if process.poll() not in (None, 0, -signal.SIGKILL):
                words = (self.directory / f"island-{island}.out").read_text(encoding="utf-8").strip().splitlines()
                raise UsageError(f"island {island} has failed: {words[-1] if words else process.returncode}")
        return all(process.poll() == 0 for process in self._processes.values())

    def is_over(self, island: int) -> bool:
        """Whether an island has ended, or is about to: a fault would tell nothing any more."""
        lines = self.lines(island)
        near = self.settings.steps - 4 * self.settings.every
        return self._processes[island].poll() is not None or bool(lines and lines[-1]["step"] >= near)

    def reached(self) -> bool:
        """Whether an island has made the last step."""
        return any(
            lines[-1]["step"] >= self.settings.steps for island in self._processes if (lines := self.lines(island))
        )

    def has_begun(self, island: int) -> bool:
        """Whether an island has made a step since it was started last: before, a fault would meet no island."""
        lines = self.lines(island)
        return bool(lines) and lines[-1]["time"] > self._starts[island]

    def _lighthouse(self) -> str:
        settings, host = self.settings, self._lab.hosts[-1]
        times = ["--wait", str(settings.wait), "--silence", str(settings.silence)]
        command = [sys.executable, "-m", "thinwire.cli.main", "lighthouse", "--host", host.address, *times]
        self._run(len(self._lab.hosts) - 1, [*command, "--port", str(_LIGHTHOUSE_PORT)], "lighthouse.out")
        file, deadline = self.directory / "lighthouse.out", time.monotonic() + _STARTING
        while not re.search(r"lighthouse at", file.read_text(encoding="utf-8")):
            if time.monotonic() > deadline:
                raise UsageError(f"the lighthouse does not start; see {file}")
            time.sleep(0.2)
        return f"{host.address}:{_LIGHTHOUSE_PORT}"

    def _run(self, node: int, command: Sequence[str], output: str) -> subprocess.Popen[bytes]:
        host = self._lab.hosts[node]
        inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        variables = {**inherited, **host.environment(), "OMP_NUM_THREADS": "1"}
        file: IO[bytes] = self._stack.enter_context((self.directory / output).open("ab"))
        process = subprocess.Popen(host.command(command), env=variables, stdout=file, stderr=file)
        self._stack.callback(_kill, process)
        return process

    def _end(self) -> None:
        for process in self._processes.values():
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def chaos(settings: ChaosSettings, directory: Path, report: Callable[[str], None]) -> ChaosRun:
    """Run islands with faults beside islands without any.

    Args:
        settings: The run.
        directory: Directory for recipes and logs, which does not exist.
        report: Receives a line about everything that happens.

    Raises:
        UsageError: An island has failed by itself, or the islands do not find each other.
    """
    with (
        Archipelago(directory / "calm", settings) as calm,
        Archipelago(directory / "chaos", settings) as stormy,
    ):
        deadline = time.monotonic() + _STARTING
        while calm.met() is None or stormy.met() is None:
            if calm.ended() or stormy.ended():
                raise UsageError(f"islands have ended without a meeting of all; see {directory}")
            if time.monotonic() > deadline:
                raise UsageError(f"the islands have not met within {_STARTING:g} s; see {directory}")
            time.sleep(1.0)
        report("all islands have met")
        _let_faults_happen(stormy, report)
        _wait_for_the_end(calm, stormy)
        return ChaosRun(settings.seed, _result(calm), _result(stormy), stormy.faults)


def _wait_for_the_end(*groups: Archipelago) -> None:
    """Wait until islands have ended. One that comes back after the others' last step finds nobody, and would train all
    steps alone: it is not waited for."""
    deadline: float | None = None
    while not all(islands.ended() for islands in groups):
        if deadline is None and all(islands.reached() for islands in groups):
            deadline = time.monotonic() + _LINGERING
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(1.0)


def _let_faults_happen(islands: Archipelago, report: Callable[[str], None]) -> None:
    """Let faults happen until there were enough or the end is near, most of them one at a time."""
    settings, dice, begin = islands.settings, random.Random(islands.settings.seed), time.monotonic()
    interval = 60 * settings.minutes / (settings.faults + 1)
    suffering: dict[int, threading.Thread] = {}
    kinds = [KINDS[number % len(KINDS)] for number in range(settings.faults)]
    dice.shuffle(kinds)
    for number, kind in enumerate(kinds, 1):
        time.sleep(max(0.0, begin + number * interval - time.monotonic()))
        while not (free := _free(islands, suffering)):
            if islands.ended() or any(islands.is_over(island) for island in range(settings.islands)):
                break
            time.sleep(1.0)
        if not free:
            break
        fault, seconds = Fault(kind, dice.choice(free), 0.0), dice.uniform(0.3, 0.7) * interval
        report(f"fault {number} of {settings.faults}: {kind} island {fault.island} for {seconds:.0f} s")
        suffering[fault.island] = threading.Thread(target=islands.suffer, args=(fault, seconds), daemon=True)
        suffering[fault.island].start()
    for thread in suffering.values():
        thread.join()


def _free(islands: Archipelago, suffering: Mapping[int, threading.Thread]) -> list[int]:
    """Islands that a fault may happen to: none while half of them have one."""
    islands.ended()
    number = islands.settings.islands
    absent = {island for island in range(number) if not islands.has_begun(island)}
    absent |= {island for island, thread in suffering.items() if thread.is_alive()}
    if len(absent) >= number // 2:
        return []
    return [island for island in range(number) if island not in absent and not islands.is_over(island)]


def _result(islands: Archipelago) -> ChaosResult:
    settings = islands.settings
    logs = {island: islands.lines(island) for island in range(settings.islands)}
    begin = islands.met()
    assert begin is not None
    first = next(line["step"] for line in logs[0] if line["time"] == begin)
    end = min(line["time"] for log in logs.values() for line in log if line["step"] >= settings.steps)
    losses = [log[-1]["val_loss"] for log in logs.values() if log[-1]["val_loss"] is not None]
    met, fetches = _exchanges(logs, begin, end)
    return ChaosResult(
        steps_per_second=(settings.steps - first) / (end - begin),
        val_loss=statistics.mean(losses),
        stall=max(_stalls(logs, islands.faults, begin, end)),
        present=statistics.mean(len(there) for _, there in met),
        exchanges=len(met),
        fetches=fetches,
        unequal=sum(len(checksums) > 1 for checksums in met.values()),
    )


def _exchanges(
    logs: Mapping[int, Sequence[Mapping[str, Any]]], begin: float, end: float
) -> tuple[dict[tuple[int, tuple[int, ...]], set[int]], int]:
    """The checksums after each exchange, by its step and islands, and the number of fetched states."""
    met: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    fetches = 0
    for log in logs.values():
        lines = [line for line in log if begin <= line["time"] <= end + _LINGERING]
        for exchange in (exchange for line in lines for exchange in line["exchanges"]):
            met.setdefault((exchange["step"], tuple(exchange["islands"])), set()).add(exchange["checksum"])
            fetches += exchange["source"] is not None
    return met, fetches


def _stalls(
    logs: Mapping[int, Sequence[Mapping[str, Any]]], faults: Sequence[Fault], begin: float, end: float
) -> Iterator[float]:
    """Times between two steps of an island, unless one of its own faults, or its return from it, lies between."""
    yield 0.0
    for island, log in logs.items():
        times = [line["time"] for line in log if begin <= line["time"] <= end]
        own = [fault for fault in faults if fault.island == island]
        for earlier, later in itertools.pairwise(times):
            if not any(fault.begin < later and earlier < fault.end for fault in own):
                yield later - earlier


@dataclass(frozen=True)
class ChaosRun:
    """Islands with faults beside islands without any.

    Attributes:
        seed: Seed of the faults.
        calm: Without faults.
        chaos: With faults.
        faults: The faults.
    """

    seed: int
    calm: ChaosResult
    chaos: ChaosResult
    faults: Sequence[Fault]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """The run of a table that ``dataclasses.asdict`` made."""
        results = ChaosResult(**table["calm"]), ChaosResult(**table["chaos"])
        return cls(table["seed"], *results, [Fault(**fault) for fault in table["faults"]])


def _over_runs(results: Sequence[ChaosResult]) -> ChaosResult:
    """Several results as one: means, the longest stall, and sums."""
    exchanges = sum(result.exchanges for result in results)
    return ChaosResult(
        steps_per_second=statistics.fmean(result.steps_per_second for result in results),
        val_loss=statistics.fmean(result.val_loss for result in results),
        stall=max(result.stall for result in results),
        present=sum(result.present * result.exchanges for result in results) / exchanges,
        exchanges=exchanges,
        fetches=sum(result.fetches for result in results),
        unequal=sum(result.unequal for result in results),
    )


def sheets(settings: ChaosSettings, runs: Sequence[ChaosRun]) -> list[Sheet]:
    """The tables of one run or several with the same settings."""
    calm, stormy = _over_runs([run.calm for run in runs]), _over_runs([run.chaos for run in runs])
    faults = [fault for run in runs for fault in run.faults]
    share, loss = stormy.steps_per_second / calm.steps_per_second, stormy.val_loss / calm.val_loss - 1

    def verdict(reached: bool) -> str:
        return "reached" if reached else "missed"

    counts = ", ".join(f"{sum(fault.kind == kind for fault in faults)} {kind}" for kind in KINDS)
    times = f"{len(runs)} times " if len(runs) > 1 else ""
    title = (
        f"{settings.islands} islands, {times}{settings.steps} steps of {settings.pace:g} s, an exchange every "
        f"{settings.every}, {settings.bandwidth / 1e6:g} Mbit/s; {len(faults)} faults: {counts} ({SLOWER:g} times)"
    )
    rows = [
        (name, *cells)
        for name, *cells in [
            ("steps per second", f"{calm.steps_per_second:.3f}", f"{stormy.steps_per_second:.3f}", f"{share:.1%}",
             verdict(share >= GOAL_THROUGHPUT)),
            ("longest stall, s", f"{calm.stall:.1f}", f"{stormy.stall:.1f}", "", verdict(stormy.stall <= GOAL_STALL)),
            ("validation loss", f"{calm.val_loss:.4f}", f"{stormy.val_loss:.4f}", f"{loss:+.2%}", ""),
            ("exchanges", str(calm.exchanges), str(stormy.exchanges), "", ""),
            ("islands in an exchange", f"{calm.present:.2f}", f"{stormy.present:.2f}", "", ""),
            ("states fetched", str(calm.fetches), str(stormy.fetches), "", ""),
            ("exchanges after which islands differ", str(calm.unequal), str(stormy.unequal), "",
             verdict(stormy.unequal == 0)),
        ]
    ]  # fmt: skip
    return [Sheet(title, ("", "calm", "chaos", "chaos / calm", "goal"), 1, rows)]
