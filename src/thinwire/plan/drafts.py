"""Closed-form estimates of every valid plan: drafts, each with a lower bound of its step time.

One :class:`Drafts` covers one cut of the model, that is, one number of tensor-parallel ranks and pipeline stages. Its
plans differ in factors, codecs and batches. Their costs are sums of terms that are priced only once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from thinwire.cost import Busy, ModelPart, Pricer, Rates, Traffic, UnitKind, alike, working_memory
from thinwire.cost.memory import PipelineShare, States, always_held, demanding_stages, held_units, stage_model, stages
from thinwire.plan.rules import Chain, Cut, chain_ends, secondaries
from thinwire.plan.training_job import CODEC_LEVELS, CodecLevel, TrainingJob
from thinwire.program import Kind, Scope, default_trace
from thinwire.program.wire import ITEMSIZE
from thinwire.sim.axes import (
    HopCalls,
    StageLink,
    TensorParallelRates,
    idle_of,
    message_seconds,
    pass_seconds,
    sent_seconds,
)
from thinwire.sim.neighbours import neighbour_rates
from thinwire.spec import CodecSpec, Factor, Plan
from thinwire.spec.codec import encodable_dtypes
from thinwire.spec.plan import cut_alike

__all__ = ["BatchChoice", "PlanDraft", "Drafts", "axis_rates", "codec_choices", "fits", "stage_message"]

_SMALLEST_BUCKET, _LARGEST_BUCKET = 4 << 20, 256 << 20

_WIRE = ("gather", "reduce_intra", "reduce_inter", "spread", "tp", "pp")


@dataclass(slots=True, eq=False)
class PlanDraft:
    """A plan in compact form, with a lower bound of its step time. There may be 100,000, compared by identity.

    Attributes:
        bound: Lower bound of the step time in seconds.
        knobs: Number of codecs, secondary shards, recomputation and further axes that the plan uses.
        cut: Tensor and pipeline parallelism.
        chain: Factors of ``P``, ``G`` and ``OS``.
        secondary: Factor of the secondary shard; ``None`` without one.
        codecs: Codecs of gather, reduce_intra, reduce_inter, spread, tp and pp, in this order.
        micro_batch: Sequences per micro-batch.
        recompute: Whether blocks are recomputed in the backward.
    """

    bound: float
    knobs: int
    cut: Cut
    chain: Chain
    secondary: Factor | None
    codecs: tuple[str, ...]
    micro_batch: int
    recompute: bool


KeptBytes = Mapping[bool, tuple[int, ...]]
"""Bytes of each stage that may need the most memory, for steps of one micro-batch (``False``) and of several."""


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """A choice of the batch with the memory that it takes.

    Attributes:
        micro_batch: Sequences per micro-batch.
        micro_batches: Micro-batches per step.
        recompute: Whether blocks are recomputed in the backward.
        working: Bytes that depend on the batch, plus the overhead, for each stage that may need the most memory.
    """

    micro_batch: int
    micro_batches: int
    recompute: bool
    working: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchChoice(BatchMemory):
    """A choice of the batch and of the codecs of activations, with its costs.

    Attributes:
        codecs: Codecs of tp and pp.
        computing: Seconds of all forwards and backwards of a step, including sums over tensor-parallel ranks.
        standing: Seconds during which a pipeline rank idles or waits for messages.
    """

    codecs: tuple[str, str]
    computing: float
    standing: float

    @property
    def knobs(self) -> int:
        """Number of knobs that the choice turns."""
        return self.recompute + sum(codec != "none" for codec in self.codecs)


class _Communication(NamedTuple):
    """A choice of codecs with its costs: reductions, gathers and spreads as they are, which few choices add up.

    Attributes:
        codecs: Codecs of gather, reduce_intra, reduce_inter and spread.
        knobs: Number of these that are not ``none``.
        every: Work of every micro-batch: reductions and gathers.
        once: Work of every step, in addition: reductions and the spread.
        exposed: Seconds per step that no computation hides.
    """

    codecs: tuple[str, ...]
    knobs: int
    every: tuple[Busy, Busy]
    once: tuple[Busy, Busy]
    exposed: float


def axis_rates(job: TrainingJob, plan: Plan) -> Rates:
    """The job's rates, including sums over the plan's tensor-parallel ranks, and exchanges with neighbours."""
    if plan.tp == 1:
        return neighbour_rates(job.rates, plan, job.model)
    calls = HopCalls(job.rates)
    return TensorParallelRates(job.rates, calls, plan.tp, job.model.hidden, ITEMSIZE[plan.compute_dtype])


def stage_message(job: TrainingJob, plan: Plan) -> float:
    """Seconds of sending a micro-batch to the next stage; every tensor-parallel rank sends its share of the tokens."""
    calls, crosses = HopCalls(job.rates), job.cluster.nodes > 1
    link = StageLink(job.model.hidden, crosses, sharers=plan.tp, gathered=False)
    return sent_seconds(plan, job.seq, job.rates, calls, link)


class Drafts:
    """All plans of one cut.

    Args:
        job: Model, cluster, batch and the choices that are allowed.
        cut: Tensor and pipeline parallelism.
        pricer: Prices collectives.

    Attributes:
        considered: Number of plans that :meth:`drafts` has gone through.
        fitting: Number of these that fit into memory without codecs and may stay below the limit.
    """

    def __init__(self, job: TrainingJob, cut: Cut, pricer: Pricer) -> None:
        self.job, self.cut, self.mesh = job, cut, job.mesh_of(cut)
        base = Plan(
            mesh=self.mesh,
            params=Factor(),
            grads=Factor(),
            optimizer=Factor(),
            compute_dtype=job.compute_dtype,
            tp=cut.tp,
            pp=cut.pp,
            schedule=cut.schedule,
        )
        self.bucket_bytes = _bucket_bytes(job, self.mesh, sum(part.numel for part in job.parts(base)))
        self._base = base.with_(bucket_bytes=self.bucket_bytes)
        self._kinds = _kinds(job, self._base)
        units = job.units(self._base)
        named = [unit for unit in default_trace(units).needed if units[unit].name]
        self._first = tuple(sum(buffer.numel for buffer in units[unit].buffers) for unit in named[:2])
        self._parameters = sum(kind.count * kind.numel for kind in self._kinds)
        self._stages = [held_units(stage_model(job.model, stage.blocks), self._base, stage)
                        for stage in _demanding(self.job, self._base, 1)]  # fmt: skip
        # Padding depends on the world size alone, so all plans have the same units, and cut them evenly.
        self._numels = [sum(buffer.numel for unit in held for buffer in unit.buffers) for held in self._stages]
        self._held: dict[tuple[Factor, Factor], tuple[int, ...]] = {}
        self._reduced: dict[tuple[Traffic, CodecSpec, CodecSpec], tuple[Busy, Busy, float]] = {}
        self._pricer = pricer
        self.considered = self.fitting = 0

    @cached_property
    def batches(self) -> list[BatchChoice]:
        """Every choice of the batch, with its costs."""
        return list(self._all_batches())

    def drafts(self, limit: float = math.inf) -> Iterator[PlanDraft]:
        """Every valid plan that fits into memory without codecs, with its estimate.

        Args:
            limit: Step time in seconds above which plans are of no interest. Every plan below it is generated; some of
                those above it are not.
        """
        job, room = self.job, self.job.cluster.memory
        # a (+) b = max(a, b) + (gamma - 1) min(a, b) bounds computation and transfers that overlap from below.
        slowing, strided = job.rates.least_slowing - 1, job.cluster.links.spine is not None
        promising = [batch for batch in self.batches if batch.computing + batch.standing <= limit]
        for params, optimizer in chain_ends(self.mesh):
            if self.cut.pp > 1 and params.ranks > 1:  # every micro-batch would gather the parameters again
                continue
            update = job.rates.update(self._parameters // optimizer.ranks)
            for secondary in secondaries(self.mesh, params):
                # Cutting G like OS saves memory but never time: it is tried only if G cut like P does not always fit.
                for grads in dict.fromkeys((params, optimizer)):
                    chain = (params, grads, optimizer)
                    traffic = Traffic.of(self.mesh, *chain, secondary, strided=strided)
                    levels = self._levels(traffic)
                    count = math.prod(map(len, levels))
                    self.considered += count * len(self.batches)
                    if not promising:
                        continue
                    least = {False: (alone := self.least_states(chain, secondary)), True: alone}
                    fitting = [batch for batch in promising if fits(least, batch, room)]
                    if fitting:
                        states = self.states(chain, secondary)
                        fitting = [batch for batch in fitting if fits(states, batch, room)]
                    self.fitting += count * len(fitting)
                    choices = list(self._communication(traffic, levels)) if fitting else []
                    for batch in fitting:
                        extra = batch.knobs + (secondary is not None) + self.cut.knobs
                        for choice in choices:
                            codec, transferring, sending = _busy(choice, batch.micro_batches)
                            computing = batch.computing + update + codec
                            beside = slowing * min(computing, transferring - choice.exposed)
                            # Exposed seconds already include the processor time of their transfers.
                            besides = max(beside + choice.exposed, sending)
                            bound = max(computing + besides, transferring) + batch.standing
                            yield PlanDraft(
                                bound,
                                choice.knobs + extra,
                                self.cut,
                                chain,
                                secondary,
                                choice.codecs + batch.codecs,
                                batch.micro_batch,
                                batch.recompute,
                            )
                    if len(fitting) == len(promising):
                        break

    def plan(self, draft: PlanDraft) -> Plan:
        """The full plan of a draft."""
        params, grads, optimizer = draft.chain
        return self._base.with_(
            params=params,
            grads=grads,
            optimizer=optimizer,
            secondary=draft.secondary,
            micro_batch=draft.micro_batch,
            micro_batches=self.job.sequences(self.mesh) // draft.micro_batch,
            recompute=draft.recompute,
            wire={name: codec for name, codec in zip(_WIRE, draft.codecs, strict=True) if codec != "none"},
        )

    def smallest(self) -> tuple[int, PlanDraft]:
        """The bytes of the plan that needs the least memory, and the plan; among several, the one with the least
        sharding."""
        batch = min(self._sizes, key=lambda batch: max(batch.working))
        chains = [
            (params, optimizer, optimizer)
            for params, optimizer in chain_ends(self.mesh)
            if self.cut.pp == 1 or params.ranks == 1
        ]
        several, least, best = batch.micro_batches > 1, math.inf, chains[0]
        for chain in reversed(chains):  # the most sharded first, which leaves little to try
            if _needed(self.least_states(chain, None), batch) <= least:
                needed = _needed(self.states(chain, None)[several], batch)
                least, best = (needed, chain) if needed <= least else (least, best)
        codecs = ("none",) * len(_WIRE)
        return int(least), PlanDraft(0.0, 0, self.cut, best, None, codecs, batch.micro_batch, batch.recompute)

    def states(self, chain: Chain, secondary: Factor | None) -> KeptBytes:
        """Bytes that do not depend on the size of a micro-batch."""
        params, _, optimizer = chain
        key = params, optimizer
        if key not in self._held:
            plan = self._base.with_(params=params, grads=optimizer, optimizer=optimizer)
            self._held[key] = tuple(always_held(plan, held) for held in self._stages)
        held = self._held[key]
        return {
            several: tuple(
                size + beside
                for size, beside in zip(
                    _state_bytes(self._base, self._numels, chain, secondary, several=several), held, strict=True
                )
            )
            for several in (False, True)
        }

    def least_states(self, chain: Chain, secondary: Factor | None) -> tuple[int, ...]:
        """A lower bound of :meth:`states`: model states alone, with one micro-batch."""
        return _state_bytes(self._base, self._numels, chain, secondary, several=False)

    # -- batches -----------------------------------------------------------------------------------------------------

    def _all_batches(self) -> Iterator[BatchChoice]:
        level = codec_choices(self.job)
        axes = [level[axis] if ways > 1 else ("none",) for axis, ways in (("tp", self.cut.tp), ("pp", self.cut.pp))]
        for batch in self._sizes:
            size, count, recompute = batch.micro_batch, batch.micro_batches, batch.recompute
            for tp, pp in itertools.product(*axes):
                plan = self._base.with_(
                    micro_batch=size, micro_batches=count, recompute=recompute, wire={"tp": tp, "pp": pp}
                )
                yield BatchChoice(size, count, recompute, batch.working, (tp, pp), *self._seconds(plan))

    @cached_property
    def _sizes(self) -> list[BatchMemory]:
        """Every size of a micro-batch, with and without recomputation, with its memory."""
        return [
            BatchMemory(size, count, recompute, self._working(size, count, recompute=recompute))
            for size, count in self.job.batches(self.cut)
            for recompute in self.job.recomputes
        ]

    @cached_property
    def _parts(self) -> list[tuple[int, ModelPart]]:
        """The parts of the model that compute differently, with their numbers."""
        return alike(self.job.parts(self._base))

    def _seconds(self, plan: Plan) -> tuple[float, float]:
        """Seconds of all forwards and backwards of one step; seconds during which a pipeline rank idles or waits for
        messages."""
        rates, seq = axis_rates(self.job, plan), self.job.seq
        forward, backward = pass_seconds(plan, self._parts, rates, seq)
        blocks = [(count, part) for count, part in self._parts if part.kind == "block"]
        again = pass_seconds(plan, blocks, rates, seq)[0] if plan.recompute else 0.0
        computing = plan.micro_batches * (forward + backward + again) + rates.step
        if plan.pp == 1:
            return computing, 0.0
        message = stage_message(self.job, plan)
        return computing, idle_of(plan, forward, backward, message) + message_seconds(plan, message)

    def _working(self, micro_batch: int, micro_batches: int, *, recompute: bool) -> tuple[int, ...]:
        plan = self._base.with_(micro_batch=micro_batch, micro_batches=micro_batches, recompute=recompute)
        job = self.job
        return tuple(
            working_memory(job.model, plan, seq=job.seq, stage=stage, loss_chunk=job.loss_chunk) + job.overhead
            for stage in _demanding(self.job, self._base, micro_batches)
        )

    # -- communication -----------------------------------------------------------------------------------------------

    def _levels(self, traffic: Traffic) -> list[tuple[str, ...]]:
        """Codecs that make a difference, by field of ``wire``; those of activations are left out."""
        level = codec_choices(self.job)
        reductions = [mesh for mesh in (traffic.params, traffic.shard, traffic.replica) if mesh]
        used = (
            traffic.params is not None,
            any(mesh.local > 1 for mesh in reductions),
            any(mesh.nodes > 1 for mesh in reductions),
            traffic.shard is not None,
        )
        return [level[name] if needed else ("none",) for name, needed in zip(_WIRE[:4], used, strict=True)]

    def _communication(self, traffic: Traffic, levels: list[tuple[str, ...]]) -> Iterator[_Communication]:
        """Every choice of codecs with its costs."""
        gathers, intras, inters, spreads = map(_codecs, levels)
        pricer, kinds, first = self._pricer, self._kinds, self._first
        gathered = [
            (str(c), pricer.gathers(traffic, kinds, c), pricer.first_gathers(traffic, first, c)) for c in gathers
        ]
        spread = [
            (str(c), pricer.spread(traffic, kinds, c), pricer.first_spread(traffic, first[0], c)) for c in spreads
        ]
        for intra, inter in itertools.product(intras, inters):
            every, last, reduced = self._reductions(traffic, intra, inter)
            names = str(intra), str(inter)
            for (gather, gathering, before), (after, spreading, at_first) in itertools.product(gathered, spread):
                codecs = (gather, *names, after)
                knobs = 4 - codecs.count("none")
                exposed = before + reduced + at_first
                yield _Communication(codecs, knobs, (every, gathering), (last, spreading), exposed)

    def _reductions(self, traffic: Traffic, intra: CodecSpec, inter: CodecSpec) -> tuple[Busy, Busy, float]:
        """Costs of reductions: in every micro-batch, in the last in addition, and those that no computation hides. They
        do not depend on the secondary shard."""
        key = replace(traffic, secondary=None), intra, inter
        if key not in self._reduced:
            every, last = self._pricer.reductions(traffic, self._kinds, intra, inter, self.bucket_bytes)
            exposed = self._pricer.last_reductions(traffic, self._first, intra, inter, self.bucket_bytes)
            self._reduced[key] = every, last, exposed
        return self._reduced[key]


def _needed(kept: tuple[int, ...], batch: BatchMemory) -> int:
    """Bytes on the rank of the stage that needs the most."""
    return max(always + working for always, working in zip(kept, batch.working, strict=True))


def _demanding(job: TrainingJob, base: Plan, micro_batches: int) -> list[PipelineShare]:
    return demanding_stages(stages(job.model.layers, base.with_(micro_batches=micro_batches)))


def _state_bytes(
    base: Plan, numels: Sequence[int], chain: Chain, secondary: Factor | None, *, several: bool
) -> tuple[int, ...]:
    """Bytes of the model states of each stage.

    As in :func:`~thinwire.cost.memory`, no ``G`` shard is made beside the optimizer's share of the gradients where
    they go straight to the reduction.
    """
    params, grads, optimizer = chain
    apart = not cut_alike(grads, optimizer) and (params.ranks > 1 or several)
    of = States.of_dtypes(base.compute_dtype, base.accumulate_dtype, alike=params == optimizer)
    sizes = []
    for numel in numels:
        share = numel // optimizer.ranks
        size = of.params * numel // params.ranks + of.optimizer * share
        size += of.grads * (share + (numel // grads.ranks if apart else 0))
        sizes.append(size + (of.params * numel // secondary.ranks if secondary else 0))
    return tuple(sizes)


def _busy(choice: _Communication, micro_batches: int) -> tuple[float, float, float]:
    """Seconds of codecs, of the busiest kind of link, and of the processor for transfers, in one step."""
    (one, other), (often, again), n = choice.once, choice.every, micro_batches
    inside = one.inside + other.inside + n * (often.inside + again.inside)
    across = one.across + other.across + n * (often.across + again.across)
    spine = one.spine + other.spine + n * (often.spine + again.spine)
    sending = one.sending + other.sending + n * (often.sending + again.sending)
    codec = one.codec + other.codec + n * (often.codec + again.codec)
    return codec, max(inside, across, spine), sending


def codec_choices(job: TrainingJob) -> dict[str, tuple[str, ...]]:
    """Codecs of the job's level that encode its compute dtype, by field of ``wire``."""
    return _encoding(job.codecs, job.compute_dtype)


