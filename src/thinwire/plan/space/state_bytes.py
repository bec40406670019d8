"""Bytes of the plans of one cut that do not depend on the batch: model states, and what is held for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.cost.memory import ModelStates, States, Workspace, held_units, stage_model
from thinwire.plan.rules import Chain
from thinwire.plan.space.batches import BatchMemory, demanding
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Factor, Plan

__all__ = ["KeptBytes", "StateBytes", "fits", "needed_bytes"]

KeptBytes = Mapping[bool, tuple[int, ...]]
"""Bytes of each stage that may need the most memory, for steps of one micro-batch (``False``) and of several."""


class StateBytes:
    """What plans of a cut keep whatever the size of a micro-batch. Plans share what they cut alike.

    Args:
        job: The job.
        base: A plan of the cut.
    """

    def __init__(self, job: TrainingJob, base: Plan) -> None:
        self._base, self._room = base, job.cluster.memory
        stages = [held_units(stage_model(job.model, stage.blocks), base, stage) for stage in demanding(job, base, 1)]
        # Padding depends on the world size alone, so all plans have the same units, and cut them evenly.
        self._numels = [sum(buffer.numel for unit in held for buffer in unit.buffers) for held in stages]
        self._stages = [Workspace(held) for held in stages]
        self._held: dict[tuple[Factor, Factor], tuple[int, ...]] = {}

    def of(self, chain: Chain, secondary: Factor | None) -> KeptBytes:
        """The bytes with these factors."""
        params, _, optimizer = chain
        key = params, optimizer
        if key not in self._held:
            plan = self._base.trusted(params=params, grads=optimizer, optimizer=optimizer)
            self._held[key] = tuple(held.both(plan) for held in self._stages)
        held = self._held[key]
        return {
            several: tuple(
                size + beside
                for size, beside in zip(self._model_states(chain, secondary, several=several), held, strict=True)
            )
            for several in (False, True)
        }

    def least(self, chain: Chain, secondary: Factor | None) -> tuple[int, ...]:
        """A lower bound of :meth:`of`: model states alone, with one micro-batch."""
        return self._model_states(chain, secondary, several=False)

    def fitting(self, chain: Chain, secondary: Factor | None, batches: Sequence[BatchMemory]) -> list[int]:
        """Numbers of the batches with which these factors fit into memory."""
        alone = self.least(chain, secondary)
        rows = [row for row, batch in enumerate(batches) if fits({False: alone, True: alone}, batch, self._room)]
        if not rows:
            return rows
        states = self.of(chain, secondary)
        return [row for row in rows if fits(states, batches[row], self._room)]

    def _model_states(self, chain: Chain, secondary: Factor | None, *, several: bool) -> tuple[int, ...]:
        """Bytes of the model states of each stage."""
        params, _, optimizer = chain
        base, ranks = self._base, optimizer.ranks
        states = States.of_dtypes(base.compute_dtype, base.accumulate_dtype, alike=params == optimizer)
        return tuple(
            sum(ModelStates.of(states, chain, secondary, numel, numel // ranks, several=several))
            for numel in self._numels
        )


def needed_bytes(kept: tuple[int, ...], batch: BatchMemory) -> int:
    """Bytes on the rank of the stage that needs the most."""
    return max(always + working for always, working in zip(kept, batch.working, strict=True))


def fits(states: KeptBytes, batch: BatchMemory, room: int) -> bool:
    """Whether every stage fits into memory, without the messages of codecs."""
    kept = states[batch.micro_batches > 1]
    return all(always + working <= room for always, working in zip(kept, batch.working, strict=True))
