"""After a run: predicted against measured figures."""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.errors import DataError, SpecError
from thinwire.plan.after.expected import CODECS, COMPUTATION, MEMORY, STEP, TRANSFERS, WAITING, expectation
from thinwire.plan.priced import price_plan
from thinwire.plan.rules import divided
from thinwire.plan.training_job import TrainingJob, refuse_context
from thinwire.program import Lane
from thinwire.record import WARM_UP, Record, RunRecord, began, read_run, steady
from thinwire.spec import Factor, Plan
from thinwire.spec.cut import Cut
from thinwire.spec.expectation import Expectation
from thinwire.spec.profile import Profile

Rows = Sequence[tuple[Record, int]]
"""Records, each with the number of steps that it covers."""


@dataclass(frozen=True)
class Quantity:
    """One figure of a step.

    Attributes:
        name: What was measured, for example ``"step"`` or ``"gather across"``.
        unit: ``"s"`` for seconds, ``"B"`` for bytes.
        predicted: The prediction from the plan, the model and the profile.
        measured: The median over the steps of the run. With islands, the mean for the step and for exchanges, which
            not every step has.
    """

    name: str
    unit: Literal["s", "B"]
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1; ``None`` if the measured value is 0."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class RunComparison:
    """A run and its prediction.

    Attributes:
        quantities: Step time, waiting by lane and axis, bytes by lane and hop, and memory.
        steps: Number of measured steps; with islands, from one exchange to another.
    """

    quantities: tuple[Quantity, ...]
    steps: int

    def of(self, name: str) -> Quantity:
        """The quantity with this name."""
        return next(quantity for quantity in self.quantities if quantity.name == name)

    @property
    def of_what(self) -> str:
        """What measured figures are, in words."""
        means = any(_of_exchanges(quantity.name) for quantity in self.quantities)
        return f"median of {self.steps} steps" + (", mean for step and outer" if means else "")


def compare(run: Path, profile: Profile) -> RunComparison:
    """Predict a run's step from its plan and a profile, and compare the prediction with the run's metrics.

    Args:
        run: Directory of a run of ``thinwire train``.
        profile: Profile of the cluster on which it ran.

    Raises:
        UsageError: The directory does not hold a run.
        DataError: The run has too few steps, or no tokenizer.
        SpecError: The plan or the recipe cannot be read, or the profile is of another cluster.
    """
    record = read_run(run)
    enough_rows(record)  # before anything is priced
    job = job_of(record, profile)
    return compare_expected(record, expectation(job, price_plan(job, record.plan)))


def compare_expected(run: RunRecord, expected: Expectation) -> RunComparison:
    """Compare what was expected of a plan before a run with what the run under it has measured.

    Raises:
        DataError: The run has too few steps.
    """
    rows = enough_rows(run)
    quantities = []
    for figure in expected.figures:
        measured = measured_figure(figure.name, rows, run.plan.ranks)
        if measured is not None and (figure.amount or measured):
            quantities.append(Quantity(figure.name, figure.unit, figure.amount, measured))
    return RunComparison(tuple(quantities), sum(count for _, count in rows))


def enough_rows(run: RunRecord) -> Rows:
    """The steady records of a run.

    Raises:
        DataError: It is too short to compare: there are too few records under its plan.
    """
    before_plan = began(run.starts)
    present = [record for record in run.records if record["step"] > before_plan]
    if len(present) <= WARM_UP:
        raise DataError(
            f"{run.path / 'metrics.jsonl'} has {len(present)} records of the run's plan, and the first {WARM_UP} do "
            "not count; train longer"
        )
    return steady(run)


def job_of(run: RunRecord, profile: Profile) -> TrainingJob:
    """The job of a run, at the rates of a profile of the cluster on which it ran.

    Raises:
        DataError: The run has no tokenizer.
        SpecError: The profile is of another cluster, or lacks a part of the model.
    """
    plan, seq = run.plan, run.recipe.train.seq
    refuse_context(plan)
    _refuse_others(plan, profile)
    model = run.recipe.model.shape(vocab=_vocab(run.path), seq=seq)
    recorded = run.starts[-1].get("base_memory") if run.starts else None  # in use on a rank before it had a model
    overhead = (recorded if isinstance(recorded, int) else None) or profile.base_memory
    # A run of thinwire train takes the norm of every gradient, whatever its optimizer.clip.
    return TrainingJob.of(model, seq, None, profile, plan, micro_batch=plan.micro_batch, clip=True, overhead=overhead)


def _refuse_others(plan: Plan, profile: Profile) -> None:
    """Raise for a profile of other ranks than those that a run's plan is for.

    Raises:
        SpecError: Its nodes or ranks differ.
    """
    profiled, ways = Factor(local=profile.gpus_per_node, nodes=profile.nodes), Cut(tp=plan.tp, pp=plan.pp)
    if divided(profiled, ways) != plan.job_mesh:
        beside = "" if (plan.tp, plan.pp) == (1, 1) else f" with tp = {plan.tp} and pp = {plan.pp}"
        raise SpecError(
            "profile",
            f"nodes = {profile.nodes} and gpus_per_node = {profile.gpus_per_node}, but the run's mesh has nodes = "
            f"{plan.job_mesh.nodes} and local = {plan.job_mesh.local}{beside}; use a profile of the run's cluster",
        )


def _vocab(run: Path) -> int:
    """Size of the run's vocabulary: the largest id of its tokenizer, plus 1."""
    path = run / "tokenizer.json"
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"].values()
        return max(operator.index(number) for number in ids) + 1
    except (OSError, ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path} cannot be read as the run's tokenizer: {error!r}") from error


def measured_figure(name: str, rows: Rows, ranks: int) -> float | None:
    """A figure of a step, by its name in an expectation, as records of a run have measured it: seconds or bytes of a
    rank in the median, and of memory the most. Not every step has exchanges with other islands: they, and steps with
    them, count with their mean. ``None`` if no record has them."""
    if name == MEMORY:
        return max((float(max(record["memory"].values())) for record, _ in rows if record.get("memory")), default=None)
    found = [(_measured(name, record, steps, ranks), steps) for record, steps in rows]
    known = [(amount, steps) for amount, steps in found if amount is not None]
    if not known:
        return None
    if _of_exchanges(name) or (name == STEP and any(_exchanges(record) for record, _ in rows)):
        return statistics.fmean(*zip(*known, strict=True))
    return statistics.median(amount for amount, _ in known)


def _of_exchanges(name: str) -> bool:
    """Whether a figure is one of exchanges with other islands."""
    return Lane.OUTER in name.split()


def _exchanges(record: Record) -> bool:
    """Whether islands exchanged something in the steps of a record."""
    return any((record.get("bytes") or {}).get(Lane.OUTER, {}).values())


def _measured(name: str, record: Record, steps: int, ranks: int) -> float | None:
    """A figure of a step in one record, which covers some steps, and has the bytes of all ranks together."""
    if name == STEP:
        return record.get("step_seconds")
    if name == COMPUTATION:
        return record["own"].get("median") if record.get("own") else None
    for words, key in ((WAITING, "exposed"), (TRANSFERS, "transfer"), (CODECS, "codec")):
        if name.startswith(words):
            table, lane = record.get(key), name.removeprefix(words)
            if lane == Lane.CONTROL and words != WAITING:
                return None  # the computing thread makes these exchanges itself: all of them is waiting
            return None if table is None else float(table.get(lane, 0.0)) / steps
    lane, scope = name.split()
    return float((record.get("bytes") or {}).get(lane, {}).get(scope, 0)) / steps / ranks
