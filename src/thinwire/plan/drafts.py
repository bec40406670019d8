"""Closed-form estimates of every valid plan: drafts, with the seconds that a step takes at least.

One :class:`Drafts` is for one cut of the model: so many tensor-parallel ranks and pipeline stages. Within it, plans
differ in factors, codecs and batches, and what they cost adds up from parts that are priced once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from thinwire.cost import Busy, Pricer, Rates, Traffic, UnitKind, memory, working_memory
from thinwire.cost.memory import Stage, demanding_stages, held_units, stage_model, stages
from thinwire.plan.rules import Chain, Cut, chain_ends, secondaries
from thinwire.plan.training_job import CODEC_LEVELS, TrainingJob
from thinwire.program import Kind, Scope, default_trace
from thinwire.program.wire import ITEMSIZE
from thinwire.sim import Workload
from thinwire.sim.axes import HopCalls, TensorParallelRates, idle_seconds, message_seconds, sent_seconds
from thinwire.spec import CodecSpec, Factor, Plan

__all__ = ["BatchChoice", "PlanDraft", "Drafts", "axis_rates", "fits", "stage_message"]

_SMALLEST_BUCKET, _LARGEST_BUCKET = 4 << 20, 256 << 20

_WIRE = ("gather", "reduce_intra", "reduce_inter", "spread", "tp", "pp")


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A plan before it is written out.

    Attributes:
        bound: seconds that its step takes at least.
        knobs: codecs, secondary shard, recomputation and further axes that it uses.
        cut: tensor and pipeline parallelism.
        chain: factors.
        secondary: of the secondary shard.
        codecs: of gather, reduce_intra, reduce_inter, spread, tp and pp.
        micro_batch: sequences.
        recompute: whether blocks are recomputed.
    """

    bound: float
    knobs: int
    cut: Cut
    chain: Chain
    secondary: Factor | None
    codecs: tuple[str, ...]
    micro_batch: int
    recompute: bool


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A choice of batch and of the codecs of activations, and what it costs.

    Attributes:
        micro_batch: sequences.
        micro_batches: of a step.
        recompute: whether blocks are recomputed.
        codecs: of tp and pp.
        computing: seconds of forward and backward, with sums over tensor-parallel ranks.
        standing: seconds that a pipeline stands still.
        working: bytes that depend on the batch, of every stage that may need most, and the overhead.
    """

    micro_batch: int
    micro_batches: int
    recompute: bool
    codecs: tuple[str, str]
    computing: float
    standing: float
    working: tuple[int, ...]

    @property
    def knobs(self) -> int:
        """That it turns."""
        return self.recompute + sum(codec != "none" for codec in self.codecs)


@dataclass(frozen=True, slots=True)
class _Communication:
    """A choice of codecs, and what it costs in each micro-batch, in each step, and out in the open."""

    codecs: tuple[str, ...]
    knobs: int
    every: Busy
    once: Busy
    exposed: float


def axis_rates(job: TrainingJob, plan: Plan) -> Rates:
    """The job's rates, with the sums over a plan's tensor-parallel ranks."""
    if plan.tp == 1:
        return job.rates
    calls = HopCalls(job.rates)
    return TensorParallelRates(job.rates, calls, plan.tp, job.model.hidden, ITEMSIZE[plan.compute_dtype])


def stage_message(job: TrainingJob, plan: Plan) -> float:
    """Seconds of sending a micro-batch from one stage to the next; every tensor-parallel rank sends its tokens."""
    calls, crosses = HopCalls(job.rates), job.cluster.nodes > 1
    return sent_seconds(
        plan, job.seq, job.model.hidden, job.rates, calls, crosses=crosses, sharers=plan.tp, gathered=False
    )


class Drafts:
    """All plans of one cut.

    Args:
        job: model, cluster, batch and what is allowed.
        cut: tensor and pipeline parallelism.
        pricer: of collectives.

    Attributes:
        considered: plans that :meth:`drafts` has gone through.
        fitting: of these, how many fit into memory without codecs, and need not take longer than the limit.
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
        self._stages = [(stage, held_units(stage_model(job.model, stage.blocks), self._base, stage))
                        for stage in self._demanding(1)]  # fmt: skip
        self._pricer = pricer
        self.batches = list(self._all_batches())
        self.considered = self.fitting = 0

    def drafts(self, limit: float = math.inf) -> Iterator[PlanDraft]:
        """Every valid plan that fits into memory without codecs, with its estimate; none that takes longer than a limit
        is missing a faster one.

        Args:
            limit: seconds beyond which no plan is of interest; some of those that take longer may be missing.
        """
        job, room = self.job, self.job.cluster.memory
        # a (+) b = max(a, b) + (gamma - 1) min(a, b): what computation and transfers take together, at best.
        slowing, strided = job.rates.least_slowing - 1, job.cluster.links.spine is not None
        promising = [batch for batch in self.batches if batch.computing + batch.standing <= limit]
        for params, optimizer in chain_ends(self.mesh):
            if self.cut.pp > 1 and params.ranks > 1:  # every micro-batch would gather them anew
                continue
            update = job.rates.update(self._parameters // optimizer.ranks)
            for secondary in secondaries(self.mesh, params):
                # Cutting G like OS saves memory and never time: only where it does not fit otherwise.
                for grads in dict.fromkeys((params, optimizer)):
                    chain = (params, grads, optimizer)
                    traffic = Traffic.of(self.mesh, *chain, secondary, strided=strided)
                    levels = self._levels(traffic)
                    count = math.prod(map(len, levels))
                    self.considered += count * len(self.batches)
                    if not promising:
                        continue
                    states = self.states(chain, secondary)
                    fitting = [batch for batch in promising if fits(states, batch, room)]
                    self.fitting += count * len(fitting)
                    choices = list(self._communication(traffic, levels)) if fitting else []
                    for batch in fitting:
                        extra = batch.knobs + (secondary is not None) + self.cut.knobs
                        for choice in choices:
                            busy = choice.once.plus(choice.every, batch.micro_batches)
                            computing = batch.computing + update + busy.codec
                            beside = slowing * min(computing, busy.transferring - choice.exposed)
                            # What is exposed includes its sending.
                            besides = max(beside + choice.exposed, busy.sending)
                            bound = max(computing + besides, busy.transferring) + batch.standing
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
        """The plan of a draft, written out."""
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

    def smallest(self) -> PlanDraft:
        """The plan that needs least memory; where several do, the one with least sharding."""
        batch = min(self.batches, key=lambda batch: max(batch.working))
        chains = [
            (params, optimizer, optimizer)
            for params, optimizer in chain_ends(self.mesh)
            if self.cut.pp == 1 or params.ranks == 1
        ]
        chain = min(chains, key=lambda chain: max(self.states(chain, None)))
        codecs = ("none",) * len(_WIRE)
        return PlanDraft(0.0, 0, self.cut, chain, None, codecs, batch.micro_batch, batch.recompute)

    def states(self, chain: Chain, secondary: Factor | None) -> tuple[int, ...]:
        """Bytes that do not depend on the batch, of every stage that may need most."""
        params, grads, optimizer = chain
        plan = self._base.with_(params=params, grads=grads, optimizer=optimizer, secondary=secondary)
        found = []
        for stage, held in self._stages:
            # Padding depends on the world alone, so that all plans have the same units, cut evenly.
            numel = sum(buffer.numel for unit in held for buffer in unit.buffers)
            model, share = stage_model(self.job.model, stage.blocks), numel // optimizer.ranks
            needed = memory(
                model, plan, held, seq=1, overhead=0, touched_only=self.job.on_host, share=share
            )  # fmt: skip
            found.append(needed.total - needed.activations - needed.logits)
        return tuple(found)

    # -- batches -----------------------------------------------------------------------------------------------------

    def _all_batches(self) -> Iterator[BatchChoice]:
        level = CODEC_LEVELS[self.job.codecs]
        axes = [level[axis] if ways > 1 else ("none",) for axis, ways in (("tp", self.cut.tp), ("pp", self.cut.pp))]
        for size, count in self.job.batches(self.cut):
            for recompute in self.job.recomputes:
                working = self._working(size, count, recompute=recompute)
                for tp, pp in itertools.product(*axes):
                    plan = self._base.with_(
                        micro_batch=size, micro_batches=count, recompute=recompute, wire={"tp": tp, "pp": pp}
                    )
                    computing, standing = self._computing(plan), self._standing(plan)
                    yield BatchChoice(size, count, recompute, (tp, pp), computing, standing, working)

    def _computing(self, plan: Plan) -> float:
        """Seconds of forward and backward of one step."""
        rates, seq = axis_rates(self.job, plan), self.job.seq
        total = 0.0
        for part in self.job.parts(plan):
            forward = rates.forward(part, plan, seq)
            again = forward if plan.recompute and part.kind == "block" else 0.0
            total += forward + rates.backward(part, plan, seq) + again
        return plan.micro_batches * total + rates.step

    def _standing(self, plan: Plan) -> float:
        """Seconds that a pipeline stands still."""
        if plan.pp == 1:
            return 0.0
        message, rates = stage_message(self.job, plan), axis_rates(self.job, plan)
        work = Workload(self.job.parts(plan), (), self.job.seq)
        return idle_seconds(plan, work, rates, message) + message_seconds(plan, message)

    def _demanding(self, micro_batches: int) -> list[Stage]:
        return demanding_stages(stages(self.job.model.layers, self._base.with_(micro_batches=micro_batches)))

    def _working(self, micro_batch: int, micro_batches: int, *, recompute: bool) -> tuple[int, ...]:
        plan = self._base.with_(micro_batch=micro_batch, micro_batches=micro_batches, recompute=recompute)
        model, seq, overhead = self.job.model, self.job.seq, self.job.overhead
        return tuple(
            working_memory(model, plan, seq=seq, stage=stage) + overhead for stage in self._demanding(micro_batches)
        )

    # -- communication -----------------------------------------------------------------------------------------------

    def _levels(self, traffic: Traffic) -> list[tuple[str, ...]]:
        """Codecs that make a difference, by field of ``wire``, those of activations left out."""
        level = CODEC_LEVELS[self.job.codecs]
        reductions = [mesh for mesh in (traffic.params, traffic.shard, traffic.replica) if mesh]
        used = (
            traffic.params is not None,
            any(mesh.local > 1 for mesh in reductions),
            any(mesh.nodes > 1 for mesh in reductions),
            traffic.shard is not None,
        )
        return [level[name] if needed else ("none",) for name, needed in zip(_WIRE[:4], used, strict=True)]

    def _communication(self, traffic: Traffic, levels: list[tuple[str, ...]]) -> Iterator[_Communication]:
        """Every choice of codecs, priced."""
        gathers, intras, inters, spreads = map(_codecs, levels)
        pricer, kinds, first = self._pricer, self._kinds, self._first
        gathered = [(pricer.gathers(traffic, kinds, c), pricer.first_gathers(traffic, first, c)) for c in gathers]
        spread = [(pricer.spread(traffic, kinds, c), pricer.first_spread(traffic, first[0], c)) for c in spreads]
        for intra, inter in itertools.product(intras, inters):
            every, last = pricer.reductions(traffic, kinds, intra, inter, self.bucket_bytes)
            reduced = pricer.last_reductions(traffic, first, intra, inter, self.bucket_bytes)
            for (gather, (gathering, before)), (after, (spreading, at_first)) in itertools.product(
                zip(gathers, gathered, strict=True), zip(spreads, spread, strict=True)
            ):
                codecs = (gather, intra, inter, after)
                yield _Communication(
                    tuple(map(str, codecs)),
                    sum(not codec.is_none for codec in codecs),
                    every.plus(gathering),
                    last.plus(spreading),
                    before + reduced + at_first,
                )


def fits(states: tuple[int, ...], batch: BatchChoice, room: int) -> bool:
    """Whether every stage fits, codecs left out."""
    return all(kept + working <= room for kept, working in zip(states, batch.working, strict=True))


def _bucket_bytes(job: TrainingJob, mesh: Factor, parameters: int) -> int:
    """A power of two: so large that a bucket's latency across all nodes is a fifth of its time, so small that the last
    one, which nothing hides, is an eighth of all gradients at most."""
    local, nodes = mesh.local, mesh.nodes
    if nodes == 1:
        return _SMALLEST_BUCKET
    sent = 1 << 20
    latency, whole = (job.rates.hop(Kind.ALL_GATHER, Scope.ACROSS, nodes, size, encoded=False) for size in (1, sent))
    per_byte = (whole - latency) / sent
    wanted = 4 * latency / per_byte / (nodes - 1) * nodes * local  # each rank sends its share of a bucket
    largest = min(_LARGEST_BUCKET, ITEMSIZE[job.compute_dtype] * parameters // 8)
    return 1 << max(_SMALLEST_BUCKET, min(int(wanted), largest)).bit_length() - 1


@cache
def _codecs(texts: tuple[str, ...]) -> tuple[CodecSpec, ...]:
    return tuple(map(CodecSpec, texts))


def _kinds(job: TrainingJob, plan: Plan) -> list[UnitKind]:
    """A rank's units, those that are alike together."""
    units = job.units(plan)
    kept = default_trace(units).tail
    found: dict[tuple[int, bool], int] = {}
    for index, unit in enumerate(units):
        key = sum(buffer.numel for buffer in unit.buffers), index in kept
        found[key] = found.get(key, 0) + 1
    return [UnitKind(count, numel, stays) for (numel, stays), count in found.items()]
