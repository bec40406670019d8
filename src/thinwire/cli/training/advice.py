"""Advice after a rank has run out of memory: a plan that would have fitted."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire.errors import OutOfMemoryError, SpecError
from thinwire.units import format_bytes

if TYPE_CHECKING:
    from thinwire.errors import Room
    from thinwire.plan import PricedPlan, TrainingJob
    from thinwire.spec import Plan
    from thinwire.spec.recipe import Recipe
    from thinwire.train.launching.resolved import ResolvedRun

_LESS: Final = 0.8
"""Most memory of another plan, as a fraction of the failed plan's, both by the planner's estimate. The estimate is not
exact: if it says that the failed plan fits, it also says so of plans that hardly differ from it."""


@contextlib.contextmanager
def advised(path: Path, run: ResolvedRun) -> Iterator[None]:
    """Add to the error of a rank that ran out of memory which plan would fit, and write that plan to the run's
    directory.

    Raises:
        OutOfMemoryError: The rank's error, with the advice.
    """

    try:
        yield
    except OutOfMemoryError as error:
        try:
            words = _advice(path, run, error.room)
        except SpecError as problem:
            words = f"what would fit is not known, as the planner cannot count this model ({problem.problems[0]})"
        raise OutOfMemoryError(f"{error}. {words}", error.room) from error


def fitting(recipe: Recipe, plan: Plan, vocab: int, room: Room) -> tuple[TrainingJob, PricedPlan | None, int]:
    """Search for a plan that fits into the memory of a rank in which ``plan`` did not. Returns the planner's job, its
    best candidate, if anything fits, and the bytes that it predicts for ``plan``.

    Raises:
        SpecError: The planner cannot model the model's shape.
    """
    import thinwire.plan as planner
    from thinwire.plan import TrainingJob
    from thinwire.plan.training_job import refuse_context
    from thinwire.spec import ClusterSpec

    refuse_context(plan)
    cluster = ClusterSpec.parse(
        {
            "nodes": plan.mesh.nodes * plan.pp,
            "gpus_per_node": plan.mesh.local * plan.tp,
            "memory": room.limit,
            # Only to put what fits in order: no network is known here, so an ordinary one between nodes.
            "peak_flops": {plan.compute_dtype: 1e14},
            "links": {"inside": {"bandwidth": "100GB/s"}, "nic": {"bandwidth": "25gbit"}},
        },
        "planner",
    )
    seq = recipe.train.seq
    job = TrainingJob.of(
        recipe.model.shape(vocab=vocab, seq=seq),
        seq,
        cluster,
        None,
        plan,
        codecs="none" if plan.wire.is_none else "standard",
        clip=True,
        overhead=room.base,
    )
    needed = planner.price_plan(job, plan).memory.total
    least = min(room.limit, room.base + round(_LESS * (needed - room.base)))
    searched = planner.search(dataclasses.replace(job, cluster=job.cluster.with_(memory=least)))
    return job, searched.candidates[0] if searched.candidates else None, needed


def _advice(path: Path, run: ResolvedRun, room: Room) -> str:
    import thinwire.plan as planner
    from thinwire.cli.terminal.console import shown
    from thinwire.train.data.packing import prepare

    recipe, directory = run.recipe, run.directory
    job, candidate, needed = fitting(recipe, run.plan, prepare(recipe.data).vocab, room)
    counted = f"By the planner's count this plan needs {format_bytes(needed)} of a rank"
    if candidate is None:
        smallest, _ = planner.shortage(job)
        remedies = "; ".join(remedy.change for remedy in planner.remedies(job)) or "more ranks, or a smaller model"
        return f"{counted}, and the smallest ({planner.summary(smallest)}) does not fit: {remedies} would do"
    file = directory.path / "fitting-plan.toml"
    candidate.plan.with_(name="fitting").save(file)
    command = ["thinwire", "train", str(path), "--out", shown(directory.path), "--resume", "--plan", shown(file)]
    command += [word for setting in _overruled(recipe, candidate.plan) for word in ("--set", setting)]
    return (
        f"{counted}; {planner.summary(candidate.plan)} needs {format_bytes(candidate.memory.total)}: continue with "
        f"{shlex.join(command)}"
    )


def _overruled(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Settings without which the recipe would change the plan's batch or recomputation back."""
    from thinwire.spec.recipe import BATCH

    for key in BATCH:
        value = getattr(plan, key)
        if recipe.plan.get(key) not in (None, value):
            yield f"plan.{key}={str(value).lower()}"
