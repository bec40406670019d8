"""A run with all decisions made, as the command passes it to the ranks.

Only :func:`resolve_run` reads the plan file. Ranks get what it returns, and read neither recipe nor plan again.

A run may continue on a different number of ranks: checkpoints can be read under any plan on any number of ranks, and
the order of samples depends on neither. An elastic run's plan is fitted to the ranks, which share the same global
batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from thinwire.collectives.gateway.keys import KEYS, NOT_FOR_ISLANDS
from thinwire.errors import SpecError
from thinwire.spec.cut import keeps_busy
from thinwire.spec.factor import Factor
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import Hardware, Started, resolve_mesh, resolve_ranks
from thinwire.train.observing.progress import Stream
from thinwire.train.observing.trackers import check_trackers


class Timing(NamedTuple):
    """Where and until when ranks time the first steps of a run, instead of training.

    Attributes:
        result: File to which rank 0 writes the seconds of its steps, a list in JSON.
        deadline: When the last step should be over, by the machine's monotonic clock.
        soon: The same if enough is measured by then.
    """

    result: Path
    deadline: float
    soon: float


@dataclass(frozen=True)
class ResolvedRun:
    """A run to start or to continue.

    Attributes:
        recipe: What to train, with absolute paths.
        plan: How to shard it, on the mesh of this run.
        directory: Where the run keeps its files.
        node_ranks: Number of ranks of a node; traffic between ranks of different nodes is counted apart.
        resume: Whether to continue from the newest valid checkpoint, if there is one.
        stream: Where rank 0 shows progress.
        notes: What differs from the run so far, one sentence each.
        replaced: Keys of the plan file that the recipe replaces, one sentence each.
        timing: Set if ranks do not train, but time its first steps.
    """

    recipe: Recipe
    plan: Plan
    directory: RunDirectory
    node_ranks: int
    resume: bool = False
    stream: Stream = "none"
    notes: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    timing: Timing | None = None

    def with_plan(self, plan: Plan) -> Self:
        """The same run under a plan for the same ranks, which the recipe then holds in full."""
        return dataclasses.replace(self, recipe=self.recipe.with_(plan=plan.to_dict()), plan=plan, replaced=())


def resolve_run(
    recipe: Recipe, directory: RunDirectory, ranks: Started | None, found: Hardware, *, resume: bool, stream: Stream
) -> ResolvedRun:
    """Make all decisions that depend on the plan file, the machine and the past of an elastic run.

    Raises:
        SpecError: The plan file cannot be read, or the plan does not fit the ranks.
    """
    check_trackers(recipe.train.trackers)
    template = PlanTemplate.read(recipe)
    notes: tuple[str, ...] = ()
    if recipe.cluster.elastic:
        resume = resume or directory.recipe.is_file()
        template, plan, notes = _fitted(template, directory, ranks, found)
        mesh = plan.job_mesh
    else:
        mesh = resolve_mesh(template, ranks, found.num_gpus)
        plan = template.resolve(mesh, auto_dtype=found.fast_dtype)
    _check_island(recipe, plan)
    return ResolvedRun(
        recipe=template.recipe,
        plan=plan,
        directory=directory,
        node_ranks=resolve_ranks(template, ranks, found.num_gpus).local,
        resume=resume,
        stream=stream,
        notes=notes,
        replaced=template.replaced(mesh),
    )


def _fitted(
    template: PlanTemplate, directory: RunDirectory, ranks: Started | None, found: Hardware
) -> tuple[PlanTemplate, Plan, tuple[str, ...]]:
    """Fit a recipe, and the run that it may have begun already, to the ranks there are. Returns the recipe with the
    global batch that the run should have, the plan, and what differs from the run so far.

    Every rank gets the same result, whether or not rank 0 has opened the directory in the meantime.

    The recipe's ``cluster.nodes`` and ``nproc`` are the ranks that it would like to have; ``ranks`` are ``None`` if
    this process starts them. The run's directory need not exist.
    """
    cluster = template.recipe.cluster
    if ranks is not None and cluster.nproc is not None and (cluster.nodes or 1) * cluster.nproc != ranks.world:
        template = template.with_recipe(cluster={"nodes": None, "nproc": None})
    mesh = resolve_mesh(template, ranks, found.num_gpus)
    template = template.fitted(mesh)
    before = Plan.load(directory.plan) if directory.plan.is_file() else None
    batch = template.recipe.train.global_batch
    if batch is None and before is not None:  # ranks that could not share it evenly have trained with another
        batch = Recipe.load(directory.recipe).train.global_batch or before.global_batch
    if batch is None:
        batch = template.resolve(mesh).global_batch
    template = template.with_global_batch(batch)
    shareable = template.with_global_batch(_nearest(batch, template, mesh))
    plan = shareable.resolve(mesh, auto_dtype=found.fast_dtype)
    return template, plan, tuple(_notes(plan, before, batch))


def _nearest(batch: int, template: PlanTemplate, mesh: Factor) -> int:
    """The global batch, or the next larger one that data-parallel ranks can share evenly and that keeps all stages
    busy."""
    _, pp = template.model_parallel
    schedule = template.recipe.plan.get("pipeline_schedule", "1f1b")
    shares = itertools.count(math.ceil(batch / mesh.ranks))
    return mesh.ranks * next(share for share in shares if keeps_busy(pp, schedule, share))


def _notes(plan: Plan, before: Plan | None, wanted: int) -> list[str]:
    notes, batch = [], plan.global_batch
    if before is not None and plan.ranks != before.ranks:
        notes.append(
            f"{plan.ranks} ranks instead of {before.ranks}: {plan.describe()}; a step's {batch} sequences are "
            f"{plan.micro_batches} micro-batches of {plan.micro_batch} on each of {plan.data_ranks} data-parallel ranks"
        )
    if batch != wanted:
        notes.append(
            f"a step takes {batch} sequences instead of {wanted}, which {plan.data_ranks} data-parallel ranks cannot "
            "share evenly; the learning rate stays as it is"
        )
    return notes


def _check_island(recipe: Recipe, plan: Plan) -> None:
    """Refuse an elastic island that knows neither its number nor the others, or has keys, and a number that has no
    use."""
    cluster = recipe.cluster
    if plan.is_elastic and (cluster.keys or os.environ.get(KEYS)):
        raise SpecError("cluster", NOT_FOR_ISLANDS)
    given = {"island": cluster.island, "lighthouse": cluster.lighthouse}
    if plan.is_elastic and None in given.values():
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise SpecError(
            "cluster",
            f"{missing} is missing, with islands.elastic = true: start this job with "
            "--set cluster.island=K --set cluster.lighthouse=HOST:PORT, as `thinwire lighthouse` prints it",
        )
    useless = [f"{name} = {value!r}" for name, value in given.items() if value is not None]
    if not plan.is_elastic and useless:
        raise SpecError(
            "cluster", f"{' and '.join(useless)} has no use without islands.elastic = true in the plan; leave it out"
        )
