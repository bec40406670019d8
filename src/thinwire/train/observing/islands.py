"""Where a run stands among elastic islands, whose state it may fetch."""

from __future__ import annotations

from typing import Any

from thinwire.parallel import ParallelModel, ParallelOptimizer
from thinwire.sharding import api
from thinwire.spec.recipe import ClusterRecipe
from thinwire.train.checkpoint import Position


class IslandWatch:
    """Follows the exchanges of a run, whose progress moves on to that of other islands; without elastic islands, it
    does nothing.

    Attributes:
        sampler: Number of this rank among those with data of their own, over all islands.
    """

    def __init__(self, model: ParallelModel, position: Position, cluster: ClusterRecipe) -> None:
        plan = model.plan
        self._model, self.position, self._cluster = model.chunks[0], position, cluster
        self._samples, self._elastic = plan.global_batch, plan.is_elastic
        self.sampler = model.grid.sampler + (cluster.island or 0) * plan.world
        self._exchanges: list[dict[str, Any]] = []

    def enter(self, optimizer: ParallelOptimizer) -> None:
        """Begin to train with the other islands, from where they are."""
        cluster = self._cluster
        assert cluster.island is not None, "resolve_run checks it"
        assert cluster.lighthouse is not None, "resolve_run checks it"
        api.enter_islands(self._model, optimizer.parts[0], island=cluster.island, lighthouse=cluster.lighthouse)
        self.follow()

    def follow(self) -> None:
        """Move on to the step of the other islands, and note the exchanges since the last call."""
        if not self._elastic:
            return
        skipped = api.num_steps(self._model) - self.position.step
        self.position.step += skipped
        self.position.samples += skipped * self._samples
        self._exchanges += [exchange._asdict() for exchange in api.take_exchanges(self._model)]

    def take_exchanges(self) -> list[dict[str, Any]]:
        """Exchanges since the last call."""
        taken, self._exchanges = self._exchanges, []
        return taken
