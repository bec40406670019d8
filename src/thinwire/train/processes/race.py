"""The race of finalists: each plan makes the first steps of the run in processes of its own, and the fastest is taken.

The run itself starts afterwards as if its plan had been named: nothing of a race is left in it, and no two plans hold
their states at the same time. A plan that fails drops out with its sentence.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from thinwire.plan import PricedPlan, summary
from thinwire.spec import Plan
from thinwire.spec.profile import Profile, StepRow
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun, Timing
from thinwire.train.processes.ranks import Failure, cause, run_ranks
from thinwire.units import format_duration

SHORTEST: Final = 30.0
"""Seconds that a race may take in any run that is longer."""
SHARE: Final = 0.01
"""Share of a longer run that a race may take."""

_LEAST_STEPS: Final = 3
"""Steps without which a lap says nothing: those that do not count, and one."""

_FAR: Final = 1_000_000
"""Steps of a run whose last one no lap reaches: there, a run validates and saves."""


Answer = tuple[list[float], Failure | None]
"""What one process says of a lap: seconds of the steps, if it has started rank 0; the failure that explains others."""


@dataclass(frozen=True)
class Lap:
    """What came of trying a plan, the same on every rank.

    Attributes:
        seconds: Seconds of each step that was timed; empty if none was.
        problem: Why there are none, in a sentence; ``None`` if there are.
        failed: Whether the plan has failed, and not only the time has run out.
    """

    seconds: tuple[float, ...] = ()
    problem: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Raced:
    """A plan in a race.

    Attributes:
        plan: The plan.
        label: Name of the preset whose plan it is; ``None`` for a plan of the search.
        predicted: Predicted seconds of a step.
        measured: Median seconds of the steps that were timed; ``None`` if none was.
        steps: Number of these steps.
        problem: Why none was timed, in a sentence; ``None`` if some were.
        failed: Whether the plan has failed, and not only the time has run out.
    """

    plan: Plan
    label: str | None
    predicted: float
    measured: float | None = None
    steps: int = 0
    problem: str | None = None
    failed: bool = False


@dataclass(frozen=True)
class Race:
    """The outcome of a race.

    Attributes:
        plans: The plans in the order in which they ran, the predicted winner first.
        seconds: Seconds that the race took.
        limit: Seconds that it was allowed to take.
    """

    plans: tuple[Raced, ...]
    seconds: float
    limit: float

    @property
    def taken(self) -> Raced:
        """The fastest plan; if no plan was timed, the first by prediction that has not failed."""
        return min(self.plans, key=lambda raced: (math.inf if raced.measured is None else raced.measured, raced.failed))

    def lines(self) -> list[str]:
        """What a user reads: one line for each plan, and one that says which was taken."""
        lines = [f"  {_named(raced)}: {_outcome(raced)}" for raced in self.plans]
        timed = sum(raced.measured is not None for raced in self.plans)
        if self.taken.measured is None and self.taken is self.plans[0]:
            what = "no plan was timed, so the predicted winner is taken"
        elif self.taken.measured is None:
            what = f"no plan was timed, so the first that did not fail is taken: {_named(self.taken)}"
        else:
            what = f"taken: {_named(self.taken)}, the fastest of {timed} that were timed"
        return [*lines, f"auto: the race took {format_duration(self.seconds)}; {what}"]

    def noted(self, profile: Profile) -> Profile:
        """The profile by which the plans were predicted, with the steps that were measured."""
        rows = tuple(
            StepRow(plan=raced.plan.fingerprint(), predicted=raced.predicted, seconds=raced.measured)
            for raced in self.plans
            if raced.measured is not None
        )
        return profile.with_(steps=(*profile.steps, *rows))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the run's directory: of each plan its keys, and seconds of a step."""
        taken = self.taken
        plans = [
            {**vars(raced), "plan": raced.plan.to_dict(), "taken": raced is taken}
            for raced in self.plans
        ]  # fmt: skip
        return {"seconds": self.seconds, "limit": self.limit, "plans": plans}


def announcement(finalists: Sequence[PricedPlan], limit: float) -> str:
    """The line before a race of at most ``limit`` seconds."""
    return (
        f"auto: {len(finalists)} plans, presets among them, make the run's first steps one after the other, for at "
        f"most {format_duration(limit)}; the run then starts anew under the fastest"
    )


def _named(raced: Raced) -> str:
    words = summary(raced.plan)
    return words if raced.label is None else f"preset {raced.label} ({words})"


