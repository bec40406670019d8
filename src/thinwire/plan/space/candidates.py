"""Every valid plan in compact form: candidates, each with a lower bound of its step time.

One :class:`Candidates` covers one cut of the model, that is, one number of tensor-parallel ranks and pipeline stages.
Its plans differ in factors, codecs and batches. Those with the same factors form a :class:`CandidateGroup`, whose
bounds are computed at once; :class:`ByBound` brings the candidates of all groups into order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from thinwire.cost import GroupShape, Pricer, ProcessGroups
from thinwire.plan.rules import chain_ends, secondaries
from thinwire.plan.space.batches import BatchChoice, Batches, StateBytes
from thinwire.plan.space.bounds import Array, Computation, least_seconds
from thinwire.plan.space.traffic import WIRE, TrafficSeconds, UnitSizes
from thinwire.plan.training_job import TrainingJob
from thinwire.program import NORM_BYTES, Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import Factor, Plan
from thinwire.spec.cut import Cut

_SMALLEST_BUCKET, _LARGEST_BUCKET = 4 << 20, 256 << 20


FACTORS = ("params", "grads", "optimizer", "secondary")
"""Fields of a plan in which the groups of a cut differ."""


class Candidate(NamedTuple):
    """A plan with a lower bound of its step time in seconds."""

    bound: float
    plan: Plan


@dataclass(frozen=True)
class CandidateGroup:
    """All plans with the same factors that fit into memory without codecs.

    Attributes:
        plan: A plan with these factors.
        batches: Choices of the batch.
        codecs: Choices of codecs, in the order of :data:`WIRE`.
        bounds: Lower bounds of steps in seconds, shape ``(batches, codecs)``.
        complexity: Numbers of knobs, of the same shape.
    """

    plan: Plan
    batches: Sequence[BatchChoice]
    codecs: Sequence[tuple[str, ...]]
    bounds: Array
    complexity: npt.NDArray[np.int64]

    def candidate(self, number: int) -> Candidate:
        """The candidate at a place of the flattened arrays."""
        which, choice = divmod(number, len(self.codecs))
        factors = {name: getattr(self.plan, name) for name in FACTORS}
        wire = {name: codec for name, codec in zip(WIRE, self.codecs[choice], strict=True) if codec != "none"}
        return Candidate(float(self.bounds[which, choice]), self.batches[which].plan.with_(**factors, wire=wire))


class ByBound:
    """The candidates of some groups."""

    def __init__(self, groups: Sequence[CandidateGroup]) -> None:
        self._groups = groups
        sizes = [group.bounds.size for group in groups]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    @cached_property
    def _bounds(self) -> npt.NDArray[np.float64]:
        return np.concatenate([group.bounds.ravel() for group in self._groups] or [np.empty(0)])

    @cached_property
    def _complexity(self) -> npt.NDArray[np.int64]:
        return np.concatenate([group.complexity.ravel() for group in self._groups] or [np.empty(0, dtype=np.int64)])

    def in_order(self) -> Iterator[Candidate]:
        """Yield every candidate, the least bound first; of equal ones, the one with the fewest knobs."""
        yield from map(self._candidate, np.lexsort((self._complexity, self._bounds)))

    def plainest(self, most: float) -> Iterator[Candidate]:
        """Yield every candidate whose bound is at most ``most`` seconds, the one with the fewest knobs first."""
        places = np.flatnonzero(self._bounds <= most)
        yield from map(self._candidate, places[np.lexsort((self._bounds[places], self._complexity[places]))])

    def _candidate(self, place: np.int64) -> Candidate:
        group = int(np.searchsorted(self._ends, place, side="right"))
        return self._groups[group].candidate(int(place) - int(self._ends[group - 1] if group else 0))


class Candidates:
    """All plans of one cut.

    Attributes:
        base: A plan of the cut.
        batches: Choices of the batch.
        states: Bytes of every plan that do not depend on the batch.
        considered: Number of plans that :meth:`groups` has gone through.
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
            pipeline_schedule=cut.schedule,
            residence=job.residences[0],
        )
        self.bucket_bytes = _bucket_bytes(job, self.mesh, sum(part.numel for part in job.parts(base)))
        self.base = base.trusted(bucket_bytes=self.bucket_bytes)
        self.states = StateBytes(job, self.base)
        self._pricer = pricer
        self.batches = Batches(job, cut, self.base)
        self.considered = self.fitting = 0

    # A search for the plan of the least memory needs none of these three.
    @cached_property
    def _units(self) -> UnitSizes:
        return UnitSizes.of(self.job, self.base)

    @cached_property
    def _parameters(self) -> int:
        return sum(kind.count * kind.numel for kind in self._units.kinds)

    @cached_property
    def _traffic(self) -> TrafficSeconds:
        return TrafficSeconds(self.job, self._pricer, self._units, self.bucket_bytes)

    def groups(self, limit: float = math.inf) -> Iterator[CandidateGroup]:
        """Every valid plan that fits into memory without codecs, with a lower bound of its step.

        Args:
            limit: Step time in seconds above which plans are of no interest. Every plan below it is generated; some of
                those above it are not.
        """
        fixed = self._control + self.job.rates.update(self._parameters // self.mesh.ranks)
        promising = [batch for batch in self.batches.choices if batch.computing + batch.bubble + fixed <= limit]
        for params, optimizer in self._ends():
            closer = secondaries(self.mesh, params)
            plans = [
                self.base.trusted(params=params, grads=grads, optimizer=optimizer)
                for grads in dict.fromkeys((params, optimizer))
            ]
            # Without a secondary shard, and with G cut like OS, plans need the least memory.
            within = [promising[row] for row in self.states.fitting(plans[-1], promising)]
            if not within or (len(closer) > 1 and self._hopeless(plans[0], within, limit)):
                count = self._traffic.count(self._groups_of(plans[0]))
                self.considered += len(closer) * len(plans) * count * len(self.batches.choices)
                continue
            yield from self._groups_between(plans, closer, within, complete=len(promising))

    def _ends(self) -> Iterator[tuple[Factor, Factor]]:
        """``P`` and ``OS`` of every chain. Every micro-batch of a pipeline would gather sharded parameters again."""
        return (ends for ends in chain_ends(self.mesh) if self.cut.pp == 1 or ends[0].ranks == 1)

    def _groups_between(
        self, plans: Sequence[Plan], closer: Sequence[Factor | None], batches: Sequence[BatchChoice], *, complete: int
    ) -> Iterator[CandidateGroup]:
        """The plans with the same ``P`` and ``OS``, with each secondary shard, that fit into memory.

        Args:
            plans: Plans with ``G`` cut like ``P``, and like ``OS``.
            closer: Factors of the secondary shard.
            batches: Choices of the batch that may fit.
            complete: Number of batches that leave nothing to try.
        """
        found: dict[Factor, list[tuple[Plan, list[int]]]] = {}
        for secondary in closer:
            # Cutting G like OS saves memory but never time: it is tried only if G cut like P does not always fit.
            for plan in (plan.trusted(secondary=secondary) for plan in plans):
                rows = self.states.fitting(plan, batches)
                count = self._traffic.count(self._groups_of(plan))
                self.considered += count * len(self.batches.choices)
                self.fitting += count * len(rows)
                if rows:
                    found.setdefault(plan.grads, []).append((plan, rows))
                if len(rows) == complete:
                    break
        for each in found.values():
            codecs, sent = self._traffic.choices([self._groups_of(plan) for plan, _ in each])
            bounds = least_seconds(self._computation(batches, each[0][0]), sent)
            bounds = bounds.reshape(len(each), len(batches), len(codecs))
            turned = np.array([[len(WIRE) - choice.count("none") for choice in codecs]])
            for place, (plan, rows) in enumerate(each):
                fitting = [batches[row] for row in rows]
                more = (plan.secondary is not None) + self.cut.complexity
                extra = np.array([[batch.complexity + more] for batch in fitting])
                yield CandidateGroup(plan, fitting, codecs, bounds[place, rows], turned + extra)

    def _hopeless(self, plan: Plan, batches: Sequence[BatchChoice], limit: float) -> bool:
        """Whether plans with these factors take longer than the limit even if a secondary shard spares them all gathers
        of the backward."""
        if limit == math.inf:
            return False
        _, sent = self._traffic.choices([self._groups_of(plan)._replace(secondary=GroupShape(1, 1))])
        return bool(least_seconds(self._computation(batches, plan), sent).min() > limit)

    def _groups_of(self, plan: Plan) -> ProcessGroups:
        return ProcessGroups.of(plan, strided=bool(self.job.cluster.links.spine or self.job.cluster.groups))

    def _computation(self, batches: Sequence[BatchChoice], plan: Plan) -> Computation:
        """Seconds of computation of these batches."""
        job = self.job
        before = self._units.before_reductions(plan.params.ranks, self.bucket_bytes)

        def column(seconds: Iterable[float]) -> Array:
            return np.array([[[[each]]] for each in seconds], dtype=np.float64)

        return Computation(
            count=column(batch.plan.micro_batches for batch in batches),
            forward=column(batch.forward for batch in batches),
            entrance=column(batch.parts["embedding"][0] for batch in batches),
            backward=column(batch.backward for batch in batches),
            before=column(sum(batch.parts[kind][1] for kind in before) for batch in batches),
            bubble=column(batch.bubble for batch in batches),
            update=job.rates.update(self._parameters // plan.optimizer.ranks),
            step=job.rates.handling.step,
            control=self._control,
            clip=job.clip,
            slowing=job.rates.slowing,
        )

    @cached_property
    def _control(self) -> float:
        """Seconds of the exchanges of all ranks at the end of a step; the second one is of the gradient norm."""
        exchanged = (self._units.control, NORM_BYTES) if self.job.clip else (self._units.control,)
        return 0.0 if self.mesh.ranks == 1 else sum(self._pricer.control(self.mesh, nbytes) for nbytes in exchanged)

    def smallest(self, most: float = math.inf) -> tuple[int, Plan] | None:
        """The bytes of the plan that needs the least memory, and the plan; among several, the one with the least
        sharding. ``None`` if every plan needs more than ``most``."""
        batch = min(self.batches.sizes, key=lambda batch: max(batch.working))
        best: tuple[int, Plan] | None = None
        for params, optimizer in reversed([*self._ends()]):  # the most sharded first, which leaves little to try
            plan = batch.plan.trusted(params=params, grads=optimizer, optimizer=optimizer)
            if self.states.needed(plan, batch.working, states_alone=True) <= most:
                needed = self.states.needed(plan, batch.working)
                most, best = (needed, (needed, plan)) if needed <= most else (most, best)
        return best


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
    largest = min(_LARGEST_BUCKET, ITEMSIZE[job.compute_dtype] * parameters // 8)
    # Each rank sends only its share of a bucket. A measured megabyte may take as long as a byte.
    wanted = 4 * latency / per_byte / (nodes - 1) * nodes * local if per_byte > 0 else largest
    return 1 << max(_SMALLEST_BUCKET, min(int(wanted), largest)).bit_length() - 1
