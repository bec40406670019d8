"""Bytes of the plans of one cut that do not depend on the batch: model states, and what is held for a while."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.cost.memory.stages import demanding_stages, held_units, stage_model, stages
from thinwire.cost.memory.states import ModelStates, States
from thinwire.cost.memory.workspace import Workspace, staged
from thinwire.plan.rules import Chain
from thinwire.plan.space.batches import BatchMemory
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Factor, Plan


class StateBytes:
    """What plans of a cut, of which ``base`` is one, keep whatever the size of a micro-batch. Plans share what they cut
    alike."""

    def __init__(self, job: TrainingJob, base: Plan) -> None:
        self._base, self._room = base, job.room
        shares = demanding_stages(stages(job.model.layers, base))
        held = [held_units(stage_model(job.model, stage.blocks), base, stage) for stage in shares]
        # Padding depends on the world size alone, so all plans have the same units, and cut them evenly.
        self._numels = [sum(buffer.numel for unit in units for buffer in unit.buffers) for units in held]
        self._largest = [max(sum(buffer.numel for buffer in unit.buffers) for unit in units) for units in held]
        self._stages = [Workspace(units) for units in held]
        self._held: dict[tuple[Factor, Factor, bool], list[int]] = {}

    def fitting(self, chain: Chain, secondary: Factor | None, batches: Sequence[BatchMemory]) -> list[int]:
        """Numbers of the batches with which these factors fit into memory, without the messages of codecs."""
        for states_alone in (True, False):  # the former excludes most, and is quick
            kept = [self._kept(chain, secondary, several, states_alone=states_alone) for several in (False, True)]
            fitting = [
                row
                for row, batch in enumerate(batches)
                if _most(kept[batch.plan.micro_batches > 1], batch.working) <= self._room
            ]
            if not fitting:
                break
        return fitting

    def needed(self, chain: Chain, secondary: Factor | None, batch: BatchMemory, *, states_alone: bool = False) -> int:
        """Bytes on the rank of the stage that needs the most; a lower bound of them from model states alone."""
        kept = self._kept(chain, secondary, batch.plan.micro_batches > 1, states_alone=states_alone)
        return _most(kept, batch.working)

    def _kept(self, chain: Chain, secondary: Factor | None, several: bool, *, states_alone: bool) -> list[int]:
        """Bytes of each stage, for steps of one micro-batch or of several."""
        params, grads, optimizer = chain
        base, held = self._base, [0] * len(self._stages)
        if not states_alone:
            key = params, optimizer, staged(chain, several=several)
            if key not in self._held:
                micro_batches = 2 if several else 1
                plan = base.trusted(params=params, grads=grads, optimizer=optimizer, micro_batches=micro_batches)
                self._held[key] = [stage.both(plan) for stage in self._stages]
            held = self._held[key]
        states = States.of_dtypes(
            base.compute_dtype, base.accumulate_dtype, alike=params == optimizer and not base.residence.has_masters
        )
        kept = []
        for size, numel, largest in zip(held, self._numels, self._largest, strict=True):
            of_stage = ModelStates.of(states, chain, secondary, numel, numel // optimizer.ranks, several=several)
            if not base.residence.on_device:
                of_stage = of_stage.streamed(base.residence, states.optimizer * largest // optimizer.ranks, (0, 0))
            kept.append(size + of_stage.on_device)
        return kept


def _most(kept: Sequence[int], working: Sequence[int]) -> int:
    return max(always + beside for always, beside in zip(kept, working, strict=True))
