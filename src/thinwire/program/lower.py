"""Lowers a plan and a list of units to a :class:`~thinwire.program.step.StepProgram`.

Lowering walks through one step, event by event, in the order in which the runtime's hooks will see it, and records
every collective. Gathers are prefetched along the trace, gradients are reduced in reverse forward order, gradients are
synchronized in buckets, and updated parameters are spread in forward order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from thinwire.program.mesh import Axis, Kind, MessageSizes, axis_index, axis_stride, hops
from thinwire.program.shares import LARGE_LEAF, Even, Span, chunk_spans, padded, together, within
from thinwire.program.step import BufferInfo, Event, Lane, Operation, Phase, StepProgram, Trace, UnitInfo
from thinwire.program.wire import ITEMSIZE, axis_shape, gather_sizes, reduction_sizes
from thinwire.spec import CodecSpec, Plan

__all__ = ["CONTROL_WORDS", "NORM_BYTES", "UNDER_WAY", "buckets", "control_bytes", "default_trace", "lower"]

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


def buckets(plan: Plan, units: Sequence[UnitInfo], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group trainable units, in reduction order, into buckets of at least ``plan.bucket_bytes``.

    The remainder becomes a bucket of its own, or joins the previous bucket if it is less than half full. The step waits
    for the last bucket, and a small bucket costs as many messages as a large one.
    """
    itemsize = ITEMSIZE[plan.effective_reduce_dtype]
    closed: list[tuple[int, ...]] = []
    open_: list[int] = []
    size = 0
    for unit in order:
        if not units[unit].trainable:
            continue
        open_.append(unit)
        size += sum(b.numel // plan.params.ranks * itemsize for b in units[unit].buffers if b.trainable)
        if size >= plan.bucket_bytes:
            closed.append(tuple(open_))
            open_, size = [], 0
    if open_ and closed and size < plan.bucket_bytes / 2:
        closed[-1] += tuple(open_)
    elif open_:
        closed.append(tuple(open_))
    return tuple(closed)


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
        axis = call.axis
        shape, place, stride = self._shapes[axis], self.places[axis], self._strides[axis]
        index = len(self.operations)
        self.operations.append(
            Operation(
                index=index,
                kind=call.kind,
                lane=call.lane,
                axis=axis,
                units=call.units,
                hops=hops(call.kind, *shape, pieces, place, sizes, stride),
                start=start,
                after=after,
                encoded=call.encoded,
                bucket=call.bucket,
                chunk=call.chunk,
                chunks=call.chunks,
            )
        )
        if call.lane is Lane.GATHER:
            first = self._first_gathers.setdefault(call.units[0], [index])
            if first[-1] != index and self.operations[first[0]].start == start:
                first.append(index)
        return index

    def add_even(self, call: _Call, numel: int, sizes: MessageSizes, start: Event, after: tuple[int, ...] = ()) -> int:
        """Add an operation on a vector of ``numel`` elements, cut evenly among the members of the axis."""
        count = self.extent(call.axis)
        return self.add(call, Even(numel // count, count), sizes, start, after)

    def wait(self, event: Event, operation: int) -> None:
        """Let computation wait for an operation at an event, unless it has waited for the operation before."""
        if operation not in self._waited:
            self._waited.add(operation)
            self._waits.setdefault(event, []).append(operation)

    def hold_back(self, unit: int, spread: tuple[int, ...]) -> None:
        """Let the first gathers of a unit start only after the previous step's spread of it."""
        for index in self._first_gathers.get(unit, ()):
            self.operations[index] = replace(self.operations[index], after=spread)

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
                    for upcoming in self._ahead(self._trace.needed, position, self._plan.prefetch):
                        self._gather(upcoming, event, from_secondary=reuse)
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
            for upcoming in order[position : position + 1] if one else self._ahead(order, position, 1):
                self._gather(upcoming, event, from_secondary=True)

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
        self._gather(unit, event, from_secondary=from_secondary)
        for operation in self._under_way.get(unit, ()):
            self._draft.wait(event, operation)

    def _gather(self, unit: int, event: Event, *, from_secondary: bool) -> None:
        if not self._sharded or unit in self._under_way:
            return
        axis = Axis.SECONDARY if from_secondary and unit in self._secondary else Axis.PARAMS
        # The secondary shard holds decoded parameters of a previous gather, which are sent without a codec.
        codec = self._plan.wire.gather if axis is Axis.PARAMS else CodecSpec()
        self._under_way[unit] = []
        for buffer in self._units[unit].buffers if self._draft.extent(axis) > 1 else ():
            call = _Call(Kind.ALL_GATHER, Lane.GATHER, axis, (unit,), buffer.encoded and axis is Axis.PARAMS)
            self._under_way[unit].append(self._draft.add_even(call, buffer.numel, gather_sizes(codec, buffer), event))


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


def _bucket(plan: Plan, members: Sequence[tuple[int, BufferInfo]], replicas: int) -> _Bucket:
    """A bucket of these buffers of units, cut into chunks that the replicas can divide among them."""
    units = tuple(dict.fromkeys(unit for unit, _ in members))
    pieces = together([buffer.shares for _, buffer in members])
    longest = pieces.size if isinstance(pieces, Even) else max(pieces)
    spans = chunk_spans(longest, plan.bucket_chunks, replicas)
    chunks = (
        _Chunk(number, span, units if len(spans) == 1 else _units_within(members, span))
        for number, span in enumerate(spans)
    )
    return _Bucket(units, members[0][1].encoded, pieces, tuple(chunks))


def _units_within(members: Sequence[tuple[int, BufferInfo]], span: Span) -> tuple[int, ...]:
    """Units that have elements in a chunk, in any piece."""
    owners = 1 if all(isinstance(buffer.shares, Even) for _, buffer in members) else len(members[0][1].shares)
    ends, inside = [0] * owners, []
    for unit, buffer in members:
        begins, ends = ends, [end + buffer.shares[owner] for owner, end in enumerate(ends)]
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
        self._turns: dict[int, list[tuple[_Bucket, _Chunk]]] = {}  # by unit: chunks that start in its turn
        for bucket in self._cut_buckets(trace):
            for chunk in bucket.chunks:
                self._turns.setdefault(chunk.units[-1], []).append((bucket, chunk))
        self._over_params: dict[int, list[int]] = {}  # unit -> its reduce-scatters over the params axis
        # By units, encoding and lane of a bucket's reduction: its chunks that have started, while others have not.
        self._open: dict[tuple[tuple[int, ...], bool, Lane], list[int]] = {}
        self._under_way: deque[list[int]] = deque()  # whole reductions that nothing has waited for yet, oldest first
        self._pending: deque[int] = deque()
        self._ready: set[int] = set()
        self._last = True

    def _cut_buckets(self, trace: Trace) -> Iterator[_Bucket]:
        replicas = self._draft.extent(Axis.REPLICA)
        if self._draft.extent(Axis.SHARD) == replicas == 1:
            return
        for bucket in buckets(self._plan, self._units, trace.reduction_order):
            for encoded in (True, False):
                members = [
                    (unit, buffer)
                    for unit in bucket
                    for buffer in self._units[unit].buffers
                    if buffer.trainable and buffer.encoded is encoded
                ]
                if members:
                    yield _bucket(self._plan, members, replicas)

    def begin(self, *, last: bool) -> None:
        """Begin the backward of a micro-batch."""
        self._last = last
        self._pending = deque(self._order)
        self._ready.clear()

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
        if self._draft.extent(Axis.PARAMS) > 1:
            self._over_params[unit] = [
                operation
                for buffer in self._units[unit].buffers
                if buffer.trainable
                for operation in self._reduce_over_params(unit, buffer, event)
            ]
        for bucket, chunk in self._turns.get(unit, ()):
            self._reduce_chunk(bucket, chunk, event)

    def _reduce_over_params(self, unit: int, buffer: BufferInfo, event: Event) -> list[int]:
        members = self._draft.extent(Axis.PARAMS)
        sizes = reduction_sizes(self._plan, Axis.PARAMS, encoded=buffer.encoded)
        pieces = Even(buffer.numel // members, members)
        spans = chunk_spans(pieces.size, self._plan.bucket_chunks)
        operations = []
        for number, span in enumerate(spans):
            call = _Call(
                Kind.REDUCE_SCATTER,
                Lane.REDUCE,
                Axis.PARAMS,
                (unit,),
                buffer.encoded,
                bucket=(unit,),
                chunk=number,
                chunks=len(spans),
            )
            operations.append(self._draft.add(call, within(pieces, span), sizes, event))
        self._started(operations, event, overlapped=self._plan.overlap.reduce)
        return operations

    def _reduce_chunk(self, bucket: _Bucket, chunk: _Chunk, event: Event) -> None:
        """Reduce a chunk over the shard axis (in every micro-batch if ``G`` is sharded like ``OS``), then over the
        replicas."""
        after = tuple(operation for unit in chunk.units for operation in self._over_params.get(unit, ()))
        if self._draft.extent(Axis.SHARD) > 1 and (self._last or self._plan.grads_like_optimizer):
            call = self._call(Kind.REDUCE_SCATTER, Lane.REDUCE, Axis.SHARD, bucket, chunk)
            sizes = reduction_sizes(self._plan, Axis.SHARD, encoded=bucket.encoded)
            after = (self._draft.add(call, within(bucket.pieces, chunk.span), sizes, event, after),)
            self._chunk_started(bucket, call, after[0], event)
        replicas = self._draft.extent(Axis.REPLICA)
        if self._last and replicas > 1:
            call = self._call(Kind.ALL_REDUCE, Lane.SYNC, Axis.REPLICA, bucket, chunk)
            share = padded(bucket.pieces[self._draft.places[Axis.SHARD]], replicas)
            sizes = reduction_sizes(self._plan, Axis.REPLICA, encoded=bucket.encoded)
            synced = self._draft.add_even(call, within((share,), chunk.span)[0], sizes, event, after)
            self._chunk_started(bucket, call, synced, event)

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

    def _chunk_started(self, bucket: _Bucket, call: _Call, operation: int, event: Event) -> None:
        """Note that a chunk of a bucket has started; the bucket is under way once its last chunk has."""
        key = bucket.units, bucket.encoded, call.lane
        started = self._open.setdefault(key, [])
        started.append(operation)
        overlapped = self._plan.overlap.sync if self._last else self._plan.overlap.reduce
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
