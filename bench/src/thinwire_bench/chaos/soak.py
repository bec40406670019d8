"""A long run, watched: memory, descriptors and threads of each of its processes, and the time of its steps."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.errors import UsageError
from thinwire.report import Sheet
from thinwire.units import format_bytes
from thinwire_bench.chaos.run import DisturbedRun, environment, send, train_command
from thinwire_bench.chaos.setups import SmallRun, make_corpus

SETUP: Final = SmallRun("soak", "preset", {"preset": "thinwire", "compute_dtype": "float32"}, "text")
"""What runs: four ranks on two logical nodes, codecs, checkpoints, validation."""

KINDS: Final = ("memory", "descriptors", "threads", "processor")
"""What is read of a process: bytes of anonymous memory, open files, threads, and seconds of processor time."""

WARM_UP: Final = 0.2
"""Share of a soak at its start that trends leave out: buffers are still being made, and allocators still grow."""

_BLOCKS: Final = 20
"""Means of consecutive samples through which a trend's line goes; samples next to each other are not independent."""

_T: Final = 2.101
"""Quantile 0.975 of Student's t for 18 degrees of freedom."""

_CHECKPOINT: Final = (
    "--set", "checkpoint.every=200", "--set", "train.validate_every=400", "--set", "train.log_every=10",
)  # fmt: skip

_STOPPING: Final = 300.0
"""Seconds that the run may take to save and end."""

_GROWTH: Final = 0.01
"""Share of its mean by which a quantity may have grown within a soak before it counts, if the trend is certain."""


@dataclass(frozen=True)
class Trend:
    """How a quantity changes over a soak.

    Attributes:
        name: What it is, and of which process.
        unit: ``bytes``, ``count`` or ``seconds``.
        mean: Its mean after the warm-up.
        slope: Change an hour, by least squares.
        error: Half of the slope's 95 % interval.
        hours: Hours that the trend covers.
    """

    name: str
    unit: str
    mean: float
    slope: float
    error: float
    hours: float

    @property
    def verdict(self) -> str:
        """``steady`` if its change may be chance; ``grows`` if it is certain, and a hundredth of the mean within the
        soak; otherwise which way it changes a little."""
        if abs(self.slope) <= self.error:
            return "steady"
        if self.slope < 0:
            return "shrinks"
        return "grows" if self.slope * self.hours > _GROWTH * self.mean else "grows by less than 1 %"


def soak(hours: float, work: Path, samples: Path, *, interval: float, report: Callable[[str], None]) -> None:
    """Train for a time in a directory that is empty or missing, and sample every process once an interval of seconds,
    into a log that is replaced: one JSON object a line.

    Raises:
        UsageError: The run ends by itself, which it should not.
    """
    make_corpus(work / "corpus")
    recipe = work / "recipe.toml"
    recipe.write_text(SETUP.recipe(work / "corpus", timeout=600, steps=10**9), encoding="utf-8")
    command = [*train_command(recipe, SETUP.nodes, SETUP.local), *_CHECKPOINT]
    run = DisturbedRun(command, work / "run", work / "run.log", environment(work / "cache"))
    run.start()
    began = time.monotonic()
    try:
        with samples.open("w", encoding="utf-8") as log:
            while (elapsed := time.monotonic() - began) < 3600 * hours:
                if not run.running:
                    raise UsageError(f"the run ended after {elapsed:.0f} s: {run.ended(1).sentence}; see {run.log}")
                if run.step:
                    log.write(json.dumps(_sample(run, elapsed)) + "\n")
                    log.flush()
                time.sleep(interval)
        report(f"{run.step:,} steps in {elapsed / 3600:.2f} hours; the run saves and ends")
        send([run.pid], signal.SIGINT)
        if (ended := run.ended(_STOPPING)).status != 0:
            raise UsageError(f"the run did not end as asked (status {ended.status}): {ended.sentence}; see {run.log}")
    finally:
        if run.running:
            run.kill_all()


def _sample(run: DisturbedRun, elapsed: float) -> dict[str, Any]:
    named = {name: process for process, name in run.processes().items() if re.fullmatch(r"rank \d+", name)}
    read = {name: _of_process(process) for name, process in {"launcher": run.pid, **named}.items()}
    return {"seconds": round(elapsed, 1), "step": run.step, "processes": {name: of for name, of in read.items() if of}}


