"""After a run: what was predicted beside what was measured, and a profile that predicts it better."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thinwire.cost import ProfiledRates
from thinwire.errors import DataError
from thinwire.plan.job import Candidate, Job, profiled_cluster
from thinwire.plan.search import candidate
from thinwire.program import Lane, Scope, lower
from thinwire.spec import Plan
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe

__all__ = ["Comparison", "Quantity", "compare", "refit"]

_WARM_UP = 3
"""Steps at the start that do not count."""


@dataclass(frozen=True)
class Quantity:
    """One figure of a step.

    Attributes:
        name: what it is.
        unit: ``"s"`` or ``"B"``.
        predicted: from the plan, the model and the profile.
        measured: median over the steps of the run.
    """

    name: str
    unit: Literal["s", "B"]
    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1; ``None`` where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


@dataclass(frozen=True)
class Comparison:
    """A run beside its prediction.

    Attributes:
        quantities: step time, waiting by lane, bytes by lane and hop, memory.
        steps: how many were measured.
    """

    quantities: tuple[Quantity, ...]
    steps: int

    def of(self, name: str) -> Quantity:
        """The quantity of a name."""
        return next(quantity for quantity in self.quantities if quantity.name == name)


def compare(run: Path, profile: Profile) -> Comparison:
    """Price a run's plan and put its metrics beside it.

    Args:
        run: directory of a run of ``thinwire train``.
        profile: of the cluster on which it ran.

    Raises:
        DataError: the directory holds no finished steps, or no tokenizer.
        SpecError: its plan or recipe cannot be read, or the profile is of another cluster.
    """
    records = _records(run)
    job, plan = _job(run, profile)
    priced = candidate(job, plan)
    return Comparison((*_times(priced, records), *_bytes(job, plan, records), *_memory(priced, records)), len(records))


def refit(profile: Profile, comparison: Comparison) -> Profile:
    """A profile by which computation takes as long as in the run: what neither waits nor is predicted to wait.

    Args:
        profile: to change.
        comparison: of a run on its cluster.
    """
    step = comparison.of("step")
    waiting = [q for q in comparison.quantities if q.name.startswith("waiting")]
    measured = step.measured - sum(q.measured for q in waiting)
    predicted = step.predicted - sum(q.predicted for q in waiting)
    return profile.paced(measured / predicted)


def _records(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; give the directory of a run of thinwire train") from error
    records = []
    for line in lines:
        # A crash may have cut the last line short.
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    steady = [record for record in records[_WARM_UP:] if not record["skipped"]]
    if not steady:
        raise DataError(f"{path} has {len(records)} steps, and the first {_WARM_UP} do not count; train longer")
    return steady


def _job(run: Path, profile: Profile) -> tuple[Job, Plan]:
    recipe, plan = Recipe.read(run / "recipe.toml"), Plan.load(run / "plan.toml")
    seq = recipe.train.seq
    model = recipe.model.shape(vocab=_vocab(run), seq=seq)
    job = Job(
        model,
        profiled_cluster(profile),
        plan.world * plan.micro_batch * plan.micro_batches * seq,
        seq,
        micro_batch=plan.micro_batch,
        compute_dtype=plan.compute_dtype,
        tp=(plan.tp,),
        pp=(plan.pp,),
        clip=True,
        rates=ProfiledRates(profile, model, plan.compute_dtype),
        overhead=_base_memory(run) or profile.base_memory,
    )
    return job, plan


def _base_memory(run: Path) -> int | None:
    """Bytes of a rank before it had a model, as the run noted it when it started last."""
    try:
        last = json.loads((run / "starts.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        return int(last["base_memory"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _vocab(run: Path) -> int:
    """Ids of the run's tokenizer."""
    path = run / "tokenizer.json"
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"].values()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} cannot be read as the run's tokenizer: {error!r}") from error
    return int(max(ids)) + 1


def _times(priced: Candidate, records: Sequence[dict[str, Any]]) -> list[Quantity]:
    found = [Quantity("step", "s", priced.seconds, statistics.median(record["step_seconds"] for record in records))]
    for lane in Lane:
        predicted = priced.simulated.exposed[lane]
        measured = statistics.median(record["exposed"].get(str(lane), 0.0) for record in records)
        if predicted or measured:
            found.append(Quantity(f"waiting for {lane}", "s", predicted, measured))
    return found


def _bytes(job: Job, plan: Plan, records: Sequence[dict[str, Any]]) -> list[Quantity]:
    traffic = lower(plan, job.units(plan), micro_batches=plan.micro_batches).traffic()
    found = []
    for lane in Lane:
        for scope in Scope:
            # The run's metrics add up all ranks.
            sent = [record["bytes"].get(str(lane), {}).get(str(scope), 0) / plan.world for record in records]
            if traffic[lane][scope] or any(sent):
                found.append(
                    Quantity(f"{lane} {scope}", "B", float(traffic[lane][scope]), float(statistics.median(sent)))
                )
    return found


def _memory(priced: Candidate, records: Sequence[dict[str, Any]]) -> list[Quantity]:
    peaks = [max(record["memory"].values()) for record in records if record.get("memory")]
    return [Quantity("memory of a rank", "B", float(priced.memory.total), float(max(peaks)))] if peaks else []
