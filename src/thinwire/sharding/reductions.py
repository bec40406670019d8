"""Builds the collectives that reduce gradients: turns an operation of the program into moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from thinwire.collectives.all_reduce import Feedback, feedback_numels
from thinwire.collectives.chunks import Summing, all_reduce_chunks, reduce_scatter_chunks
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import Residual
from thinwire.collectives.moves import Chunks
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs, residual_numel
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Operation, padded
from thinwire.sharding.gradient import Accumulator, Topology, UnitGradient
from thinwire.sharding.lanes.journal import Load
from thinwire.sharding.seeds import Seeds
from thinwire.spec import Plan

__all__ = ["Reductions"]

Bucket = list[tuple[UnitGradient, torch.Tensor]]
"""Gradients that one collective carries, each with the tensor that currently holds its values."""

_VERBS = {Axis.PARAMS: "reduce", Axis.SHARD: "scatter", Axis.REPLICA: "sync"}


class Reductions:
    """Turns operations into moves, and keeps track of the tensors that hold gradients between two operations.

    Args:
        plan: The plan.
        gradients: Gradients by unit, for units with trainable parameters; one for each trainable buffer, in order.
        groups: Groups of ranks along the axes ``PARAMS``, ``SHARD`` and ``REPLICA``.
        codecs: Codecs of gradients, by hop.
        seeds: Seeds for codecs with stochastic rounding.

    Attributes:
        lost: Rounding errors of this rank's messages, which the next step adds (error feedback); fp32, by reduction.
            Every rank has the same reductions, but sizes may differ.
    """

    def __init__(
        self,
        plan: Plan,
        gradients: Mapping[int, Sequence[UnitGradient]],
        groups: Mapping[Axis, AxisGroup],
        codecs: HopCodecs,
        seeds: Seeds,
    ) -> None:
        self._plan, self._gradients, self._groups, self._seeds = plan, gradients, groups, seeds
        self._plan_codecs, self._codecs = codecs, codecs
        self._topology = Topology(plan)
        self._sources: dict[UnitGradient, torch.Tensor] = {}  # gradients of units from their turn until they settle
        self._vectors: dict[tuple[UnitGradient, ...], torch.Tensor] = {}  # sums of buckets between scatter and sync
        self._loads: dict[tuple[Axis, tuple[UnitGradient, ...]], Load] = {}
        self.lost: dict[str, torch.Tensor] = {}

    def take(self, parts: Sequence[UnitGradient], *, last: bool) -> None:
        """Finish a unit's gradients of this micro-batch, at the unit's turn.

        Args:
            parts: Gradients of the unit's buffers.
            last: Whether this is the step's last micro-batch.
        """
        for part in parts:
            self._sources[part] = part.finish(last=last)

    def moves(self, operation: Operation, *, goes_on: bool) -> tuple[Chunks, Load]:
        """Build the moves of an operation, and the description of its data.

        Args:
            operation: Reduction of the program.
            goes_on: Whether another reduction continues with the result.
        """
        bucket = [
            (part, self._sources[part])
            for unit in operation.units
            for part in self._gradients[unit]
            if part.layout.encoded is operation.encoded
        ]
        if operation.axis is Axis.PARAMS:
            moves = self._over_params(*bucket[0], operation.chunks)
        elif operation.axis is Axis.REPLICA:
            moves = self._synchronise(bucket, operation.chunks)
        elif goes_on and not self._topology.scatter_always:
            moves = self._scatter(bucket, operation.chunks)
        else:
            moves = self._scatter_into_owned(bucket, operation.chunks)
        return moves, self._load(operation.axis, tuple(part for part, _ in bucket))

    def settle(self, units: Sequence[int], *, last: bool) -> None:
        """Release the sources of units that take part in no later reduction of this micro-batch.

        Args:
            units: Numbers of the units.
            last: Whether this is the step's last micro-batch, so that gradients are complete.
        """
        for unit in units:
            for part in self._gradients[unit]:
                self._sources.pop(part, None)
                if last:
                    part.unsynced = False
                    if self._topology.shard > 1 and part.has_local:
                        part.local.empty = True

    def drop_sources(self) -> None:
        """Drop gradients that were collected and not reduced."""
        self._sources.clear()
        self._vectors.clear()

    def encode(self, *, wanted: bool) -> None:
        """Set whether gradients are encoded from now on."""
        self._codecs = self._plan_codecs if wanted else EXACT

    # -- the three axes ----------------------------------------------------------------------------------------

    def _over_params(self, part: UnitGradient, staging: torch.Tensor, chunks: int) -> Chunks:
        """Reduce-scatter the micro-batch's gradient over the ranks that share P, into the P-shard gradient."""
        topology, group = self._topology, self._groups[Axis.PARAMS]
        if topology.scatter_always:
            target = Accumulator(allocate(part.layout.shard_numel, torch.float32, staging.device))
        else:
            target = part.local
        shard, add = target.values, target.claim()
        self._sources[part] = shard
        direct = shard.dtype == torch.float32
        out = shard if direct else allocate(shard.numel(), torch.float32, shard.device)
        even_sizes = [out.numel()] * group.size
        moves = reduce_scatter_chunks(
            group,
            staging,
            out,
            even_sizes,
            chunks,
            self._summing(group, [(part, staging)], accumulate=direct and add),
            self._lost_by_scatter(Axis.PARAMS, [(part, staging)], even_sizes),
        )
        return moves if direct else moves.then(lambda: _deliver(out, shard, add=add))

    def _scatter(self, bucket: Bucket, chunks: int) -> Chunks:
        """Reduce-scatter a bucket over the shard axis, into a vector that goes on to the replicas in wire dtype."""
        topology, group = self._topology, self._groups[Axis.SHARD]
        sizes = _share_sizes(bucket)
        mine = sizes[group.index]
        replicas = self._groups[Axis.REPLICA].size
        vector = allocate(padded(mine, replicas), topology.wire_dtype, bucket[0][1].device)
        self._vectors[tuple(part for part, _ in bucket)] = vector
        whole, pack = _packing(bucket, sizes, topology.wire_dtype)
        moves = reduce_scatter_chunks(
            group,
            whole,
            vector[:mine],
            sizes,
            chunks,
            self._summing(group, bucket, accumulate=False),
            self._lost_by_scatter(Axis.SHARD, bucket, sizes),
        )
        return moves.after(pack).then(lambda: _zero(vector[mine:]))

    def _scatter_into_owned(self, bucket: Bucket, chunks: int) -> Chunks:
        """Reduce-scatter a bucket over the shard axis, into the gradients of the optimizer shares."""
        topology, group = self._topology, self._groups[Axis.SHARD]
        sizes = _share_sizes(bucket)
        adds = [part.owned.claim() for part, _ in bucket]
        whole, pack = _packing(bucket, sizes, topology.wire_dtype)
        alone = _takes_sums(bucket)
        out = bucket[0][0].owned.values if alone else allocate(sizes[group.index], torch.float32, whole.device)
        for part, _ in bucket:
            self._sources[part] = part.owned.values
        moves = reduce_scatter_chunks(
            group,
            whole,
            out,
            sizes,
            chunks,
            self._summing(group, bucket, accumulate=alone and adds[0]),
            self._lost_by_scatter(Axis.SHARD, bucket, sizes),
        ).after(pack)
        return moves if alone else moves.then(lambda: _distribute(bucket, out, adds))

    def _synchronise(self, bucket: Bucket, chunks: int) -> Chunks:
        """All-reduce a bucket's optimizer shares over their replicas.

        The shares come from the vector of a previous scatter (in wire dtype), which may be overwritten, or from the
        sources.
        """
        topology, group = self._topology, self._groups[Axis.REPLICA]
        vector = self._vectors.pop(tuple(part for part, _ in bucket), None)
        # A share that already is the accumulated gradient is replaced by its mean; any other share is added.
        adds = [
            False if vector is None and source is part.owned.values else part.owned.claim() for part, source in bucket
        ]
        for part, _ in bucket:
            part.synchronised = vector is None
        whole, pack = (
            (vector, _nothing) if vector is not None else _concatenation(bucket, group.size, topology.wire_dtype)
        )
        alone = _takes_sums(bucket)
        total = sum(part.owned.values.numel() for part, _ in bucket)
        summed = bucket[0][0].owned.values if alone else allocate(total, torch.float32, whole.device)
        scattered, gathered = feedback_numels(group, whole.numel())
        moves = all_reduce_chunks(
            group,
            whole,
            summed,
            chunks,
            self._summing(group, bucket, accumulate=alone and adds[0]),
            Feedback(
                self._lost_of("replica", group, bucket, scattered),
                self._lost_of("replica-sum", group, bucket, gathered) if gathered else None,
            ),
        )
        if not alone:
            moves = moves.then(lambda: _distribute(bucket, summed, adds))
        return moves.after(pack)

    def _summing(self, group: AxisGroup, bucket: Bucket, *, accumulate: bool) -> Summing:
        """How the next reduction of a bucket adds."""
        return Summing(self._topology.scale(group.size), accumulate, self._codecs_of(bucket), self._seeds.next())

    # -- error feedback ----------------------------------------------------------------------------------------

    def _lost_by_scatter(self, axis: Axis, bucket: Bucket, sizes: Sequence[int]) -> Residual | None:
        """Rounding errors so far of a reduce-scatter's last hop on the bucket's gradients."""
        group = self._groups[axis]
        return self._lost_of(str(axis), group, bucket, residual_numel(group, sizes))

    def _lost_of(self, what: str, group: AxisGroup, bucket: Bucket, numel: int) -> Residual | None:
        """Rounding errors, fp32, kept from step to step; ``None`` without error feedback or with lossless codecs."""
        codecs = self._codecs_of(bucket)
        codec = codecs.across if group.nodes > 1 else codecs.inside
        if not self._plan.wire.error_feedback or codec is None or codec.spec.is_lossless:
            return None
        key = f"{what}/{'-'.join(str(part.unit) for part, _ in bucket)}"
        lost = self.lost.get(key)
        if lost is None or lost.numel() != numel:
            lost = self.lost[key] = torch.zeros(numel, device=bucket[0][1].device)
        return Residual(lost, self._plan.wire.feedback_gain)

    def _codecs_of(self, bucket: Bucket) -> HopCodecs:
        return self._codecs if bucket[0][0].layout.encoded else EXACT

    def _load(self, axis: Axis, parts: tuple[UnitGradient, ...]) -> Load:
        """The description of a reduction of these gradients, which is created once."""
        load = self._loads.get((axis, parts))
        if load is None:
            label = f"{_VERBS[axis]} {', '.join(part.name for part in parts)}"
            load = Load(label, axis, tuple(part.unit for part in parts), parts[0].layout.encoded)
            self._loads[axis, parts] = load
        return load


