"""What fits: choices of the batch (micro-batch, recomputation and codecs of activations), with their time and memory,
and the bytes of plans that do not depend on the batch: model states, and what is held for a while."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.cost import ModelPart, alike, working_memory
from thinwire.cost.memory.stages import demanding_stages, held_units, stage_model, stages
from thinwire.cost.memory.states import ModelStates, States
from thinwire.cost.memory.workspace import Workspace, staged
from thinwire.plan.space.traffic import codec_choices
from thinwire.plan.training_job import TrainingJob, axis_costs
from thinwire.sim.workload import part_seconds
from thinwire.spec import Factor, Plan
from thinwire.spec.cut import Cut


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """A choice of the batch with the memory that it takes.

    Attributes:
        plan: A plan with the size of a micro-batch, their number, and recomputation.
        working: Bytes that depend on the batch, plus the overhead, for each stage that may need the most memory.
    """

    plan: Plan
    working: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchChoice(BatchMemory):
    """A choice of the batch and of the codecs of activations, with its costs.

    Attributes:
        computing: Seconds of all forwards and backwards of a step, including sums over tensor-parallel ranks, and its
            fixed seconds.
        bubble: Seconds during which a pipeline rank idles or waits for messages.
        forward: Seconds of a forward.
        backward: Seconds of a backward, with what it recomputes.
        parts: Seconds of the backward of each kind of part, with what it recomputes, and of its forward.
    """

    computing: float
    bubble: float
    forward: float
    backward: float
    parts: Mapping[str, tuple[float, float]]

    @property
    def complexity(self) -> int:
        """Number of knobs that the choice turns."""
        return self.plan.recompute + sum(not codec.is_none for codec in (self.plan.wire.tp, self.plan.wire.pp))


class Batches:
    """The choices of the batch for one cut of the model, of which ``base`` is a plan."""

    def __init__(self, job: TrainingJob, cut: Cut, base: Plan) -> None:
        self._job, self._cut, self._base = job, cut, base

    @cached_property
    def choices(self) -> Sequence[BatchChoice]:
        """Every choice of the batch and of the codecs of activations, with its costs."""
        return list(self._all())

    @property
    def least(self) -> float:
        """Seconds of the batch that computes and idles least, whether it fits into memory or not."""
        return min((batch.computing + batch.bubble for batch in self.choices), default=math.inf)

    def _all(self) -> Iterator[BatchChoice]:
        level = codec_choices(self._job)
        axes = [level[axis] if ways > 1 else ("none",) for axis, ways in (("tp", self._cut.tp), ("pp", self._cut.pp))]
        for batch in self.sizes:
            for tp, pp in itertools.product(*axes):
                plan = batch.plan if tp == pp == "none" else batch.plan.with_(wire={"tp": tp, "pp": pp})
                yield _batch_choice(self._job, self._parts, batch, plan)

    @cached_property
    def sizes(self) -> list[BatchMemory]:
        """Every size of a micro-batch, with and without recomputation, with its memory."""
        plans = (
            self._base.trusted(micro_batch=size, micro_batches=count, recompute=recompute)
            for size, count in self._job.batches(self._cut)
            for recompute in self._job.recomputes
        )
        return [BatchMemory(plan, self._working(plan)) for plan in plans]

    @cached_property
    def _parts(self) -> list[tuple[int, ModelPart]]:
        """The parts of the model that compute differently, with their numbers."""
        return alike(self._job.parts(self._base))

    def _working(self, plan: Plan) -> tuple[int, ...]:
        job = self._job
        return tuple(
            working_memory(job.model, plan, seq=job.seq, stage=stage, loss_chunk=job.loss_chunk) + job.overhead
            for stage in demanding_stages(stages(job.model.layers, plan))
        )


def _batch_choice(
    job: TrainingJob, counted: Sequence[tuple[int, ModelPart]], batch: BatchMemory, plan: Plan
) -> BatchChoice:
    """A choice of the batch with its costs."""
    costs = axis_costs(job, plan)
    exchanges = costs.exchanges([part for _, part in counted]) or (0.0,) * len(counted)
    each = [
        (count, part.kind, *part_seconds(job.rates, part, plan, job.seq, exchange))
        for (count, part), exchange in zip(counted, exchanges, strict=True)
    ]
    parts: dict[str, tuple[float, float]] = {}
    for _, kind, forward, backward in each:
        again = forward if plan.recompute and kind == "block" else 0.0
        known = parts.get(kind, (math.inf, math.inf))  # of several, the shortest
        parts[kind] = min(known[0], forward), min(known[1], backward + again)
    forward = sum(count * seconds for count, _, seconds, _ in each)
    backward = sum(count * seconds for count, _, _, seconds in each)
    again = sum(count * seconds for count, kind, seconds, _ in each if plan.recompute and kind == "block")
    computing = plan.micro_batches * (forward + backward + again) + job.rates.handling.step
    none = {"embedding": (0.0, 0.0), "head": (0.0, 0.0), "rest": (0.0, 0.0)}
    return BatchChoice(
        plan,
        batch.working,
        computing=computing,
        bubble=costs.idle(forward, backward) + costs.awaited,
        forward=forward,
        backward=backward + again,
        parts=none | parts,
    )


class StateBytes:
    """What plans of a cut, of which ``base`` is one, keep whatever the size of a micro-batch. Plans share what they cut
    alike."""

    def __init__(self, job: TrainingJob, base: Plan) -> None:
        self._room = job.room
        shares = demanding_stages(stages(job.model.layers, base))
        held = [held_units(stage_model(job.model, stage.blocks), base, stage) for stage in shares]
        # Padding depends on the world size alone, so all plans have the same units, and cut them evenly.
        self._numels = [sum(buffer.numel for unit in units for buffer in unit.buffers) for units in held]
        self._largest = [max(sum(buffer.numel for buffer in unit.buffers) for unit in units) for units in held]
        self._stages = [Workspace(units) for units in held]
        self._held: dict[tuple[Factor, Factor, bool], list[int]] = {}

    def fitting(self, plan: Plan, batches: Sequence[BatchMemory]) -> list[int]:
        """Numbers of the batches with which a plan without codecs fits into memory."""
        for states_alone in (True, False):  # the former excludes most, and is quick
            kept = [self._kept(plan.trusted(micro_batches=count), states_alone=states_alone) for count in (1, 2)]
            fitting = [
                row
                for row, batch in enumerate(batches)
                if _most(kept[batch.plan.micro_batches > 1], batch.working) <= self._room
            ]
            if not fitting:
                break
        return fitting

    def needed(self, plan: Plan, working: Sequence[int], *, states_alone: bool = False) -> int:
        """Bytes on the rank of the stage that needs the most, with what the batch takes on each stage; a lower bound of
        them from model states alone."""
        return _most(self._kept(plan, states_alone=states_alone), working)

    def _kept(self, plan: Plan, *, states_alone: bool) -> list[int]:
        """Bytes of each stage. Of the batch, it matters whether a step has several micro-batches."""
        held, ranks = [0] * len(self._stages), plan.optimizer.ranks
        if not states_alone:
            key = plan.params, plan.optimizer, staged(plan)
            if key not in self._held:
                self._held[key] = [stage.both(plan) for stage in self._stages]
            held = self._held[key]
        states, kept = States.of(plan), []
        for size, numel, largest in zip(held, self._numels, self._largest, strict=True):
            of_stage = ModelStates.of(states, plan, numel, numel // ranks)
            if not plan.residence.on_device:
                of_stage = of_stage.streamed(plan.residence, states.optimizer * largest // ranks, (0, 0))
            kept.append(size + of_stage.on_device)
        return kept


def _most(kept: Sequence[int], working: Sequence[int]) -> int:
    return max(always + beside for always, beside in zip(kept, working, strict=True))