def _outcome(raced: Raced) -> str:
    predicted = f"predicted {format_duration(raced.predicted)}"
    if raced.measured is None:
        return f"out, {predicted}: {raced.problem}"
    return f"{format_duration(raced.measured)} a step in {raced.steps} steps, {predicted}"


def time_limit(steps: int, predicted: float) -> float | None:
    """Seconds that a race may take before a run of steps that take ``predicted`` seconds each: 30 s, or 1 % of the run
    if that is longer; ``None`` if the run itself is predicted to take no longer."""
    limit = max(SHORTEST, SHARE * steps * predicted)
    return limit if steps * predicted > limit else None


def race(
    finalists: Sequence[PricedPlan],
    lap: Callable[[Plan, float, float], Lap],
    limit: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    prepare: Callable[[], None] = lambda: None,
) -> Race:
    """Try one plan after the other while there is time.

    Args:
        finalists: The plans, the predicted winner first.
        lap: Tries a plan within so many seconds, and takes no longer than the second number of them, which is the
            plan's part of the time, once enough is measured. Where several processes race, all of them get the same
            answer.
        limit: Seconds that all laps together may take.
        clock: Seconds; where several processes race, they read the same clock.
        prepare: Gets ready for the first lap, in the time of the race.
    """
    begun = clock()
    prepare()
    now = clock()
    raced: list[Raced] = []
    starting: list[float] = []
    pace = 1.0  # the least of measured over predicted: one that is predicted too fast must not keep others out
    for number, finalist in enumerate(finalists):
        entry = functools.partial(Raced, finalist.plan, finalist.label, finalist.seconds)
        left = begun + limit - now
        if left < min(starting, default=0.0) + _LEAST_STEPS * pace * finalist.seconds:
            raced.append(entry(problem="no time was left for it"))
            continue
        done = lap(finalist.plan, left, left / (len(finalists) - number))
        before, now = now, clock()
        starting.append(max(0.0, now - before - sum(done.seconds)))
        measured = statistics.median(done.seconds) if done.seconds else None
        pace = pace if measured is None else min(pace, measured / finalist.seconds)
        raced.append(entry(measured=measured, steps=len(done.seconds), problem=done.problem, failed=done.failed))
    return Race(tuple(raced), now - begun, limit)


def lap_here(run: ResolvedRun) -> Callable[[Plan, float, float], Lap]:
    """Laps whose ranks this process starts, all on this machine. They take the model, tokens and batches of a run, and
    write nothing into its directory."""
    return lambda plan, left, part: concluded([run_lap(run.with_plan(plan), left, part)], left)


def run_lap(run: ResolvedRun, left: float, part: float, only: Mapping[str, str] | None = None) -> Answer:
    """Start ranks that try the plan of a run, and wait for them: for ``left`` seconds, after ``part`` of which they
    make no further step once enough is measured. ``only`` are environment variables of the one rank to start here, if
    others start the other ranks."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="thinwire-race-") as directory:
        result = Path(directory) / "seconds.json"
        entered = _entered(run, Path(directory), Timing(result, begun + left, begun + part))
        entered.directory.logs.mkdir()
        try:
            failure = run_ranks(entered, only=only, limit=left)
        except TimeoutError:
            return [], None
        seconds = json.loads(result.read_text(encoding="utf-8")) if result.exists() and failure is None else []
        return seconds, failure


def concluded(answers: Sequence[Answer], left: float) -> Lap:
    """The outcome of a lap that was allowed to take ``left`` seconds, from the answers of all processes that started
    ranks, that with rank 0 first."""
    failures = [failure for _, failure in answers if failure is not None]
    if failures:
        first = cause(failures)
        return Lap(problem=f"rank {first.rank}: {first.sentence}", failed=True)
    seconds, _ = answers[0]
    if not seconds:
        return Lap(problem=f"no step was timed in the {format_duration(left)} that were left")
    return Lap(tuple(seconds))


def _entered(run: ResolvedRun, directory: Path, timing: Timing) -> ResolvedRun:
    """The run in another directory, which only times its steps."""
    quiet = {"steps": max(run.recipe.train.steps, _FAR), "validate_every": 0, "check_replicas": 0}
    recipe = run.recipe.with_(train=quiet, checkpoint={"every": 0})
    return ResolvedRun(recipe, run.plan, RunDirectory(directory), run.node_ranks, timing=timing)