def _share_sizes(bucket: Bucket) -> list[int]:
    """Number of a bucket's elements that each rank of the shard axis owns."""
    return [sum(column) for column in zip(*(g.share_sizes for g, _ in bucket), strict=True)]


def _packing(bucket: Bucket, sizes: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
    """A bucket's P-shard gradients in wire dtype, ordered by the optimizer rank that owns each part.

    Returns:
        The vector, and the function that fills it.
    """
    first, source = bucket[0]
    if len(bucket) == 1 and first.even and source.dtype == dtype:
        return source, _nothing
    whole = allocate(sum(sizes), dtype, source.device)
    fill = _pack_rows if all(gradient.even for gradient, _ in bucket) else _pack_runs
    return whole, lambda: fill(bucket, whole, len(sizes))


def _pack_rows(bucket: Bucket, whole: torch.Tensor, owners: int) -> None:
    """Equal slices: every source is a table with a row for each owner."""
    table = whole.view(owners, -1)
    column = 0
    for _, source in bucket:
        rows = source.view(owners, -1)
        table[:, column : column + rows.shape[1]].copy_(rows)
        column += rows.shape[1]


def _pack_runs(bucket: Bucket, whole: torch.Tensor, owners: int) -> None:
    """Whole fragments: each owner's runs, one after another."""
    position = 0
    for owner in range(owners):
        for gradient, source in bucket:
            for run in gradient.shares[owner]:
                whole[position : position + run.length].copy_(source[run.start : run.start + run.length])
                position += run.length


def _concatenation(bucket: Bucket, ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
    """The sources laid end to end in wire dtype, padded to a multiple of ``ranks``, in memory that may be overwritten.

    Returns:
        The vector, and the function that fills it.
    """
    first, source = bucket[0]
    # Staging may be overwritten; an accumulator may not.
    is_staging = source is not first.owned.values and not first.has_local
    if len(bucket) == 1 and is_staging and source.dtype == dtype and source.numel() % ranks == 0:
        return source, _nothing
    total = sum(source.numel() for _, source in bucket)
    vector = allocate(padded(total, ranks), dtype, bucket[0][1].device)

    def fill() -> None:
        position = 0
        for _, source in bucket:
            vector[position : position + source.numel()].copy_(source)
            position += source.numel()
        _zero(vector[position:])

    return vector, fill


def _nothing() -> None:
    """Do nothing: the vector is already filled."""


def _zero(padding: torch.Tensor) -> None:
    padding.zero_()


def _takes_sums(bucket: Bucket) -> bool:
    """Whether fp32 sums can be written directly into the buffer of a bucket's only gradient."""
    return len(bucket) == 1 and bucket[0][0].owned.values.dtype == torch.float32


def _deliver(sums: torch.Tensor, target: torch.Tensor, *, add: bool) -> None:
    """Write or add fp32 sums to an accumulator, with one rounding after the fp32 addition."""
    if add:
        target.add_(sums)
    else:
        target.copy_(sums)


def _distribute(bucket: Bucket, values: torch.Tensor, adds: Sequence[bool]) -> None:
    """Deliver to each unit of a bucket its part of ``values``."""
    position = 0
    for (gradient, _), add in zip(bucket, adds, strict=True):
        owned = gradient.owned.values
        _deliver(values[position : position + owned.numel()], owned, add=add)
        position += owned.numel()
