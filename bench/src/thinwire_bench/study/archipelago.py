"""Elastic islands in the lab, one on each host, to which faults can be made to happen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self

from thinwire.errors import UsageError
from thinwire.lab import Lab, LabSpec

__all__ = ["STARTING", "Archipelago", "ChaosSettings", "Fault"]

STARTING: Final = 1800.0
"""Seconds that a lighthouse may take to start, and all islands to meet for the first time."""

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
        kind: One of ``kill``, ``cut``, ``stop``, ``slow``.
        island: Number of the island.
        begin: Time, in seconds since 1970.
        end: Time at which the cause was gone, or the island was started again.
    """

    kind: str
    island: int
    begin: float
    end: float = 0.0


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
        command = [sys.executable, "-m", "thinwire_bench.study.islands_chaos_job", *own, *paths]
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
        file, deadline = self.directory / "lighthouse.out", time.monotonic() + STARTING
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
