"""A run that goes on with other ranks than it had: the same kind of plan, the same global batch.

Checkpoints can be read under any plan on any number of ranks, and the order of samples depends on neither. What is left
is to say what the plan becomes, and to share the same global batch out among the ranks there are.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from thinwire.spec.factor import Factor
from thinwire.spec.pipeline import keeps_busy
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import Started, fast_dtype, resolve_mesh, usable_gpus

__all__ = ["Continued", "continued", "global_batch"]


@dataclass(frozen=True)
class Continued:
    """A run on the ranks there are.

    Attributes:
        recipe: with a plan for these ranks, and with the global batch that the run is meant to have.
        plan: for these ranks.
        notes: what differs from how the run was before, one sentence each.
    """

    recipe: Recipe
    plan: Plan
    notes: tuple[str, ...]


def continued(recipe: Recipe, directory: RunDirectory, ranks: Started | None) -> Continued:
    """Fit a recipe, and the run that it may have begun already, to the ranks there are.

    Every rank calls it and finds the same, whether rank 0 has opened the directory meanwhile or not.

    Args:
        recipe: as it was written; its ``cluster.nodes`` and ``nproc`` are how many ranks it would like.
        directory: of the run; need not exist.
        ranks: what is running already.

    Returns:
        Recipe and plan for these ranks.

    Raises:
        SpecError: tensor and pipeline parallelism of the plan cannot share these ranks.
    """
    if ranks is not None and recipe.cluster.nproc is not None:
        wanted = (recipe.cluster.nodes or 1) * recipe.cluster.nproc
        if wanted != ranks.world:
            recipe = recipe.with_(cluster={"nodes": None, "nproc": None})
    num_gpus = usable_gpus(recipe)
    mesh = resolve_mesh(recipe, ranks, num_gpus)
    recipe = recipe.on_mesh(mesh)
    before = Plan.load(directory.plan) if directory.plan.is_file() else None
    batch = recipe.train.global_batch or _batch_before(directory, before)
    if batch is None:
        batch = global_batch(recipe.resolved_plan(mesh))
    recipe = recipe.with_(train={"global_batch": batch, "micro_batches": None})
    possible = _nearest(batch, recipe, mesh)
    plan = recipe.with_(train={"global_batch": possible}).resolved_plan(mesh, auto_dtype=fast_dtype(num_gpus))
    return Continued(recipe, plan, tuple(_notes(plan, before, batch)))


def global_batch(plan: Plan) -> int:
    """Sequences of a step over all ranks.

    Args:
        plan: any.
    """
    return plan.world * plan.micro_batch * plan.micro_batches


def _batch_before(directory: RunDirectory, before: Plan | None) -> int | None:
    """The global batch that the run is meant to have; ranks that could not share it may have trained with another."""
    if before is None:
        return None
    return Recipe.load(directory.recipe).train.global_batch or global_batch(before)


def _nearest(batch: int, recipe: Recipe, mesh: Factor) -> int:
    """The global batch, or the next larger one that data-parallel ranks can share evenly and that keeps all stages
    busy."""
    _, pp = recipe.model_parallel()
    schedule = recipe.plan.get("schedule", "1f1b")
    shares = itertools.count(math.ceil(batch / mesh.ranks))
    return mesh.ranks * next(share for share in shares if keeps_busy(pp, schedule, share))


def _notes(plan: Plan, before: Plan | None, wanted: int) -> list[str]:
    notes, batch = [], global_batch(plan)
    if before is not None and plan.ranks != before.ranks:
        notes.append(
            f"{plan.ranks} ranks instead of {before.ranks}: {plan.describe()}; a step's {batch} sequences are "
            f"{plan.micro_batches} micro-batches of {plan.micro_batch} on each of {plan.world} data-parallel ranks"
        )
    if batch != wanted:
        notes.append(
            f"a step takes {batch} sequences instead of {wanted}, which {plan.world} data-parallel ranks cannot share "
            "evenly; the learning rate stays as it is"
        )
    return notes
