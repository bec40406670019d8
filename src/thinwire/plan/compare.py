"""After a run: predicted against measured figures, and a profile that fits the run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinwire.errors import DataError
from thinwire.plan.priced import PricedPlan, price_plan
from thinwire.plan.training_job import TrainingJob, refuse_context
from thinwire.program import Lane, Scope, lower
from thinwire.record import WARM_UP, Record, RunRecord, began, read_run, steady
from thinwire.spec import Plan
from thinwire.spec.profile import Profile

__all__ = ["RunComparison", "Quantity", "compare", "refit"]

Rows = Sequence[tuple[Record, int]]
"""Records, each with the number of steps that it covers."""


@dataclass(frozen=True)
class Quantity:
    """One figure of a step.

    Attributes:
        name: What was measured, for example ``"step"`` or ``"gather across"``.
        unit: ``"s"`` for seconds, ``"B"`` for bytes.
        predicted: The prediction from the plan, the model and the profile.
        measured: The median over the steps of the run.
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
        steps: Number of measured steps.
    """

    quantities: tuple[Quantity, ...]
    steps: int

    def of(self, name: str) -> Quantity:
        """The quantity with this name."""
        return next(quantity for quantity in self.quantities if quantity.name == name)


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
    rows = _measured(record)
    job = _job(record, profile)
    priced = price_plan(job, record.plan)
    quantities = (*_times(priced, rows), *_bytes(job, record.plan, rows), *_memory(priced, rows))
    return RunComparison(quantities, sum(count for _, count in rows))


def refit(profile: Profile, comparison: RunComparison) -> Profile:
    """Scale a profile so that computation takes as long as in the run.

    The scale is the measured step time without waiting, over the predicted step time without waiting.

    Args:
        profile: The profile to scale.
        comparison: Comparison of a run on the same cluster with this profile's prediction.
    """
    step = comparison.of("step")
    waiting = [q for q in comparison.quantities if q.name.startswith("waiting")]
    measured = step.measured - sum(q.measured for q in waiting)
    predicted = step.predicted - sum(q.predicted for q in waiting)
    return profile.paced(measured / predicted)


def _measured(run: RunRecord) -> Rows:
    """Records made under the run's current plan, each with the number of steps that it covers."""
    before_plan = began(run.starts)
    present = [record for record in run.records if record["step"] > before_plan]
    if len(present) <= WARM_UP:
        raise DataError(
            f"{run.path / 'metrics.jsonl'} has {len(present)} records of the run's plan, and the first {WARM_UP} do "
            "not count; train longer"
        )
    return steady(run)


def _job(run: RunRecord, profile: Profile) -> TrainingJob:
    plan, seq = run.plan, run.recipe.train.seq
    refuse_context(plan)
    model = run.recipe.model.shape(vocab=_vocab(run.path), seq=seq)
    overhead = _base_memory(run) or profile.base_memory
    return TrainingJob.of(model, seq, None, profile, plan, micro_batch=plan.micro_batch, overhead=overhead)


def _base_memory(run: RunRecord) -> int | None:
    """Bytes in use on a rank before it had a model, as recorded at the last start of the run."""
    recorded = run.starts[-1].get("base_memory") if run.starts else None
    return recorded if isinstance(recorded, int) else None


def _vocab(run: Path) -> int:
    """Size of the run's vocabulary: the largest id of its tokenizer, plus 1."""
    path = run / "tokenizer.json"
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"].values()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read as the run's tokenizer: {error!r}") from error
    return int(max(ids)) + 1


def _times(priced: PricedPlan, rows: Rows) -> list[Quantity]:
    quantities = [Quantity("step", "s", priced.seconds, _median(rows, lambda record, _: record["step_seconds"]))]
    waiting = {str(lane): priced.simulated.exposed[lane] for lane in Lane}
    # While the pipeline fills and drains, a stage waits for messages too: the run cannot tell the two apart.
    waiting |= {"tp": priced.axes.sums, "pp": priced.axes.messages + priced.axes.idle, "ep": priced.axes.experts}
    for kind, predicted in waiting.items():

        def waited(record: Record, steps: int, kind: str = kind) -> float:
            return float(record["exposed"].get(kind, 0.0)) / steps

        measured = _median(rows, waited)
        if predicted or measured:
            quantities.append(Quantity(f"waiting for {kind}", "s", predicted, measured))
    return quantities


def _bytes(job: TrainingJob, plan: Plan, rows: Rows) -> list[Quantity]:
    traffic = lower(plan, job.units(plan), micro_batches=plan.micro_batches).traffic()
    quantities = []
    for lane in Lane:
        for scope in Scope:

            def sent(record: Record, steps: int, lane: str = str(lane), scope: str = str(scope)) -> float:
                return (
                    float(record["bytes"].get(lane, {}).get(scope, 0)) / steps / plan.ranks
                )  # records sum over all ranks

            predicted, measured = float(traffic[lane][scope]), _median(rows, sent)
            if predicted or measured:
                quantities.append(Quantity(f"{lane} {scope}", "B", predicted, measured))
    return quantities


def _memory(priced: PricedPlan, rows: Rows) -> list[Quantity]:
    peaks = [max(record["memory"].values()) for record, _ in rows if record.get("memory")]
    return [Quantity("memory of a rank", "B", float(priced.memory.total), float(max(peaks)))] if peaks else []


def _median(rows: Rows, figure: Callable[[Record, int], float]) -> float:
    """Median of a figure per step, which ``figure`` computes from a record and the number of steps that it covers."""
    return statistics.median(figure(record, steps) for record, steps in rows)
