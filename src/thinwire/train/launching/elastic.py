"""A run that continues on a different number of ranks: the same kind of plan, the same global batch.

Checkpoints can be read under any plan on any number of ranks, and the order of samples depends on neither. This module
fits the plan to the ranks and divides the global batch among them.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from thinwire.spec.cut import keeps_busy
from thinwire.spec.factor import Factor
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import Hardware, Started, resolve_mesh


class Continued(NamedTuple):
    """A run, adapted to the available ranks: its recipe has the global batch that the run should have, and notes say
    what differs from the run so far."""

    template: PlanTemplate
    plan: Plan
    notes: tuple[str, ...]


def continued(template: PlanTemplate, directory: RunDirectory, ranks: Started | None, found: Hardware) -> Continued:
    """Fit a recipe, and the run that it may have begun already, to the ranks there are.

    Every rank calls it and gets the same result, whether or not rank 0 has opened the directory in the meantime.

    The recipe's ``cluster.nodes`` and ``nproc`` are the ranks that it would like to have; ``ranks`` are ``None`` if
    this process starts them. The run's directory need not exist.

    Raises:
        SpecError: Tensor and pipeline parallelism of the plan do not divide these ranks.
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
    return Continued(template, plan, tuple(_notes(plan, before, batch)))


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
