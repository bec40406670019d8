"""Exhaustive search: every valid plan is estimated, the best are simulated until none that is left can win.

An estimate is what a plan's busiest resource has to do, so no step is shorter. Plans are simulated in the order of
their estimates, and the search ends when the best simulated time is within the model's resolution of the next estimate:
no plan of the whole space is better by more than that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from thinwire.cost import Busy, Memory, NominalRates, Pricer, Traffic, UnitKind, memory, working_memory
from thinwire.plan.job import CODEC_LEVELS, Candidate, Job
from thinwire.plan.rules import Chain, chain_ends, knobs, secondaries
from thinwire.program import Kind, Scope, default_trace
from thinwire.program.wire import ITEMSIZE
from thinwire.sim import simulate
from thinwire.spec import ClusterSpec, CodecSpec, Factor, Plan

__all__ = ["CLASSICS", "RESOLUTION", "Search", "Searched", "candidate", "elsewhere", "search"]

CLASSICS = ("zero1", "zero2", "zero3", "mics", "zeropp")
"""Presets that every table shows, so that one sees what is gained."""

RESOLUTION = 0.01
"""The search is complete when no plan that was not simulated can be better by more."""

MOST_BLOCKS = 1200
"""Blocks that are simulated at most, over all plans: about a third of a second. Beyond that the answer says that others
might still win."""

_SMALLEST_BUCKET, _LARGEST_BUCKET = 4 << 20, 256 << 20

_WIRE = ("gather", "reduce_intra", "reduce_inter", "spread")


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan before it is written out.

    Attributes:
        bound: seconds that its step takes at least.
        knobs: codecs, secondary shard and recomputation that it uses.
        chain: factors.
        secondary: of the secondary shard.
        codecs: of gather, reduce_intra, reduce_inter and spread.
        micro_batch: sequences.
        recompute: whether blocks are recomputed.
    """

    bound: float
    knobs: int
    chain: Chain
    secondary: Factor | None
    codecs: tuple[str, ...]
    micro_batch: int
    recompute: bool


@dataclass(frozen=True)
class Searched:
    """What a search found.

    Attributes:
        candidates: simulated plans that fit, best first; ties within the job's own go to fewer knobs.
        classics: the classic systems, each with its best micro-batch and recomputation; some may not fit.
        considered: plans that were estimated.
        fitting: of these, how many fit into memory.
        simulated: how many were simulated.
        complete: whether no plan that was not simulated can be better.
    """

    candidates: tuple[Candidate, ...]
    classics: tuple[Candidate, ...]
    considered: int
    fitting: int
    simulated: int
    complete: bool


def search(job: Job, *, top: int = 10) -> Searched:
    """The best plans for a job.

    Args:
        job: model, cluster, batch and what is allowed.
        top: how many to simulate at least, where so many fit.
    """
    return Search(job).run(top)


def candidate(job: Job, plan: Plan, label: str | None = None) -> Candidate:
    """A plan as it stands, priced.

    Args:
        job: what it is for.
        plan: with its micro-batch, micro-batches and recomputation.
        label: what to call it.
    """
    workload = job.workload(plan)
    simulated = simulate(plan, workload, job.rates, micro_batches=plan.micro_batches)
    needed = _memory(job, plan)
    return Candidate(plan, simulated, needed, needed.total <= job.cluster.memory, label)


def elsewhere(job: Job, cluster: ClusterSpec, **changes: Any) -> Job:
    """A job on another cluster, with other changes: published figures become that cluster's, a profile stays."""
    nominal = isinstance(job.rates, NominalRates)
    rates = NominalRates(cluster, job.compute_dtype) if nominal else job.rates
    return replace(job, cluster=cluster, rates=rates, **changes)


def _memory(job: Job, plan: Plan) -> Memory:
    return memory(job.model, plan, job.units(plan), seq=job.seq, overhead=job.overhead, touched_only=job.on_host)


