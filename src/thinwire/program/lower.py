"""Lowers a plan and a list of units to a :class:`~thinwire.program.step.StepProgram`.

Lowering walks through one step, event by event, in the order in which the runtime's hooks will see it, and records
every collective. Gathers are prefetched along the trace, gradients are reduced in reverse forward order, gradients are
synchronized in buckets, and updated parameters are spread in forward order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from thinwire.program.batches import buckets, gather_batches, reduction_batches
from thinwire.program.mesh import Axis, Hop, Kind, MessageSizes, axis_index, axis_stride, hops
from thinwire.program.shares import LARGE_LEAF, Even, Span, chunk_spans, padded, together, within
from thinwire.program.step import BufferInfo, BufferKey, Event, Lane, Operation, Phase, StepProgram, Trace, UnitInfo
from thinwire.program.wire import axis_shape, gather_sizes, reduction_sizes
from thinwire.spec import CodecSpec, Plan

__all__ = ["CONTROL_WORDS", "NORM_BYTES", "UNDER_WAY", "control_bytes", "default_trace", "lower"]

CONTROL_WORDS = 3
"""Number of 64-bit words in the step's control exchange: order hash, unfinished gradients, step number."""

NORM_BYTES = 8
"""Bytes that a rank contributes to the exchange of the gradient norm: the squared norm of its share, fp64."""

UNDER_WAY = 4
"""Most reductions in flight during the backward. If links are slower than computation, the backward has to wait for
them anyway; without this bound, gradients would fill the memory first."""


def control_bytes(units: Sequence[UnitInfo]) -> int:
    """Bytes that each rank contributes to the step's control exchange: the words and a bit per trainable parameter."""
    return 8 * CONTROL_WORDS + padded(sum(unit.parameters for unit in units), 64) // 8


