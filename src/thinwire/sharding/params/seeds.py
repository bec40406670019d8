"""The number of steps that a model has taken, and seeds for codecs that round at random, which follow it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from thinwire.program import Axis, Lane, axis_index
from thinwire.spec import Plan

_CODES: Final = {lane: code for code, lane in enumerate(Lane)}

_REDUCTION = 5
"""The kind of message that a reduction of gradients has in its seed; other kinds are numbers of lanes."""


@dataclass
class StepCounter:
    """Counts the optimizer steps that one model has taken. Its runtime writes the number; everything else reads it."""

    taken: int = 0


class Seeds:
    """Seeds that differ for every message of a run, and repeat when the run is resumed from a checkpoint.

    Replicas encode the same parameters with the same seed, so that all ranks hold equal values. ``position`` is that of
    this rank in the mesh, and ``island`` the number of its island.
    """

    def __init__(self, plan: Plan, position: int, steps: StepCounter, island: int = 0) -> None:
        self._steps = steps
        self._position, self._world = position, plan.world
        self.be_island(island)
        shard = axis_index(plan, Axis.PARAMS, position)
        share = axis_index(plan, Axis.SHARD, position)
        self._owner = {Lane.GATHER: shard, Lane.SPREAD: share * plan.params.ranks + shard}
        self._last = (-1, 0)

    def be_island(self, number: int) -> None:
        """Make the seeds of this island's messages those of an island with this number."""
        self._job_position = number * self._world + self._position

    def of_unit(self, lane: Lane, unit: int) -> int:
        """The seed of a unit's parameters. It stays the same within a step: forward and backward see equal values."""
        return self._joined(_CODES[lane], unit, self._owner[lane])

    def next(self) -> int:
        """The seed of the next reduction of gradients. Reductions run in the same order on every rank."""
        step, count = self._last
        count = count + 1 if step == self._steps.taken else 0
        self._last = (self._steps.taken, count)
        return self._joined(_REDUCTION, count, self._position)

    def of_exchange(self, fragment: int) -> int:
        """The seed of this rank's message in an exchange with other islands."""
        return self._joined(_CODES[Lane.OUTER] + 1, fragment, self._job_position)

    def _joined(self, kind: int, number: int, owner: int) -> int:
        return ((self._steps.taken * 8 + kind << 20) + number << 20) + owner