class Search:
    """The search, in parts: estimates, memory, simulation.

    Args:
        job: model, cluster, batch and what is allowed.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.bucket_bytes = _bucket_bytes(job)
        self._base = Plan(
            mesh=job.mesh,
            params=Factor(),
            grads=Factor(),
            optimizer=Factor(),
            compute_dtype=job.compute_dtype,
            bucket_bytes=self.bucket_bytes,
        )
        self._kinds = _kinds(job, self._base)
        self._units = units = job.units(self._base)
        named = [unit for unit in default_trace(units).needed if units[unit].name]
        self._first = tuple(sum(buffer.numel for buffer in units[unit].buffers) for unit in named[:2])
        self._parameters = sum(kind.count * kind.numel for kind in self._kinds)
        self._pricer = Pricer(job.rates, job.compute_dtype, self._base.effective_reduce_dtype)
        self._batches = [
            _Batch(
                size,
                count,
                recompute,
                self._computing(size, count, recompute=recompute),
                self._working(size, recompute=recompute),
            )
            for size, count in job.batches
            for recompute in job.recomputes
        ]
        self.considered = 0

    def run(self, top: int) -> Searched:
        """Estimate all, simulate the best."""
        drafts = sorted(self.drafts(), key=lambda draft: (draft.bound, draft.knobs))
        simulated: dict[Draft, Candidate] = {}
        best = float("inf")
        complete, most = True, max(top, 16 + MOST_BLOCKS // self.job.model.layers)
        for draft in drafts:
            if len(simulated) >= top and draft.bound * (1 + RESOLUTION) > best:
                break
            if len(simulated) >= most:
                complete = False
                break
            if self._fits(draft):
                simulated[draft] = candidate(self.job, self.plan(draft))
                best = min(best, simulated[draft].seconds)
        # The plainest plans that may tie with the best.
        tying = (
            draft
            for draft in drafts
            if draft.bound <= best * (1 + self.job.tie) and draft not in simulated and self._fits(draft)
        )
        for draft in sorted(tying, key=lambda draft: (draft.knobs, draft.bound))[:top]:
            simulated[draft] = candidate(self.job, self.plan(draft))
        return Searched(
            tuple(_ranked(list(simulated.values()), self.job.tie)),
            tuple(self.classics()),
            considered=self.considered,
            fitting=len(drafts),
            simulated=len(simulated),
            complete=complete,
        )

    def _fits(self, draft: Draft) -> bool:
        """Whether a draft fits into memory with the messages of its codecs."""
        return _memory(self.job, self.plan(draft)).total <= self.job.cluster.memory

    def drafts(self) -> Iterator[Draft]:
        """Every valid plan that fits into memory without codecs, with its estimate."""
        job, room = self.job, self.job.cluster.memory
        # a (+) b = max(a, b) + (gamma - 1) min(a, b): what computation and transfers take together, at best.
        slowing, strided = job.rates.least_slowing - 1, job.cluster.links.spine is not None
        for params, optimizer in chain_ends(job.mesh):
            update = job.rates.update(self._parameters // optimizer.ranks)
            for secondary in secondaries(job.mesh, params):
                # Cutting G like OS saves memory and never time: only where it does not fit otherwise.
                for grads in dict.fromkeys((params, optimizer)):
                    chain = (params, grads, optimizer)
                    traffic = Traffic.of(job.mesh, *chain, secondary, strided=strided)
                    choices = list(self._communication(traffic))
                    self.considered += len(choices) * len(self._batches)
                    states = self._states(chain, secondary)
                    fitting = [batch for batch in self._batches if states + batch.working <= room]
                    for batch in fitting:
                        extra = batch.recompute + (secondary is not None)
                        for choice in choices:
                            busy = choice.once.plus(choice.every, batch.micro_batches)
                            computing = batch.computing + update + busy.codec
                            beside = slowing * min(computing, busy.transferring - choice.exposed)
                            bound = max(computing + beside + choice.exposed, busy.transferring)
                            yield Draft(
                                bound,
                                choice.knobs + extra,
                                chain,
                                secondary,
                                choice.codecs,
                                batch.micro_batch,
                                batch.recompute,
                            )
                    if len(fitting) == len(self._batches):
                        break

    def plan(self, draft: Draft) -> Plan:
        """The plan of a draft, written out."""
        params, grads, optimizer = draft.chain
        return self._base.with_(
            params=params,
            grads=grads,
            optimizer=optimizer,
            secondary=draft.secondary,
            micro_batch=draft.micro_batch,
            micro_batches=self.job.sequences // draft.micro_batch,
            recompute=draft.recompute,
            wire={name: codec for name, codec in zip(_WIRE, draft.codecs, strict=True) if codec != "none"},
        )

    def classics(self) -> Iterator[Candidate]:
        """Every classic system with the micro-batch and recomputation that suit it best."""
        mesh = self.job.mesh
        for name in CLASSICS:
            preset = Plan.preset(
                name,
                nodes=mesh.nodes,
                local=mesh.local,
                compute_dtype=self.job.compute_dtype,
                bucket_bytes=self.bucket_bytes,
            )
            yield self.best_batch(preset, name)

    def best_batch(self, plan: Plan, label: str) -> Candidate:
        """A plan with the micro-batch and recomputation that make it fastest, or smallest if nothing fits."""
        states = self._states((plan.params, plan.grads, plan.optimizer), plan.secondary)
        fitting = [batch for batch in self._batches if states + batch.working <= self.job.cluster.memory]
        tried = sorted(fitting, key=lambda batch: batch.computing)[:2] if fitting else []
        if not tried:
            tried = [min(self._batches, key=lambda batch: batch.working)]
        found = [
            candidate(
                self.job,
                plan.with_(micro_batch=batch.micro_batch, micro_batches=batch.micro_batches, recompute=batch.recompute),
                label,
            )
            for batch in tried
        ]
        return min(found, key=lambda c: c.seconds)

    def smallest(self) -> Candidate:
        """The plan that needs least memory; where several do, the one with least sharding."""
        batch = min(self._batches, key=lambda batch: batch.working)
        chains = [(params, optimizer, optimizer) for params, optimizer in chain_ends(self.job.mesh)]
        chain = min(chains, key=lambda chain: self._states(chain, None))
        draft = Draft(0.0, 0, chain, None, ("none",) * len(_WIRE), batch.micro_batch, batch.recompute)
        return candidate(self.job, self.plan(draft))

    # -- parts of estimates ------------------------------------------------------------------------------------------

    def _communication(self, traffic: Traffic) -> Iterator[_Communication]:
        """Every choice of codecs that makes a difference."""
        level = CODEC_LEVELS[self.job.codecs]
        reductions = [mesh for mesh in (traffic.params, traffic.shard, traffic.replica) if mesh]
        used = (
            traffic.params is not None,
            any(mesh.local > 1 for mesh in reductions),
            any(mesh.nodes > 1 for mesh in reductions),
            traffic.shard is not None,
        )
        choices = [level[name] if needed else ("none",) for name, needed in zip(_WIRE, used, strict=True)]
        gathers, spreads = [_codecs(texts) for texts in (choices[0], choices[3])]
        pricer, kinds, first = self._pricer, self._kinds, self._first
        gathered = [(pricer.gathers(traffic, kinds, c), pricer.first_gathers(traffic, first, c)) for c in gathers]
        spread = [(pricer.spread(traffic, kinds, c), pricer.first_spread(traffic, first[0], c)) for c in spreads]
        for intra, inter in itertools.product(_codecs(choices[1]), _codecs(choices[2])):
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

    def _computing(self, micro_batch: int, micro_batches: int, *, recompute: bool) -> float:
        """Seconds of forward and backward of one step."""
        plan, rates, seq = self._base.with_(micro_batch=micro_batch), self.job.rates, self.job.seq
        total = 0.0
        for part in self.job.parts(plan):
            forward = rates.forward(part, plan, seq)
            total += forward + rates.backward(part, plan, seq) + (forward if recompute and part.kind == "block" else 0)
        return micro_batches * total + rates.step

    def _working(self, micro_batch: int, *, recompute: bool) -> int:
        """Bytes that depend on the batch, and the overhead."""
        plan = self._base.with_(micro_batch=micro_batch, recompute=recompute)
        return working_memory(self.job.model, plan, seq=self.job.seq) + self.job.overhead

    def _states(self, chain: Chain, secondary: Factor | None) -> int:
        """Bytes that do not depend on the batch."""
        params, grads, optimizer = chain
        plan = self._base.with_(params=params, grads=grads, optimizer=optimizer, secondary=secondary)
        # Padding depends on the world alone, so that all plans have the same units, cut evenly.
        needed = memory(
            self.job.model,
            plan,
            self._units,
            seq=1,
            overhead=0,
            touched_only=self.job.on_host,
            share=self._parameters // optimizer.ranks,
        )
        return needed.total - needed.activations - needed.logits


@dataclass(frozen=True, slots=True)
class _Communication:
    """A choice of codecs, and what it costs in each micro-batch, in each step, and out in the open."""

    codecs: tuple[str, ...]
    knobs: int
    every: Busy
    once: Busy
    exposed: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """A choice of batch, and what it costs."""

    micro_batch: int
    micro_batches: int
    recompute: bool
    computing: float
    working: int


def _bucket_bytes(job: Job) -> int:
    """A power of two: so large that a bucket's latency across all nodes is a fifth of its time, so small that the last
    one, which nothing hides, is an eighth of all gradients at most."""
    local, nodes = job.mesh.local, job.mesh.nodes
    if nodes == 1:
        return _SMALLEST_BUCKET
    sent = 1 << 20
    latency, whole = (job.rates.hop(Kind.ALL_GATHER, Scope.ACROSS, nodes, size, encoded=False) for size in (1, sent))
    per_byte = (whole - latency) / sent
    wanted = 4 * latency / per_byte / (nodes - 1) * nodes * local  # each rank sends its share of a bucket
    largest = min(_LARGEST_BUCKET, ITEMSIZE[job.compute_dtype] * job.model.parameters // 8)
    return 1 << max(_SMALLEST_BUCKET, min(int(wanted), largest)).bit_length() - 1


@cache
def _codecs(texts: tuple[str, ...]) -> tuple[CodecSpec, ...]:
    return tuple(map(CodecSpec, texts))


def _kinds(job: Job, plan: Plan) -> list[UnitKind]:
    """The model's units, those that are alike together."""
    units = job.units(plan)
    kept = default_trace(units).tail
    found: dict[tuple[int, bool], int] = {}
    for index, unit in enumerate(units):
        key = sum(buffer.numel for buffer in unit.buffers), index in kept
        found[key] = found.get(key, 0) + 1
    return [UnitKind(count, numel, stays) for (numel, stays), count in found.items()]


def _ranked(found: list[Candidate], tie: float) -> list[Candidate]:
    """Best first; the first place goes to the plan with the fewest knobs among those that tie with the best."""
    by_time = sorted((c for c in found if c.fits), key=lambda c: (c.seconds, knobs(c.plan)))
    if not by_time:
        return []
    tied = [c for c in by_time if c.seconds <= by_time[0].seconds * (1 + tie)]
    first = min(tied, key=lambda c: (knobs(c.plan), c.seconds))
    return [first, *(c for c in by_time if c is not first)]
