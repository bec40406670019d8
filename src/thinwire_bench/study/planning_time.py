"""Processor time of ``thinwire plan`` on one core, the whole command from its start to its exit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from thinwire.errors import UsageError
from thinwire.report import Sheet

__all__ = ["CASES", "PlanningTime", "sheets", "time_planning"]

_SEVEN: Final = "--model llama-7b --cluster a100-80g:4x8 --tokens-per-step 2M --seq 2048 --codecs standard"
_SLOW: Final = "--set cluster.links.nic.bandwidth=25gbit"
_LARGE: Final = "--model llama-3-405b"


@dataclass(frozen=True)
class Question:
    """A question to the planner.

    Attributes:
        arguments: Arguments of ``thinwire plan``.
        goal: Seconds of processor time that it should take at most.
    """

    arguments: str
    goal: float


CASES: Final[Mapping[str, Question]] = {
    "7B on 4 x 8, codecs": Question(_SEVEN, 1.0),
    "the same with --explain": Question(f"{_SEVEN} --explain", 3.0),
    "7B on 4 x 8 at 25 Gbit/s, codecs": Question(f"{_SEVEN} {_SLOW}", 1.0),
    "the same at 25 Gbit/s with --explain": Question(f"{_SEVEN} {_SLOW} --explain", 3.0),
    "405B on 8 x 8, nothing fits": Question(f"{_LARGE} --cluster h100-80g:8x8 --tokens-per-step 4M", 1.0),
    "405B on a million GPUs": Question(f"{_LARGE} --cluster h100-80g:125000x8 --tokens-per-step 8192000000", 3.0),
}
"""The cases by name."""


@dataclass(frozen=True)
class PlanningTime:
    """Times of one case.

    Attributes:
        case: Its name.
        seconds: Processor time, user and system, of each round.
        goal: Seconds that it should take at most.
        plans: Number of valid plans; ``None`` if nothing fits.
        simulated: Number of plans that were simulated.
        gap: Share by which another plan can be faster, at most.
    """

    case: str
    seconds: tuple[float, ...]
    goal: float
    plans: int | None
    simulated: int | None
    gap: float | None


def time_planning(names: Sequence[str], rounds: int, report: Callable[[str], None]) -> list[PlanningTime]:
    """Run every case on one core, in turn.

    Args:
        names: Names of cases.
        rounds: Times that each case runs.
        report: Called with a line of text whenever a case begins.

    Raises:
        UsageError: There is no such case, or the command failed.
    """
    if unknown := [name for name in names if name not in CASES]:
        raise UsageError(f"{unknown[0]!r} is no case of bench planning-time: {', '.join(CASES)}")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for name in names:
            report(f"round {number + 1}: {name}")
            taken, answers[name] = _run(CASES[name].arguments)
            seconds[name].append(taken)
    times = []
    for name in names:
        search = answers[name].get("search", {})
        figures = search.get("considered"), search.get("simulated"), search.get("gap")
        times.append(PlanningTime(name, tuple(seconds[name]), CASES[name].goal, *figures))
    return times


def _run(arguments: str) -> tuple[float, dict[str, Any]]:
    """Processor seconds of a command, and what it prints."""
    core = min(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "thinwire.cli.main", "plan", *arguments.split(), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        ["taskset", "-c", str(core), *command], capture_output=True, text=True, check=False
    )  # one core: threads of a library would hide work
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not done.stdout:
        raise UsageError(f"thinwire plan {arguments} failed: {done.stderr.strip()[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, json.loads(done.stdout)


def sheets(times: Sequence[PlanningTime]) -> list[Sheet]:
    """The table of times."""
    rows = [
        [
            time.case,
            "-" if time.plans is None else f"{time.plans:,}",
            "-" if time.simulated is None else f"{time.simulated}",
            "-" if time.gap is None else f"{time.gap:.1%}",
            f"{min(time.seconds):.2f}",
            f"{max(time.seconds):.2f}",
            f"{time.goal:.0f}",
        ]
        for time in times
    ]
    columns = ["case", "plans", "simulated", "gap", "least s", "most s", "goal s"]
    return [Sheet("Processor time of thinwire plan on one core", columns, 1, rows)]