@cache
def _encoding(level: CodecLevel, dtype: str) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(text for text in texts if dtype in encodable_dtypes(CodecSpec(text)))
        for name, texts in CODEC_LEVELS[level].items()
    }


def fits(states: KeptBytes, batch: BatchMemory, room: int) -> bool:
    """Whether every stage fits into memory, without the messages of codecs."""
    kept = states[batch.micro_batches > 1]
    return all(always + working <= room for always, working in zip(kept, batch.working, strict=True))


def _bucket_bytes(job: TrainingJob, mesh: Factor, parameters: int) -> int:
    """The bucket size in bytes, a power of two.

    It is large enough that latency is a fifth of a bucket's time across all nodes. It is small enough that the last
    bucket, which nothing hides, is at most an eighth of all gradients.
    """
    local, nodes = mesh.local, mesh.nodes
    if nodes == 1:
        return _SMALLEST_BUCKET
    sent = 1 << 20
    latency, whole = (job.rates.hop(Kind.ALL_GATHER, Scope.ACROSS, nodes, size, encoded=False) for size in (1, sent))
    per_byte = (whole - latency) / sent
    wanted = 4 * latency / per_byte / (nodes - 1) * nodes * local  # each rank sends only its share of a bucket
    largest = min(_LARGEST_BUCKET, ITEMSIZE[job.compute_dtype] * parameters // 8)
    return 1 << max(_SMALLEST_BUCKET, min(int(wanted), largest)).bit_length() - 1


@cache
def _codecs(texts: tuple[str, ...]) -> tuple[CodecSpec, ...]:
    return tuple(map(CodecSpec, texts))


def _kinds(job: TrainingJob, plan: Plan) -> list[UnitKind]:
    """A rank's units, grouped by size and by whether they stay gathered."""
    units = job.units(plan)
    kept = default_trace(units).tail
    counts: dict[tuple[int, bool], int] = {}
    for index, unit in enumerate(units):
        key = sum(buffer.numel for buffer in unit.buffers), index in kept
        counts[key] = counts.get(key, 0) + 1
    return [UnitKind(count, numel, stays) for (numel, stays), count in counts.items()]