def _of_process(process: int) -> dict[str, float]:
    """What :data:`KINDS` names of one process; empty if it is gone."""
    place = Path(f"/proc/{process}")
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines() if ":" in line)
        ticks = (place / "stat").read_text().rpartition(")")[2].split()[11:13]
        return {
            "memory": int(status["RssAnon"].split()[0]) * 1024,
            "descriptors": sum(1 for _ in (place / "fd").iterdir()),
            "threads": int(status["Threads"]),
            "processor": sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        }
    return {}


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a log.

    Raises:
        UsageError: It cannot be read, or is too short for a trend.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        samples = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no log of a soak: {error}") from error
    if len(samples) < 2 * _BLOCKS:
        raise UsageError(f"{path} has {len(samples)} samples; a trend takes at least {2 * _BLOCKS}, so soak for longer")
    return samples


def trends(samples: Sequence[Mapping[str, Any]]) -> list[Trend]:
    """The trend of every process's memory, descriptors and threads, and of the time of a step."""
    last = samples[-1]["seconds"]
    steady = [sample for sample in samples if sample["seconds"] >= WARM_UP * last]
    made = []
    for kind, unit in (("memory", "bytes"), ("descriptors", "count"), ("threads", "count")):
        for name in sorted(steady[0]["processes"]):
            points = [(s["seconds"], s["processes"][name][kind]) for s in steady if name in s["processes"]]
            made.append(_trend(f"{kind} of {name}", unit, points))
    made.append(_trend("time of a step", "seconds", _per_step(steady, lambda sample: sample["seconds"])))
    spent = _per_step(steady, lambda sample: sum(one["processor"] for one in sample["processes"].values()))
    made.append(_trend("processor time of a step", "seconds", spent))
    return made


def _per_step(
    samples: Sequence[Mapping[str, Any]], amount: Callable[[Mapping[str, Any]], float]
) -> list[tuple[float, float]]:
    """An amount that grows, by step, over stretches of equal time."""
    size = max(1, len(samples) // (4 * _BLOCKS))
    ends = samples[::size]
    return [
        (now["seconds"], (amount(now) - amount(before)) / (now["step"] - before["step"]))
        for before, now in itertools.pairwise(ends)
        if now["step"] > before["step"]
    ]


def _trend(name: str, unit: str, points: Sequence[tuple[float, float]]) -> Trend:
    """Least squares through the means of blocks of points."""
    size = len(points) / _BLOCKS
    blocks = [points[math.floor(i * size) : math.floor((i + 1) * size)] for i in range(_BLOCKS)]
    times = [statistics.fmean(point[0] for point in block) / 3600 for block in blocks if block]
    values = [statistics.fmean(point[1] for point in block) for block in blocks if block]
    line = statistics.linear_regression(times, values)
    rests = [value - line.slope * at - line.intercept for at, value in zip(times, values, strict=True)]
    spread = sum((at - statistics.fmean(times)) ** 2 for at in times)
    error = _T * math.sqrt(sum(rest**2 for rest in rests) / (len(times) - 2) / spread)
    return Trend(name, unit, statistics.fmean(values), line.slope, error, times[-1] - times[0])


def soak_sheet(samples: Sequence[Mapping[str, Any]]) -> Sheet:
    hours, steps = samples[-1]["seconds"] / 3600, samples[-1]["step"]
    return Sheet(
        title=f"{hours:.2f} hours, {steps:,} steps, {len(samples):,} samples",
        columns=("quantity", "verdict", "mean", "change an hour", "95 % interval"),
        words=2,
        rows=[_cells(trend) for trend in trends(samples)],
    )


def _cells(trend: Trend) -> list[str]:
    forms = {"bytes": format_bytes, "count": "{:.2f}".format, "seconds": lambda value: f"{1e3 * value:.2f} ms"}
    shown = forms[trend.unit]

    def signed(value: float) -> str:
        return f"{'-' if value < 0 else '+'}{shown(abs(value))}"

    interval = f"{signed(trend.slope - trend.error)} to {signed(trend.slope + trend.error)}"
    return [trend.name, trend.verdict, shown(trend.mean), signed(trend.slope), interval]
