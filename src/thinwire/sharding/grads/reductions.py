"""Builds the collectives that reduce gradients: turns an operation of the program into moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from thinwire.collectives.all_reduce import all_reduce
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Moves
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs, reduce_scatter
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Operation, padded
from thinwire.sharding.grads.buckets import Bucket, cut
from thinwire.sharding.grads.error_feedback import ErrorFeedback
from thinwire.sharding.grads.unit_gradient import Accumulator, ReductionConfig, UnitGradient
from thinwire.sharding.lanes.lanes import Load
from thinwire.sharding.params.seeds import Seeds
from thinwire.spec import Plan

_VERBS = {Axis.PARAMS: "reduce", Axis.SHARD: "scatter", Axis.REPLICA: "sync"}


@dataclass(slots=True)
class _Way:
    """What holds a gradient on its way through the reductions of a micro-batch.

    Attributes:
        staged: This rank's gradient, in the layout of the flat buffer.
        shard: The gradient of this rank's P shard; the same tensor if P is not sharded.
        share: The gradient of this rank's optimizer share; the same tensor if the P shard is not sharded further.
        adds: By axis, whether its reductions add to what they write. All chunks of a gradient have the same answer.
        left: Number of chunks of the gradient that have not been reduced over the params axis yet.
    """

    staged: torch.Tensor
    shard: torch.Tensor
    share: torch.Tensor
    adds: dict[Axis, bool]
    left: int = 0


@dataclass(slots=True)
class _Vector:
    """A bucket's sums between a reduce-scatter and an all-reduce, 1-D in wire dtype and padded for the replicas, of
    which so many chunks are left that have not gone on yet."""

    values: torch.Tensor
    left: int


class Reductions:
    """Turns operations into moves, and keeps track of the tensors that hold gradients between two operations.

    Gradients are by unit, one for each trainable buffer; groups and codecs of gradients are those of the axes
    ``PARAMS``, ``SHARD`` and ``REPLICA``.

    Attributes:
        feedback: Rounding errors of this rank's messages.
        encodes: Whether gradients are encoded.
    """

    def __init__(
        self,
        plan: Plan,
        gradients: Mapping[int, Sequence[UnitGradient]],
        groups: Mapping[Axis, AxisGroup],
        codecs: Mapping[Axis, HopCodecs],
        seeds: Seeds,
    ) -> None:
        self._plan, self._gradients, self._groups, self._seeds = plan, gradients, groups, seeds
        self._codecs, self.encodes = codecs, True
        self._topology = ReductionConfig(plan)
        self._ways: dict[UnitGradient, _Way] = {}  # gradients of units from their turn until they are finished
        self._vectors: dict[tuple[UnitGradient, ...], _Vector] = {}
        self._buckets: dict[tuple[Axis, tuple[int, ...], bool], Bucket] = {}
        self._loads: dict[tuple[Axis, tuple[int, ...], bool], Load] = {}
        self.feedback, self._keeps_errors = ErrorFeedback(plan, gradients, groups), plan.wire.error_feedback > 0

    def recut(self) -> None:
        """Cut buckets anew, because units have further gradients."""
        self._buckets.clear()
        self._loads.clear()

    def take(self, part: UnitGradient, staged: torch.Tensor) -> None:
        """Take the finished gradient of a buffer in this micro-batch, at its unit's turn; ``staged`` is what
        :meth:`UnitGradient.finish` returned."""
        self._ways[part] = _Way(staged, staged, staged, {})

    def moves(self, operation: Operation, *, goes_on: bool) -> tuple[Moves, Load]:
        """Build the moves of a reduction of the program, and the description of its data; ``goes_on`` says whether
        another reduction continues with the result."""
        bucket = self._bucket(operation)
        if operation.axis is Axis.REPLICA:
            moves = self._synchronise(bucket, operation.chunk)
        elif operation.axis is Axis.SHARD and goes_on and not self._topology.scatter_always:
            moves = self._scatter(bucket, operation.chunk)
        else:
            moves = self._accumulate(operation.axis, bucket, operation.chunk)
        return moves, self._load(operation, bucket)

    def finish(self, units: Sequence[int], *, last: bool) -> None:
        """Release what holds the gradients of units that take part in no later reduction of this micro-batch. After the
        step's last, gradients are complete."""
        for unit in units:
            for part in self._gradients[unit]:
                self._ways.pop(part, None)
                if last:
                    part.unsynced = False
                    if not part.owned.memory.numel():
                        part.owned.empty = False  # no reduction writes it, but the gradient is there, as on other ranks
                    if self._topology.shard > 1 and part.has_local:
                        part.local.empty = True

    def drop_sources(self) -> None:
        """Drop gradients that were collected and not reduced. Where only some chunks of a gradient are reduced, its
        earlier content is lost as well."""
        for part, way in self._ways.items():
            if Axis.SHARD in way.adds or Axis.REPLICA in way.adds:
                part.owned.empty = True
            if way.left and not self._topology.scatter_always:
                part.local.empty = True
        self._ways.clear()
        self._vectors.clear()

    # -- the three axes ----------------------------------------------------------------------------------------

    def _accumulate(self, axis: Axis, bucket: Bucket, number: int) -> Moves:
        """Reduce-scatter a chunk into what gradients accumulate in: the micro-batch's over the ranks that share P, into
        P-shard gradients; or these over the shard axis, into the gradients of the optimizer shares."""
        parts, ways = bucket.chunks[number].spans, self._ways
        adds = [self._claim(axis, part, bucket) for part in parts]
        if axis is Axis.PARAMS:
            sources, targets = {p: ways[p].staged for p in parts}, {p: ways[p].shard for p in parts}
        else:
            sources, targets = {p: ways[p].shard for p in parts}, {p: ways[p].share for p in parts}
        place = bucket.place_of_sums(number, self._groups[axis].index, targets, adds)
        return self._reduce(axis, bucket, number, sources, *place)

    def _scatter(self, bucket: Bucket, number: int) -> Moves:
        """Reduce-scatter a chunk over the shard axis, into a vector that goes on to the replicas in wire dtype."""
        topology, index = self._topology, self._groups[Axis.SHARD].index
        chunk, replicas = bucket.chunks[number], self._groups[Axis.REPLICA].size
        numel = bucket.numels[index]
        if bucket.gradients not in self._vectors:
            values = allocate(padded(numel, replicas), topology.wire_dtype, chunk.device)
            self._vectors[bucket.gradients] = _Vector(values, len(bucket.chunks))
        vector = self._vectors[bucket.gradients].values
        end = chunk.begin + chunk.sizes[index]

        def zero_padding() -> None:
            vector[numel:].zero_()

        then = zero_padding if chunk.begin < numel == end < vector.numel() else None
        shards = {part: self._ways[part].shard for part in chunk.spans}
        return self._reduce(Axis.SHARD, bucket, number, shards, vector[chunk.begin : end], False, then)

    def _reduce(
        self,
        axis: Axis,
        bucket: Bucket,
        number: int,
        source: Mapping[UnitGradient, torch.Tensor],
        out: torch.Tensor,
        accumulate: bool,
        then: Callable[[], None] | None,
    ) -> Moves:
        """Reduce-scatter the values of a chunk's gradients over an axis into ``out``, this rank's piece, or add the
        result to what is there; ``then`` follows the reduction."""
        group, chunk, codecs = self._groups[axis], bucket.chunks[number], self._codecs_of(axis, bucket)
        whole, pack = chunk.packed(source, self._topology.wire_dtype)
        moves = reduce_scatter(
            group,
            whole,
            out,
            scale=self._topology.scale(group.size),
            accumulate=accumulate,
            sizes=list(chunk.sizes),
            codecs=codecs,
            residual=self.feedback.of_scatter(axis, bucket, number, codecs) if self._keeps_errors else None,
            seed=self._seeds.next(),
        )
        moves = moves if then is None else moves.then(then)
        return moves if pack is None else moves.after(pack)

    def _synchronise(self, bucket: Bucket, number: int) -> Moves:
        """All-reduce a chunk of a bucket's optimizer shares over their replicas.

        The shares come from the vector of a previous scatter (in wire dtype), which may be overwritten, or from what
        holds them.
        """
        topology, group, chunk = self._topology, self._groups[Axis.REPLICA], bucket.chunks[number]
        (numel,) = chunk.sizes
        pad = padded(numel, group.size) - numel
        between = self._vectors.get(bucket.gradients)
        shares = {part: self._ways[part].share for part in chunk.spans}
        # A share that already is the accumulated gradient is replaced by its mean; any other share is added.
        adds = [
            False if between is None and share is part.owned.values else self._claim(Axis.REPLICA, part, bucket)
            for part, share in shares.items()
        ]
        for part in chunk.spans:
            part.synchronised = between is None
        if between is None:
            accumulated = any(
                share is part.owned.values or (part.has_local and share is part.local.values)
                for part, share in shares.items()
            )
            vector, pack = chunk.packed(shares, topology.wire_dtype, pad=pad, scratch=accumulated)
        else:
            vector, pack = between.values[chunk.begin : chunk.begin + numel + pad], None
            between.left -= 1
            if not between.left:
                del self._vectors[bucket.gradients]
        owned = {part: part.owned.values for part in chunk.spans}
        sums, accumulates, deliver = bucket.place_of_sums(number, 0, owned, adds)
        codecs = self._codecs_of(Axis.REPLICA, bucket)
        moves = all_reduce(
            group,
            vector,
            sums,
            scale=topology.scale(group.size),
            accumulate=accumulates,
            codecs=codecs,
            feedback=self.feedback.of_sync(bucket, number, codecs) if self._keeps_errors else None,
            seed=self._seeds.next(),
        )
        moves = moves if deliver is None else moves.then(deliver)
        return moves if pack is None else moves.after(pack)

    # -- gradients on their way --------------------------------------------------------------------------------

    def _bucket(self, operation: Operation) -> Bucket:
        """The bucket that an operation carries a chunk of, which is cut once."""
        key = operation.axis, operation.bucket, operation.encoded
        bucket = self._buckets.get(key)
        if bucket is None:
            parts = [
                part
                for unit in operation.bucket
                for part in self._gradients[unit]
                if part.layout.encoded is operation.encoded
            ]
            bucket = self._buckets[key] = cut(operation.axis, parts, self._groups, self._plan.bucket_chunks)
        return bucket

    def _claim(self, axis: Axis, part: UnitGradient, bucket: Bucket) -> bool:
        """Announce that the reduction of a bucket's chunk along an axis writes the gradient of a P shard, or of an
        optimizer share; returns whether it adds to what is there. Only the first axis asks ``bucket``."""
        way = self._ways[part]
        if axis is not Axis.PARAMS:
            if axis not in way.adds:
                way.adds[axis] = part.owned.claim()
            if axis is Axis.SHARD:
                way.share = part.owned.values
            return way.adds[axis]
        if axis not in way.adds:
            way.left = bucket.chunks_of[part]
            if self._topology.scatter_always:  # it goes on to the optimizer shares, and nothing accumulates in it
                target = Accumulator(allocate(part.layout.shard_numel, torch.float32, way.staged.device))
            else:
                target = part.local
            way.adds[axis] = target.claim()
            way.shard = way.share = target.values
        way.left -= 1
        return way.adds[axis]

    def _codecs_of(self, axis: Axis, bucket: Bucket) -> HopCodecs:
        return self._codecs[axis] if self.encodes and bucket.gradients[0].layout.encoded else EXACT

    def _load(self, operation: Operation, bucket: Bucket) -> Load:
        """The description of a reduction's data, which is created once."""
        key = operation.axis, operation.units, operation.encoded
        load = self._loads.get(key)
        if load is None:
            parts = [part for part in bucket.gradients if part.unit in operation.units]
            label = f"{_VERBS[operation.axis]} {', '.join(part.name for part in parts)}"
            units = tuple(part.unit for part in parts)
            load = self._loads[key] = Load(label, operation.axis, units, operation.encoded)
        return load
