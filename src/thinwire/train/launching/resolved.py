"""A run with all decisions made, as the command passes it to the ranks.

Only :func:`resolve_run` reads the plan file. Ranks get what it returns, and read neither recipe nor plan again.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from thinwire.collectives.gateway.keys import KEYS, NOT_FOR_ISLANDS
from thinwire.errors import SpecError
from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import Hardware, Started, resolve_mesh, resolve_ranks
from thinwire.train.launching.elastic import continued
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
        template, plan, notes = continued(template, directory, ranks, found)
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
