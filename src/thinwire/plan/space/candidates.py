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

import numpy as np
import numpy.typing as npt

from thinwire.cost import GroupShape, Pricer, ProcessGroups
from thinwire.plan.rules import Chain, chain_ends, secondaries
from thinwire.plan.space.batches import BatchChoice, Batches
from thinwire.plan.space.bounds import Array, Computation, least_seconds
from thinwire.plan.space.state_bytes import StateBytes
from thinwire.plan.space.traffic import WIRE, TrafficSeconds, UnitSizes
from thinwire.plan.training_job import TrainingJob
from thinwire.program import NORM_BYTES, Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import Factor, Plan
from thinwire.spec.cut import Cut

_SMALLEST_BUCKET, _LARGEST_BUCKET = 4 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan in compact form, with a lower bound of its step time.

    Attributes:
        bound: Lower bound of the step time in seconds.
        cut: Tensor and pipeline parallelism.
        chain: Factors of ``P``, ``G`` and ``OS``.
        secondary: Factor of the secondary shard; ``None`` without one.
        codecs: Codecs of gather, reduce_intra, reduce_inter, spread, tp and pp, in this order.
        micro_batch: Sequences per micro-batch.
        recompute: Whether blocks are recomputed in the backward.
    """

    bound: float
    cut: Cut
    chain: Chain
    secondary: Factor | None
    codecs: tuple[str, ...]
    micro_batch: int
    recompute: bool


@dataclass(frozen=True)
class CandidateGroup:
    """All plans with the same factors that fit into memory without codecs.

    Attributes:
        cut: Tensor and pipeline parallelism.
        chain: Factors of ``P``, ``G`` and ``OS``.
        secondary: Factor of the secondary shard; ``None`` without one.
        batches: Choices of the batch.
        codecs: Choices of codecs of gather, reduce_intra, reduce_inter and spread.
        bounds: Lower bounds of steps in seconds, shape ``(batches, codecs)``.
        complexity: Numbers of knobs, of the same shape.
    """

    cut: Cut
    chain: Chain
    secondary: Factor | None
    batches: Sequence[BatchChoice]
    codecs: Sequence[tuple[str, ...]]
    bounds: Array
    complexity: npt.NDArray[np.int64]

    def candidate(self, number: int) -> Candidate:
        """The candidate at a place of the flattened arrays."""
        which, choice = divmod(number, len(self.codecs))
        batch = self.batches[which]
        return Candidate(
            float(self.bounds[which, choice]),
            self.cut,
            self.chain,
            self.secondary,
            self.codecs[choice] + batch.codecs,
            batch.plan.micro_batch,
            batch.plan.recompute,
        )


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
        self._base = base.trusted(bucket_bytes=self.bucket_bytes)
        self.states = StateBytes(job, self._base)
        self._pricer = pricer
        self.batches = Batches(job, cut, self._base)
        self.considered = self.fitting = 0

    # A search for the plan of the least memory needs none of these three.
    @cached_property
    def _units(self) -> UnitSizes:
        return UnitSizes.of(self.job, self._base)

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
        for params, optimizer in chain_ends(self.mesh):
            if self.cut.pp > 1 and params.ranks > 1:  # every micro-batch would gather the parameters again
                continue
            closer = secondaries(self.mesh, params)
            # Without a secondary shard, and with G cut like OS, plans need the least memory.
            rows = self.states.fitting((params, optimizer, optimizer), None, promising)
            within = [promising[row] for row in rows]
            if not within or (len(closer) > 1 and self._hopeless((params, params, optimizer), within, limit)):
                count = self._traffic.count(self._groups_of((params, params, optimizer), None))
                self.considered += len(closer) * len({params, optimizer}) * count * len(self.batches.choices)
                continue
            yield from self._groups_between((params, optimizer), closer, within, complete=len(promising))

    def _groups_between(
        self,
        ends: tuple[Factor, Factor],
        closer: Sequence[Factor | None],
        batches: Sequence[BatchChoice],
        *,
        complete: int,
    ) -> Iterator[CandidateGroup]:
        """The plans with these factors of ``P`` and ``OS``, with each secondary shard, that fit into memory.

        Args:
            ends: The factors of ``P`` and ``OS``.
            closer: Factors of the secondary shard.
            batches: Choices of the batch that may fit.
            complete: Number of batches that leave nothing to try.
        """
        params, optimizer = ends
        found: list[tuple[Factor, Factor | None, list[int]]] = []
        of_grads: dict[Factor, list[Factor | None]] = {}
        for secondary in closer:
            # Cutting G like OS saves memory but never time: it is tried only if G cut like P does not always fit.
            for grads in dict.fromkeys((params, optimizer)):
                chain = params, grads, optimizer
                rows = self.states.fitting(chain, secondary, batches)
                count = self._traffic.count(self._groups_of(chain, None))
                self.considered += count * len(self.batches.choices)
                self.fitting += count * len(rows)
                if rows:
                    found.append((grads, secondary, rows))
                    of_grads.setdefault(grads, []).append(secondary)
                if len(rows) == complete:
                    break
        priced = {grads: self._priced((params, grads, optimizer), each, batches) for grads, each in of_grads.items()}
        for grads, secondary, rows in found:
            codecs, complexity, bounds = priced[grads]
            fitting = [batches[row] for row in rows]
            more = (secondary is not None) + self.cut.complexity
            extra = np.array([[batch.complexity + more] for batch in fitting])
            place = of_grads[grads].index(secondary)
            yield CandidateGroup(
                self.cut,
                (params, grads, optimizer),
                secondary,
                fitting,
                codecs,
                bounds[place, rows],
                complexity + extra,
            )

    def _hopeless(self, chain: Chain, batches: Sequence[BatchChoice], limit: float) -> bool:
        """Whether plans with these factors take longer than the limit even if a secondary shard spares them all gathers
        of the backward."""
        if limit == math.inf:
            return False
        groups = self._groups_of(chain, None)
        _, sent = self._traffic.choices(groups, [GroupShape(1, 1)])
        return bool(least_seconds(self._computation(batches, chain), sent).min() > limit)

    def _priced(
        self, chain: Chain, closer: Sequence[Factor | None], batches: Sequence[BatchChoice]
    ) -> tuple[Sequence[tuple[str, ...]], npt.NDArray[np.int64], Array]:
        """Choices of codecs, their numbers of knobs, ``(1, codecs)``, and bounds of the steps, ``(secondaries, batches,
        codecs)``."""
        groups = self._groups_of(chain, None)
        secondaries = [self._groups_of(chain, secondary).secondary for secondary in closer]
        codecs, sent = self._traffic.choices(groups, secondaries)
        complexity = np.array([[4 - choice.count("none") for choice in codecs]])
        bounds = least_seconds(self._computation(batches, chain), sent)
        return codecs, complexity, bounds.reshape(len(closer), len(batches), len(codecs))

    def _groups_of(self, chain: Chain, secondary: Factor | None) -> ProcessGroups:
        strided = bool(self.job.cluster.links.spine or self.job.cluster.groups)
        return ProcessGroups.of(self.mesh, *chain, secondary, strided=strided)

    def _computation(self, batches: Sequence[BatchChoice], chain: Chain) -> Computation:
        """Seconds of computation of these batches."""
        job, (params, _, optimizer) = self.job, chain
        before = self._units.before_reductions(params.ranks, self.bucket_bytes)

        def column(seconds: Iterable[float]) -> Array:
            return np.array([[[[each]]] for each in seconds], dtype=np.float64)

        return Computation(
            count=column(batch.plan.micro_batches for batch in batches),
            forward=column(batch.forward for batch in batches),
            entrance=column(batch.parts["embedding"][0] for batch in batches),
            backward=column(batch.backward for batch in batches),
            before=column(sum(batch.parts[kind][1] for kind in before) for batch in batches),
            bubble=column(batch.bubble for batch in batches),
            update=job.rates.update(self._parameters // optimizer.ranks),
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

    def plan(self, candidate: Candidate) -> Plan:
        """The full plan of a candidate."""
        params, grads, optimizer = candidate.chain
        return self._base.with_(
            params=params,
            grads=grads,
            optimizer=optimizer,
            secondary=candidate.secondary,
            micro_batch=candidate.micro_batch,
            micro_batches=self.job.sequences(self.mesh) // candidate.micro_batch,
            recompute=candidate.recompute,
            wire={name: codec for name, codec in zip(WIRE, candidate.codecs, strict=True) if codec != "none"},
        )

    def smallest(self, most: float = math.inf) -> tuple[int, Candidate] | None:
        """The bytes of the plan that needs the least memory, and the plan; among several, the one with the least
        sharding. ``None`` if every plan needs more than ``most``."""
        batch = min(self.batches.sizes, key=lambda batch: max(batch.working))
        chains = [
            (params, optimizer, optimizer)
            for params, optimizer in chain_ends(self.mesh)
            if self.cut.pp == 1 or params.ranks == 1
        ]
        least, best = most, None
        for chain in reversed(chains):  # the most sharded first, which leaves little to try
            if self.states.needed(chain, None, batch, states_alone=True) <= least:
                needed = self.states.needed(chain, None, batch)
                least, best = (needed, chain) if needed <= least else (least, best)
        if best is None:
            return None
        codecs = ("none",) * len(WIRE)
        size, recompute = batch.plan.micro_batch, batch.plan.recompute
        return int(least), Candidate(0.0, self.cut, best, None, codecs, size, recompute)


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
