"""Choices of the batch: micro-batch, recomputation and codecs of activations, with their time and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.cost import ModelPart, alike, working_memory
from thinwire.cost.memory.stages import demanding_stages, stages
from thinwire.plan.space.traffic import codec_choices
from thinwire.plan.training_job import TrainingJob, axis_costs
from thinwire.sim.workload import part_seconds
from thinwire.spec import Plan
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
        codecs: Codecs of tp and pp.
        computing: Seconds of all forwards and backwards of a step, including sums over tensor-parallel ranks, and its
            fixed seconds.
        bubble: Seconds during which a pipeline rank idles or waits for messages.
        forward: Seconds of a forward.
        backward: Seconds of a backward, with what it recomputes.
        parts: Seconds of the backward of each kind of part, with what it recomputes, and of its forward.
    """

    codecs: tuple[str, str]
    computing: float
    bubble: float
    forward: float
    backward: float
    parts: Mapping[str, tuple[float, float]]

    @property
    def complexity(self) -> int:
        """Number of knobs that the choice turns."""
        return self.plan.recompute + sum(codec != "none" for codec in self.codecs)


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
        codecs=(str(plan.wire.tp), str(plan.wire.pp)),
        computing=computing,
        bubble=costs.idle(forward, backward) + costs.awaited,
        forward=forward,
        backward=backward + again,
        parts=none | parts,
    )
