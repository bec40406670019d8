"""What is asked of a run, before any of its ranks has begun."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.spec.plan import Plan
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire.train.observing.progress import Stream

__all__ = ["RunRequest"]


@dataclass(frozen=True)
class RunRequest:
    """A run to begin or to continue.

    Attributes:
        recipe: what to train.
        plan: for the ranks there are.
        directory: of the run.
        node_ranks: ranks of a node, for what is counted as sent across nodes.
        resume: continue from the newest valid checkpoint, if there is one.
        stream: where rank 0 shows progress.
    """

    recipe: Recipe
    plan: Plan
    directory: RunDirectory
    node_ranks: int
    resume: bool
    stream: Stream
