"""Seconds of communication of every choice of codecs, and the units that plans of one cut communicate."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from thinwire.cost import Busy, Pricer, ProcessGroups
from thinwire.plan.space.bounds import Array, Communication, seconds_of
from thinwire.plan.training_job import CODEC_LEVELS, CodecLevel, TrainingJob
from thinwire.program import control_bytes, default_trace
from thinwire.program.batches import grouped
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import CodecSpec, Plan
from thinwire.spec.codec import encodable_dtypes

WIRE = ("gather", "reduce_intra", "reduce_inter", "spread")
"""Fields of ``wire`` in the order of choices of codecs."""


def codec_choices(job: TrainingJob) -> dict[str, tuple[str, ...]]:
    """Codecs of the job's level that encode its compute dtype, by field of ``wire``.

    On GPUs they have fixed length: the host would wait for each message of another, and with it all that is hidden
    behind computation.
    """
    return _encoding(job.codecs, job.compute_dtype, job.rates.on_processors)


@cache
def _encoding(level: CodecLevel, dtype: str, varies: bool) -> dict[str, tuple[str, ...]]:
    def fits(codec: CodecSpec) -> bool:
        return dtype in encodable_dtypes(codec) and (varies or not codec.is_variable_length)

    return {name: tuple(text for text in texts if fits(CodecSpec(text))) for name, texts in CODEC_LEVELS[level].items()}


@cache
def _codecs(texts: tuple[str, ...]) -> tuple[CodecSpec, ...]:
    return tuple(map(CodecSpec, texts))


@dataclass(frozen=True, slots=True)
class _UnitKind:
    """A kind of unit.

    Attributes:
        count: Number of units of this kind.
        numel: Elements of one unit, before padding.
        kept: Whether these units stay gathered between forward and backward.
    """

    count: int
    numel: int
    kept: bool


@dataclass(frozen=True)
class UnitSizes:
    """The units of a rank, which are the same for all plans of a cut.

    Attributes:
        kinds: Units grouped by size and by whether they stay gathered.
        first: Elements of the first block to compute, and of the embedding before it, if that is a unit of its own.
        reduced: Kind of part and elements of every unit, in the order in which gradients are reduced.
        last: Elements of the last unit whose gradients a computation makes.
        itemsize: Bytes of a gradient on the wire.
        control: Bytes of each rank in the exchange at the end of a step.
    """

    kinds: tuple[_UnitKind, ...]
    first: tuple[int, ...]
    reduced: tuple[tuple[str, int], ...]
    last: int
    itemsize: int
    control: int

    @classmethod
    def of(cls, job: TrainingJob, base: Plan) -> UnitSizes:
        """The units of a plan of the cut."""
        units = job.units(base)
        trace = default_trace(units)
        tail = trace.tail
        numels = [sum(buffer.numel for buffer in unit.buffers) for unit in units]
        counts = Counter((numel, index in tail) for index, numel in enumerate(numels))
        names = [part.kind for part in job.parts(base)]
        named = [unit for unit in trace.needed if units[unit].name]
        return cls(
            tuple(_UnitKind(count, numel, stays) for (numel, stays), count in counts.items()),
            tuple(numels[unit] for unit in named[: 2 if names[named[0]] == "embedding" else 1]),
            tuple((names[unit], numels[unit]) for unit in trace.reduction_order),
            next(numels[unit] for unit in reversed(trace.reduction_order) if units[unit].name),
            ITEMSIZE[base.effective_reduce_dtype],
            control_bytes(units),
        )

    def buckets(self, shards: int, bucket_bytes: int) -> list[int]:
        """Elements of every bucket of one of ``shards`` slices of the gradients, in order."""
        return [sum(self.reduced[unit][1] // shards for unit in units) for units in self._grouped(shards, bucket_bytes)]

    def before_reductions(self, shards: int, bucket_bytes: int) -> list[str]:
        """Kinds of the parts whose backward runs before the first reduction."""
        units = (0,) if shards > 1 else self._grouped(shards, bucket_bytes)[0]
        return ["rest", *(self.reduced[unit][0] for unit in units if self.reduced[unit][0] != "rest")]

    def _grouped(self, shards: int, bucket_bytes: int) -> Sequence[tuple[int, ...]]:
        sizes = {unit: numel // shards * self.itemsize for unit, (_, numel) in enumerate(self.reduced)}
        return grouped(sizes, bucket_bytes)


class TrafficSeconds:
    """Prices the communication of plans of one cut, with buckets of so many bytes."""

    def __init__(self, job: TrainingJob, pricer: Pricer, units: UnitSizes, bucket_bytes: int) -> None:
        self._pricer, self._units, self._bucket_bytes = pricer, units, bucket_bytes
        self._level = codec_choices(job)
        self._buckets = cache(self._buckets_of)
        self._apart = cache(self._communication)

    def count(self, groups: ProcessGroups) -> int:
        """Number of choices of codecs."""
        return math.prod(map(len, self._levels(groups)))

    def _levels(self, groups: ProcessGroups) -> list[tuple[str, ...]]:
        """Codecs that make a difference, by field of ``wire``; those of activations are left out."""
        reductions = [mesh for mesh in (groups.params, groups.shard, groups.replica) if mesh]
        used = (
            groups.params is not None,
            any(mesh.local > 1 for mesh in reductions),
            any(mesh.nodes > 1 for mesh in reductions),
            groups.shard is not None,
        )
        return [self._level[name] if needed else ("none",) for name, needed in zip(WIRE, used, strict=True)]

    def choices(self, several: Sequence[ProcessGroups]) -> tuple[list[tuple[str, ...]], Communication]:
        """Every choice of codecs of :data:`WIRE`, and what all of them cost in the groups of some plans, which differ
        in the secondary shard only. Gathers of the backward depend on it."""
        groups = several[0]
        gather, intra, inter, spread = self._levels(groups)
        pricer, gathers = self._pricer, _codecs(gather)
        largest = max((kind.numel for kind in self._units.kinds if not kind.kept), default=0)
        backward = [
            _rows([self._all(pricer.gathered_again, each, codec, kept=False) for codec in gathers]) for each in several
        ]
        one = [_rows([pricer.gathered_again(each, largest, codec) for codec in gathers]) for each in several]
        names: list[tuple[str, ...]] = [
            (of_gather, *pair, of_spread)
            for pair, of_gather, of_spread in itertools.product(itertools.product(intra, inter), gather, spread)
        ]
        return names, replace(
            self._apart(groups._replace(secondary=None, every_micro_batch=False)),
            every=groups.every_micro_batch,
            backward=np.array(backward)[:, None, None, :, None],
            one_gather=np.array(one)[:, None, None, :, None],
        )

    def _communication(self, groups: ProcessGroups) -> Communication:
        """The same as far as it depends neither on the secondary shard nor on when gradients are reduced."""
        gathers, intras, inters, spreads = map(_codecs, self._levels(groups))
        pricer = self._pricer
        reductions = (self._reductions(groups, *pair) for pair in itertools.product(intras, inters))
        scatter, shard, sync, largest, last = zip(*reductions, strict=True)
        nothing = np.zeros((1, 1, 1, 5))
        return Communication(
            forward=_rows([self._all(pricer.gathered, groups, codec) for codec in gathers])[:, None],
            backward=nothing,
            scatter=_rows(scatter)[:, None, None],
            shard=_rows(shard)[:, None, None],
            sync=_rows(sync)[:, None, None],
            spread=_rows([self._all(pricer.spread, groups, codec) for codec in spreads]),
            every=False,
            one_gather=nothing,
            one_reduction=_rows(largest)[:, None, None],
            first_spread=np.array([self._first_spread(groups, codec) for codec in spreads]),
            first_gather=np.array([self._first_gather(groups, codec) for codec in gathers])[:, None],
            last=np.array(last)[:, None, None],
        )

    def _all(self, price: Callable[..., Busy], groups: ProcessGroups, *codecs: CodecSpec, kept: bool = True) -> Busy:
        """Busy seconds of all units, or of those that are freed after their forward, given the price of one."""
        total = Busy()
        for kind in self._units.kinds:
            if kept or not kind.kept:
                total = total.plus(price(groups, kind.numel, *codecs), kind.count)
        return total

    def _first_spread(self, groups: ProcessGroups, codec: CodecSpec) -> float:
        """Seconds of the spread of the first unit, which gathers wait for; without gathers, of all up to a block."""
        units = self._units.first[: 1 if groups.params else 2]
        return _together([self._pricer.spread(groups, numel, codec) for numel in units])

    def _first_gather(self, groups: ProcessGroups, codec: CodecSpec) -> float:
        """Seconds of gathering the units up to the first block."""
        if groups.params is None:
            return 0.0
        return _together([self._pricer.gather(groups.params, numel, codec) for numel in self._units.first])

    def _reductions(
        self, groups: ProcessGroups, intra: CodecSpec, inter: CodecSpec
    ) -> tuple[Busy, Busy, Busy, Busy, float]:
        """Reductions with a choice of codecs: over the ranks of ``P`` of a micro-batch, to the owners of optimizer
        states, and over replicas; the largest of the first two kinds; and seconds after the last gradient until all are
        reduced."""
        pricer = self._pricer
        shards = groups.params.ranks if groups.params else 1
        buckets = self._buckets(shards)
        shard, sync = Busy(), Busy()
        for numel, count in buckets.items():
            shard = shard.plus(pricer.sharded(groups, numel, intra, inter), count)
            sync = sync.plus(pricer.synced(groups, numel, intra, inter), count)
        one = pricer.scattered(groups, max(kind.numel for kind in self._units.kinds), intra, inter)
        last = pricer.scattered(groups, self._units.last, intra, inter).total
        of_last = next(reversed(buckets))
        last += pricer.sharded(groups, of_last, intra, inter).total
        last += pricer.synced(groups, of_last, intra, inter).total
        largest_bucket = pricer.sharded(groups, max(buckets), intra, inter)
        return self._all(pricer.scattered, groups, intra, inter), shard, sync, one.plus(largest_bucket), last

    def _buckets_of(self, shards: int) -> Mapping[int, int]:
        """Number of buckets by elements; the last bucket comes last."""
        *others, last = self._units.buckets(shards, self._bucket_bytes)
        counts = Counter(others)
        counts[last] = counts.pop(last, 0) + 1
        return counts


def _rows(busy: Sequence[Busy]) -> Array:
    return np.array([seconds_of(each) for each in busy])


def _together(operations: Sequence[Busy]) -> float:
    """The least seconds of operations of one lane, whose stages overlap: those of the longest, or of one resource."""
    summed: list[float] = [sum(each) for each in zip(*map(seconds_of, operations), strict=True)][:4]
    return max([*(each.total for each in operations), *summed])