def default_trace(units: Sequence[UnitInfo], *, recompute: bool = False) -> Trace:
    """The trace of units that run one after another. Unit 0 encloses all others if it is the root (unnamed).

    Args:
        units: The units, in the order of their forward.
        recompute: Whether the backward runs the forward of every block again.
    """
    order = range(len(units))
    if units and units[0].name == "":
        inner = [(phase, u) for u in order[1:] for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
        forward = [(Phase.PRE_FORWARD, 0), *inner, (Phase.POST_FORWARD, 0)]
    else:
        forward = [(phase, u) for u in order for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
    return Trace.of_forward(forward, units, recompute=recompute)


def _kept_units(plan: Plan, units: Sequence[UnitInfo], trace: Trace) -> frozenset[int]:
    """Units that stay gathered from their forward to their backward."""
    kept = trace.tail if plan.keep_gathered == "last" else frozenset[int]()
    excepted = {index: unit.keeps_gathered for index, unit in enumerate(units) if unit.keeps_gathered is not None}
    return frozenset(index for index in range(len(units)) if excepted.get(index, index in kept))


def _large_blocks(units: Sequence[UnitInfo]) -> Mapping[int, bool]:
    """By block, whether its parameters take enough bytes for it to count as one."""
    sizes: dict[int, int] = {}
    for unit in units:
        sizes[unit.block] = sizes.get(unit.block, 0) + unit.nbytes
    return {block: size * LARGE_LEAF >= max(sizes.values()) for block, size in sizes.items()}


def lower(
    plan: Plan,
    units: Sequence[UnitInfo],
    *,
    micro_batches: int = 1,
    trace: Trace | None = None,
    position: int = 0,
    clip: bool = False,
) -> StepProgram:
    """Record the operations of one step.

    Args:
        plan: The plan.
        units: The units, in the runtime's numbering.
        micro_batches: Forward and backward passes per step (``M``).
        trace: Observed order of units; default: :func:`default_trace`.
        position: Position in the mesh of the rank whose bytes are counted; ranks differ only if shares have unequal
            sizes.
        clip: Whether ranks add up the gradient norm in an exchange of its own.

    Returns:
        The program of that rank. Operations, order and axes are the same on every rank.
    """
    trace = trace or default_trace(units, recompute=plan.recompute)
    draft = _Draft(plan, position)
    gathers, reductions = _Gathers(plan, units, trace, draft), _Reductions(plan, units, trace, draft)
    for micro_batch in range(micro_batches):
        gathers.forward(micro_batch)
        reductions.begin(last=micro_batch == micro_batches - 1)
        for phase, unit in trace.backward:
            event = Event(phase, unit, micro_batch)
            if phase is Phase.PRE_BACKWARD:
                gathers.need_in_backward(event)
            elif phase is Phase.GRADS_READY:
                reductions.ready(unit, event)
            elif phase is Phase.POST_BACKWARD:
                gathers.free(unit, event)
        end = Event(Phase.BACKWARD_END, -1, micro_batch)
        reductions.end(end)
        gathers.free_all(end)
    _take_step(plan, units, trace, draft, clip=clip)
    return draft.program(units, micro_batches)


@dataclass(frozen=True, slots=True)
class _Call:
    """The fields of an :class:`Operation` that depend on neither its size nor its time."""

    kind: Kind
    lane: Lane
    axis: Axis
    units: tuple[int, ...]
    encoded: bool = False
    buffers: tuple[BufferKey, ...] = ()
    bucket: tuple[int, ...] = ()
    chunk: int = 0
    chunks: int = 1


class _Draft:
    """A program under construction: operations so far, and the operations and units that events wait for and free."""

    def __init__(self, plan: Plan, position: int) -> None:
        self.operations: list[Operation] = []
        self._waits: dict[Event, list[int]] = {}
        self._frees: dict[Event, list[int]] = {}
        self._waited: set[int] = set()
        self._first_gathers: dict[int, list[int]] = {}  # unit -> the operations of its first gather in the step
        self._shapes = {axis: axis_shape(plan, axis) for axis in Axis}
        self._strides = {axis: axis_stride(plan, axis) for axis in Axis}
        self.places = {axis: axis_index(plan, axis, position) for axis in Axis}

    def extent(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return math.prod(self._shapes[axis])

    def add(
        self, call: _Call, pieces: Sequence[int], sizes: MessageSizes, start: Event, after: tuple[int, ...] = ()
    ) -> int:
        """Add an operation on a vector that is cut into ``pieces``, one for each member of the axis.

        Returns:
            Its index.
        """
        return self._record(call, self._hops(call, pieces, sizes), start, after)

    def add_even(self, call: _Call, numel: int, sizes: MessageSizes, start: Event, after: tuple[int, ...] = ()) -> int:
        """Add an operation on a vector of ``numel`` elements, cut evenly among the members of the axis."""
        return self.add(call, self._cut(call.axis, numel), sizes, start, after)

    def add_joint(self, call: _Call, parts: Sequence[tuple[int, MessageSizes]], start: Event) -> int:
        """Add an operation on several vectors, each cut evenly, whose messages travel as one.

        Args:
            call: The operation.
            parts: Number of elements of each vector, and the sizes of its messages.
            start: Event that starts the operation.
        """
        of_parts = [self._hops(call, self._cut(call.axis, numel), sizes) for numel, sizes in parts]
        joint = tuple(replace(same[0], sent=sum(hop.sent for hop in same)) for same in zip(*of_parts, strict=True))
        return self._record(call, joint, start, ())

    def _cut(self, axis: Axis, numel: int) -> Even:
        count = self.extent(axis)
        return Even(numel // count, count)

    def _hops(self, call: _Call, pieces: Sequence[int], sizes: MessageSizes) -> tuple[Hop, ...]:
        axis = call.axis
        return hops(call.kind, *self._shapes[axis], pieces, self.places[axis], sizes, self._strides[axis])

    def _record(self, call: _Call, hops: tuple[Hop, ...], start: Event, after: tuple[int, ...]) -> int:
        index = len(self.operations)
        self.operations.append(
            Operation(
                index=index,
                kind=call.kind,
                lane=call.lane,
                axis=call.axis,
                units=call.units,
                hops=hops,
                start=start,
                after=after,
                encoded=call.encoded,
                buffers=call.buffers,
                bucket=call.bucket,
                chunk=call.chunk,
                chunks=call.chunks,
            )
        )
        for unit in call.units if call.lane is Lane.GATHER else ():
            first = self._first_gathers.setdefault(unit, [index])
            if first[-1] != index and self.operations[first[0]].start == start:
                first.append(index)
        return index

    def wait(self, event: Event, operation: int) -> None:
        """Let computation wait for an operation at an event, unless it has waited for the operation before."""
        if operation not in self._waited:
            self._waited.add(operation)
            self._waits.setdefault(event, []).append(operation)

    def hold_back(self, unit: int, spread: tuple[int, ...]) -> None:
        """Let the first gathers of a unit start only after the previous step's spread of it."""
        for index in self._first_gathers.get(unit, ()):
            gather = self.operations[index]
            self.operations[index] = replace(gather, after=(*gather.after, *spread))

    def free(self, event: Event, unit: int) -> None:
        """Free a unit's gathered parameters at an event."""
        self._frees.setdefault(event, []).append(unit)

    def program(self, units: Sequence[UnitInfo], micro_batches: int) -> StepProgram:
        """The finished program."""
        return StepProgram(
            units=tuple(units),
            micro_batches=micro_batches,
            operations=tuple(self.operations),
            waits={event: tuple(indices) for event, indices in self._waits.items()},
            frees={event: tuple(freed) for event, freed in self._frees.items()},
        )


class _Gathers:
    """Gathered units: the operations that gather them, and the events that free them."""

    def __init__(self, plan: Plan, units: Sequence[UnitInfo], trace: Trace, draft: _Draft) -> None:
        self._plan, self._units, self._trace, self._draft = plan, units, trace, draft
        self._sharded = plan.params.ranks > 1
        self._kept = _kept_units(plan, units, trace)
        self._counts = _large_blocks(units)
        self._under_way: dict[int, list[int]] = {}  # unit -> operations that have gathered it, or will
        self._secondary: set[int] = set()  # units whose secondary shard is valid

    def forward(self, micro_batch: int) -> None:
        """Play the forward of a micro-batch."""
        reuse = self._plan.secondary_reuse
        position = 0
        for phase, unit in self._trace.forward:
            event = Event(phase, unit, micro_batch)
            if phase is Phase.PRE_FORWARD:
                self._need(unit, event, from_secondary=reuse)
                position += 1
                if self._plan.overlap.gather:
                    ahead = self._ahead(self._trace.needed, position, self._plan.prefetch)
                    self._gather(ahead, event, from_secondary=reuse)
            else:
                self._finish_forward(unit, event)

    def need_in_backward(self, event: Event) -> None:
        """Gather a unit that the backward needs, and prefetch the next one, or the modules of the next block.

        A recomputed block needs all its modules at once, in the order of its forward. Their gathers then have the
        gradients of the block before to hide behind.
        """
        order = self._trace.needed_again
        self._need(event.unit, event, from_secondary=True)
        if self._plan.overlap.gather and self._plan.prefetch:
            position = order.index(event.unit) + 1
            one = self._plan.backward_prefetch == "module"
            ahead = order[position : position + 1] if one else self._ahead(order, position, 1)
            self._gather(ahead, event, from_secondary=True)

    def free(self, unit: int, event: Event) -> None:
        """Free a unit that is gathered."""
        if unit in self._under_way:
            del self._under_way[unit]
            self._draft.free(event, unit)

    def free_all(self, event: Event) -> None:
        """Free every unit that is gathered."""
        for unit in sorted(self._under_way):
            self.free(unit, event)

    def _ahead(self, order: Sequence[int], position: int, depth: int) -> Sequence[int]:
        """Units to prefetch while ``order[position - 1]`` computes: the next units, or the rest of its block and the
        modules of the next blocks. A norm between blocks is no block to count: nothing hides behind it."""
        if self._plan.granularity == "block":
            return order[position : position + depth]
        near = {self._units[order[position - 1]].block}
        ahead = []
        for unit in order[position:]:
            block = self._units[unit].block
            if block not in near:
                if depth == 0:
                    break
                near.add(block)
                depth -= self._counts[block]
            ahead.append(unit)
        return ahead

    def _finish_forward(self, unit: int, event: Event) -> None:
        if not self._sharded:
            return
        if self._plan.secondary is not None and (unit not in self._kept or self._plan.secondary_reuse):
            self._secondary.add(unit)
        if unit not in self._kept:
            self.free(unit, event)

    def _need(self, unit: int, event: Event, *, from_secondary: bool) -> None:
        self._gather((unit,), event, from_secondary=from_secondary)
        for operation in self._under_way.get(unit, ()):
            self._draft.wait(event, operation)

    def _gather(self, wanted: Sequence[int], event: Event, *, from_secondary: bool) -> None:
        """Gather those of the wanted units that are not gathered yet, in as few operations as the plan allows."""
        if not self._sharded:
            return
        fresh = [unit for unit in dict.fromkeys(wanted) if unit not in self._under_way]
        self._under_way.update({unit: [] for unit in fresh})
        for axis in (Axis.PARAMS, Axis.SECONDARY):
            is_second = axis is Axis.SECONDARY
            order = [unit for unit in fresh if (from_secondary and unit in self._secondary) is is_second]
            if self._draft.extent(axis) > 1:
                for batch in gather_batches(self._units, order, self._plan.gather_bytes, encoded_apart=not is_second):
                    self._gather_batch(axis, batch, event)

    def _gather_batch(self, axis: Axis, batch: Sequence[BufferKey], event: Event) -> None:
        # The secondary shard holds decoded parameters of a previous gather, which are sent without a codec.
        codec = self._plan.wire.gather if axis is Axis.PARAMS else CodecSpec()
        buffers = [self._units[unit].buffers[number] for unit, number in batch]
        units = tuple(dict.fromkeys(unit for unit, _ in batch))
        encoded = axis is Axis.PARAMS and buffers[0].encoded
        call = _Call(Kind.ALL_GATHER, Lane.GATHER, axis, units, encoded, tuple(batch))
        parts = [(buffer.numel, gather_sizes(codec, buffer, joint=len(batch) > 1)) for buffer in buffers]
        operation = self._draft.add_joint(call, parts, event)
        for unit in units:
            self._under_way[unit].append(operation)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a bucket.

    Attributes:
        number: Number of the chunk, from 0.
        span: Its elements in every piece of the bucket.
        units: Units that have elements in it, in reduction order. It starts in the turn of the last.
    """

    number: int
    span: Span
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The encoded or the unencoded part of a bucket.

    Attributes:
        units: Units with gradients in it, in reduction order.
        encoded: Whether the plan's codecs apply to it.
        pieces: Number of elements that each member of the shard axis owns.
        chunks: Its chunks.
    """

    units: tuple[int, ...]
    encoded: bool
    pieces: Sequence[int]
    chunks: tuple[_Chunk, ...]


_Member = tuple[int, Sequence[int]]
"""A unit with a gradient in a bucket, and the number of elements of it that each member of the axis gets."""


def _bucket(members: Sequence[_Member], chunks: int, replicas: int, *, encoded: bool) -> _Bucket:
    """A bucket of these gradients, cut into at most this many chunks that the replicas can divide among them."""
    units = tuple(dict.fromkeys(unit for unit, _ in members))
    pieces = together([of_member for _, of_member in members])
    longest = pieces.size if isinstance(pieces, Even) else max(pieces)
    spans = chunk_spans(longest, chunks, replicas)
    of_spans = (
        _Chunk(number, span, units if len(spans) == 1 else _units_within(members, span))
        for number, span in enumerate(spans)
    )
    return _Bucket(units, encoded, pieces, tuple(of_spans))


def _units_within(members: Sequence[_Member], span: Span) -> tuple[int, ...]:
    """Units that have elements in a chunk, in any piece."""
    owners = 1 if all(isinstance(pieces, Even) for _, pieces in members) else len(members[0][1])
    ends, inside = [0] * owners, []
    for unit, pieces in members:
        begins, ends = ends, [end + pieces[owner] for owner, end in enumerate(ends)]
        if any(max(begin, span[0]) < min(end, span[1]) for begin, end in zip(begins, ends, strict=True)):
            inside.append(unit)
    return tuple(dict.fromkeys(inside))


class _Reductions:
    """Reductions of gradients. Their order does not depend on the order in which gradients become ready.

    A chunk of a bucket starts in the turn of the last unit that has elements in it, so the first chunks are on their
    way while the backward computes the gradients of the last.
    """

    def __init__(self, plan: Plan, units: Sequence[UnitInfo], trace: Trace, draft: _Draft) -> None:
        self._plan, self._units, self._draft = plan, units, draft
        self._order = tuple(unit for unit in trace.reduction_order if units[unit].trainable)
        replicas = draft.extent(Axis.REPLICA)
        # By unit: chunks that start in its turn, over the params axis and after that.
        self._params_turns: dict[int, list[tuple[_Bucket, _Chunk]]] = {}
        self._turns: dict[int, list[tuple[_Bucket, _Chunk]]] = {}
        place = {unit: number for number, unit in enumerate(self._order)}
        closing: dict[int, int] = {}  # unit -> the unit in whose turn its last chunk over the params axis starts
        if draft.extent(Axis.PARAMS) > 1:
            for bucket in self._cut(reduction_batches(plan, units, trace.reduction_order), self._over_all, 1):
                for chunk in bucket.chunks:
                    self._params_turns.setdefault(chunk.units[-1], []).append((bucket, chunk))
                    closing.update(dict.fromkeys(chunk.units, chunk.units[-1]))
        if draft.extent(Axis.SHARD) * replicas > 1:
            for bucket in self._cut(buckets(plan, units, trace.reduction_order), self._by_share, replicas):
                for chunk in bucket.chunks:
                    turn = max((closing.get(unit, unit) for unit in chunk.units), key=place.__getitem__)
                    self._turns.setdefault(turn, []).append((bucket, chunk))
        self._over_params: dict[int, list[int]] = {}  # unit -> reduce-scatters of it over the params axis
        # By axis, units and encoding of a bucket's reduction: its chunks that have started, while others have not.
        self._open: dict[tuple[Axis, tuple[int, ...], bool], list[int]] = {}
        self._under_way: deque[list[int]] = deque()  # whole reductions that nothing has waited for yet, oldest first
        self._pending: deque[int] = deque()
        self._ready: set[int] = set()
        self._last = True

    def _cut(
        self, groups: Sequence[Sequence[int]], pieces_of: Callable[[BufferInfo], Sequence[int]], replicas: int
    ) -> Iterator[_Bucket]:
        """Cut groups of units into buckets, of which one holds encoded gradients, or others."""
        for group in groups:
            for encoded in (True, False):
                members = [
                    (unit, pieces_of(buffer))
                    for unit in group
                    for buffer in self._units[unit].buffers
                    if buffer.trainable and buffer.encoded is encoded
                ]
                if members:
                    yield _bucket(members, self._plan.bucket_chunks, replicas, encoded=encoded)

    def _over_all(self, buffer: BufferInfo) -> Sequence[int]:
        members = self._draft.extent(Axis.PARAMS)
        return Even(buffer.numel // members, members)

    @staticmethod
    def _by_share(buffer: BufferInfo) -> Sequence[int]:
        return buffer.shares

    def begin(self, *, last: bool) -> None:
        """Begin the backward of a micro-batch."""
        self._last = last
        self._pending = deque(self._order)
        self._ready.clear()
        self._over_params.clear()

    def ready(self, unit: int, event: Event) -> None:
        """Mark a unit's gradients as ready. Reduce the unit, and units that waited for it, if it is their turn."""
        self._ready.add(unit)
        while self._pending and self._pending[0] in self._ready:
            self._reduce(self._pending.popleft(), event)

    def end(self, event: Event) -> None:
        """End the backward: reduce the units whose gradients never became ready."""
        while self._pending:
            self._reduce(self._pending.popleft(), event)

    def _reduce(self, unit: int, event: Event) -> None:
        for bucket, chunk in self._params_turns.get(unit, ()):
            self._reduce_over_params(bucket, chunk, event)
        for bucket, chunk in self._turns.get(unit, ()):
            self._reduce_chunk(bucket, chunk, event)

    def _reduce_over_params(self, bucket: _Bucket, chunk: _Chunk, event: Event) -> None:
        call = self._call(Kind.REDUCE_SCATTER, Lane.REDUCE, Axis.PARAMS, bucket, chunk)
        sizes = reduction_sizes(self._plan, Axis.PARAMS, encoded=bucket.encoded)
        operation = self._draft.add(call, within(bucket.pieces, chunk.span), sizes, event)
        for unit in chunk.units:
            self._over_params.setdefault(unit, []).append(operation)
        self._chunk_started(bucket, call, operation, event, overlapped=self._plan.overlap.reduce)

    def _reduce_chunk(self, bucket: _Bucket, chunk: _Chunk, event: Event) -> None:
        """Reduce a chunk over the shard axis (in every micro-batch if ``G`` is sharded like ``OS``), then over the
        replicas."""
        after = tuple(dict.fromkeys(chain.from_iterable(self._over_params.get(unit, ()) for unit in chunk.units)))
        overlapped = self._plan.overlap.sync if self._last else self._plan.overlap.reduce
        if self._draft.extent(Axis.SHARD) > 1 and (self._last or self._plan.grads_like_optimizer):
            call = self._call(Kind.REDUCE_SCATTER, Lane.REDUCE, Axis.SHARD, bucket, chunk)
            sizes = reduction_sizes(self._plan, Axis.SHARD, encoded=bucket.encoded)
            after = (self._draft.add(call, within(bucket.pieces, chunk.span), sizes, event, after),)
            self._chunk_started(bucket, call, after[0], event, overlapped=overlapped)
        replicas = self._draft.extent(Axis.REPLICA)
        if self._last and replicas > 1:
            call = self._call(Kind.ALL_REDUCE, Lane.SYNC, Axis.REPLICA, bucket, chunk)
            share = padded(bucket.pieces[self._draft.places[Axis.SHARD]], replicas)
            sizes = reduction_sizes(self._plan, Axis.REPLICA, encoded=bucket.encoded)
            synced = self._draft.add_even(call, within((share,), chunk.span)[0], sizes, event, after)
            self._chunk_started(bucket, call, synced, event, overlapped=overlapped)

    @staticmethod
    def _call(kind: Kind, lane: Lane, axis: Axis, bucket: _Bucket, chunk: _Chunk) -> _Call:
        return _Call(
            kind,
            lane,
            axis,
            chunk.units,
            bucket.encoded,
            bucket=bucket.units,
            chunk=chunk.number,
            chunks=len(bucket.chunks),
        )

    def _chunk_started(self, bucket: _Bucket, call: _Call, operation: int, event: Event, *, overlapped: bool) -> None:
        """Note that a chunk of a bucket has started; the bucket is under way once its last chunk has."""
        key = call.axis, bucket.units, bucket.encoded
        started = self._open.setdefault(key, [])
        started.append(operation)
        if not overlapped:
            self._draft.wait(event, operation)
        if len(started) == len(bucket.chunks):
            self._started(self._open.pop(key), event, overlapped=overlapped)

    def _started(self, operations: list[int], event: Event, *, overlapped: bool) -> None:
        """Let computation wait for a reduction at once, or for the oldest one if too many are in flight."""
        if overlapped:
            self._under_way.append(operations)
            if len(self._under_way) <= UNDER_WAY:
                return
            operations = self._under_way.popleft()
        for operation in operations:
            self._draft.wait(event, operation)


def _take_step(plan: Plan, units: Sequence[UnitInfo], trace: Trace, draft: _Draft, *, clip: bool) -> None:
    """Record the end of a step: wait for reductions, run the control exchange, and spread updated parameters."""
    event = Event(Phase.STEP, -1, 0)
    for operation in draft.operations:
        if operation.lane in (Lane.REDUCE, Lane.SYNC):
            draft.wait(event, operation.index)
    world = draft.extent(Axis.WORLD)
    for size in (control_bytes(units), *((NORM_BYTES,) if clip else ())) if world > 1 else ():
        call = _Call(Kind.ALL_GATHER, Lane.CONTROL, Axis.WORLD, ())
        draft.wait(event, draft.add_even(call, size * world, MessageSizes.plain(1), event))
    if draft.extent(Axis.SHARD) > 1:
        for unit in dict.fromkeys((*trace.needed, *range(len(units)))):
            _spread(plan, unit, units[unit], draft, needed=unit in trace.needed)


def _spread(plan: Plan, unit: int, info: UnitInfo, draft: _Draft, *, needed: bool) -> None:
    """Spread a unit's updated parameters. The next step's first gather of the unit and its first forward wait for it.

    A reader of a unit that the forward does not need waits as well, at an event outside the program.
    """
    event = Event(Phase.STEP, -1, 0)
    kind = Kind.ALL_GATHER if plan.partition == "intra" else Kind.BROADCAST
    spread = []
    for buffer in info.buffers:
        if buffer.trainable:
            call = _Call(kind, Lane.SPREAD, Axis.SHARD, (unit,), buffer.encoded)
            spread.append(draft.add(call, buffer.shares, gather_sizes(plan.wire.spread, buffer), event))
    if plan.overlap.spread:
        draft.hold_back(unit, tuple(spread))
    for operation in spread if needed or not plan.overlap.spread else ():
        draft.wait(Event(Phase.PRE_FORWARD, unit, 0) if plan.overlap.spread else event, operation)
