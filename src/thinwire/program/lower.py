"""Plan + units -> :class:`~thinwire.program.step.StepProgram`.

Lowering plays one step through, event by event, the way the runtime's hooks will see it, and writes down every
collective. The rules are those of the design: gathers are prefetched along the trace, gradients are reduced against
the order of the forward, synchronisation goes in buckets, the updated parameters are spread in forward order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from thinwire.program.mesh import Axis, Kind, MessageSizes, axis_index, axis_stride, hops
from thinwire.program.shares import Even, padded, together
from thinwire.program.step import Event, Lane, Operation, Phase, StepProgram, Trace, UnitInfo
from thinwire.program.wire import ITEMSIZE, axis_shape, gather_sizes, reduction_sizes
from thinwire.spec import CodecSpec, Plan

__all__ = ["CONTROL_WORDS", "NORM_BYTES", "UNDER_WAY", "buckets", "control_bytes", "default_trace", "lower"]

CONTROL_WORDS = 3
"""64-bit words of the step's control exchange: order hash, unfinished gradients, step number."""

NORM_BYTES = 8
"""What a rank tells of its gradient norm, if it is asked for: the square of its share's, fp64."""

UNDER_WAY = 4
"""Reductions that may be under way while the backward goes on. Where links are slower than computation, it waits for
them at the end in any case; without a bound it would only pile up gradients in memory first."""


def control_bytes(units: Sequence[UnitInfo]) -> int:
    """Bytes each rank contributes to the step's control exchange: the words and one bit per trainable parameter."""
    return 8 * CONTROL_WORDS + padded(sum(unit.parameters for unit in units), 64) // 8


def default_trace(units: Sequence[UnitInfo]) -> Trace:
    """The trace of units that run one after another, unit 0 (the root, unnamed) around all others."""
    order = range(len(units))
    if units and units[0].name == "":
        inner = [(phase, u) for u in order[1:] for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
        return Trace.of_forward([(Phase.PRE_FORWARD, 0), *inner, (Phase.POST_FORWARD, 0)])
    return Trace.of_forward((phase, u) for u in order for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD))


def buckets(plan: Plan, units: Sequence[UnitInfo], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Trainable units grouped, in reduction order, into buckets of at least ``plan.bucket_bytes``.

    What is left over makes a bucket of its own, or joins the one before when it is less than half of one: the step
    waits for the last bucket, and a small one costs as many messages as a large one.
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


def lower(
    plan: Plan,
    units: Sequence[UnitInfo],
    *,
    micro_batches: int = 1,
    trace: Trace | None = None,
    rank: int = 0,
    clip: bool = False,
) -> StepProgram:
    """Write down the operations of one step.

    Args:
        plan: the plan.
        units: the units, in the runtime's numbering.
        micro_batches: forward/backward passes of the step (``M``).
        trace: the observed order of units; by default, one after another with unit 0 around them when it is the root.
        rank: whose bytes to count (ranks differ only when shares are of unequal size).
        clip: whether ranks add up the gradient norm, in an exchange of its own.

    Returns:
        The program of that rank. Operations, order and axes are the same on every rank.
    """
    lowering = _Lowering(plan, units, trace or default_trace(units), rank)
    for micro_batch in range(micro_batches):
        lowering.forward(micro_batch)
        lowering.backward(micro_batch, last=micro_batch == micro_batches - 1)
    lowering.step(clip=clip)
    return StepProgram(
        units=tuple(units),
        micro_batches=micro_batches,
        operations=tuple(lowering.operations),
        waits={event: tuple(indices) for event, indices in lowering.waits.items()},
        frees={event: tuple(freed) for event, freed in lowering.frees.items()},
    )


class _Lowering:
    """State of a step as it is played through: what is gathered, which gather brings it, what has been reduced."""

    def __init__(self, plan: Plan, units: Sequence[UnitInfo], trace: Trace, rank: int) -> None:
        self.plan, self.units, self.trace, self.rank = plan, units, trace, rank
        self.operations: list[Operation] = []
        self.waits: dict[Event, list[int]] = {}
        self.frees: dict[Event, list[int]] = {}
        self.sharded = plan.params.ranks > 1
        self.kept = trace.tail if plan.keep_gathered == "last" else frozenset[int]()
        self.buckets = buckets(plan, units, trace.reduction_order)
        self.gathers: dict[int, list[int]] = {}  # unit -> operations that brought (or will bring) it
        self.secondary: set[int] = set()  # units whose secondary shard is valid
        self.reduced: dict[int, list[int]] = {}  # unit -> its reduce-scatters over the params axis
        self.under_way: deque[int] = deque()  # reductions that nothing has waited for yet, oldest first
        self.shapes = {axis: axis_shape(plan, axis) for axis in Axis}
        self.places = {axis: axis_index(plan, axis, rank) for axis in Axis}
        self.strides = {axis: axis_stride(plan, axis) for axis in Axis}

    # -- forward -----------------------------------------------------------------------------------------------

    def forward(self, micro_batch: int) -> None:
        needed = self.trace.needed
        position = 0
        for phase, unit in self.trace.forward:
            event = Event(phase, unit, micro_batch)
            if phase is Phase.PRE_FORWARD:
                self._need(unit, event, from_secondary=self.plan.secondary_reuse)
                position += 1
                if self.plan.overlap.gather:
                    for upcoming in self._ahead(needed, position):
                        self._gather(upcoming, event, from_secondary=self.plan.secondary_reuse)
            else:
                self._finish_forward(unit, event)

    def _ahead(self, order: Sequence[int], position: int) -> Sequence[int]:
        """Units to prefetch while ``order[position - 1]`` computes: the next ones, or the next blocks' modules."""
        if self.plan.granularity == "block":
            return order[position : position + self.plan.prefetch]
        blocks = list(dict.fromkeys(self.units[unit].block for unit in order[position - 1 :]))
        near = set(blocks[: 1 + self.plan.prefetch])
        return [unit for unit in order[position:] if self.units[unit].block in near]

    def _finish_forward(self, unit: int, event: Event) -> None:
        if not self.sharded:
            return
        if self.plan.secondary is not None and (unit not in self.kept or self.plan.secondary_reuse):
            self.secondary.add(unit)
        if unit not in self.kept:
            self._free(unit, event)

    # -- backward ----------------------------------------------------------------------------------------------

    def backward(self, micro_batch: int, *, last: bool) -> None:
        order = self.trace.backward
        ready = [unit for unit in self.trace.reduction_order if self.units[unit].trainable]
        enclosing = self.trace.enclosing
        for position, unit in enumerate(order):
            event = Event(Phase.PRE_BACKWARD, unit, micro_batch)
            self._need(unit, event, from_secondary=True)
            if self.plan.overlap.gather and self.plan.prefetch:
                for upcoming in order[position + 1 : position + 2]:
                    self._gather(upcoming, event, from_secondary=True)
            if unit not in enclosing:
                self._finish_backward(unit, micro_batch, ready, last=last)
        for unit in order:
            if unit in enclosing:
                self._finish_backward(unit, micro_batch, ready, last=last)
        for unit in list(ready):
            self._reduce_in_order(unit, micro_batch, ready, last=last)

    def _finish_backward(self, unit: int, micro_batch: int, ready: list[int], *, last: bool) -> None:
        if self.sharded:
            self._free(unit, Event(Phase.GRADS_READY, unit, micro_batch))
        if ready and ready[0] == unit:
            self._reduce_in_order(unit, micro_batch, ready, last=last)

    def _reduce_in_order(self, unit: int, micro_batch: int, ready: list[int], *, last: bool) -> None:
        ready.remove(unit)
        event = Event(Phase.GRADS_READY, unit, micro_batch)
        if self._extent(Axis.PARAMS) > 1:
            self.reduced[unit] = [
                self._even(
                    Kind.REDUCE_SCATTER,
                    Lane.REDUCE,
                    Axis.PARAMS,
                    (unit,),
                    buffer.numel,
                    reduction_sizes(self.plan, Axis.PARAMS, encoded=buffer.encoded),
                    event,
                    encoded=buffer.encoded,
                )
                for buffer in self.units[unit].buffers
                if buffer.trainable
            ]
            for operation in self.reduced[unit]:
                self._reducing(operation, event, overlapped=self.plan.overlap.reduce)
        for bucket in self.buckets:
            if bucket[-1] == unit:
                for encoded in (True, False):
                    self._reduce_bucket(bucket, event, encoded=encoded, last=last)

    def _reduce_bucket(self, bucket: tuple[int, ...], event: Event, *, encoded: bool, last: bool) -> None:
        """Reduce what is encoded, or what is not, over the shard axis (each micro-batch if ``G`` is sharded like
        ``OS``), then over the replicas."""
        buffers = [b for unit in bucket for b in self.units[unit].buffers if b.trainable and b.encoded is encoded]
        if not buffers:
            return
        overlapped = self.plan.overlap.sync if last else self.plan.overlap.reduce
        after = tuple(operation for unit in bucket for operation in self.reduced.get(unit, ()))
        every_micro_batch = self.plan.grads == self.plan.optimizer
        pieces = together([buffer.shares for buffer in buffers])
        if self._extent(Axis.SHARD) > 1 and (last or every_micro_batch):
            sizes = reduction_sizes(self.plan, Axis.SHARD, encoded=encoded)
            scattered = self._add(
                Kind.REDUCE_SCATTER, Lane.REDUCE, Axis.SHARD, bucket, pieces, sizes, event, after, encoded=encoded
            )
            after = (scattered,)
            self._reducing(scattered, event, overlapped=overlapped)
        replicas = self._extent(Axis.REPLICA)
        if last and replicas > 1:
            share = pieces[self.places[Axis.SHARD]]
            numel, sizes = padded(share, replicas), reduction_sizes(self.plan, Axis.REPLICA, encoded=encoded)
            synced = self._even(
                Kind.ALL_REDUCE, Lane.SYNC, Axis.REPLICA, bucket, numel, sizes, event, after, encoded=encoded
            )
            self._reducing(synced, event, overlapped=overlapped)

    def _reducing(self, operation: int, event: Event, *, overlapped: bool) -> None:
        """Computation waits for a reduction at once, or when too many others are under way."""
        if not overlapped:
            self._wait(event, operation)
            return
        self.under_way.append(operation)
        if len(self.under_way) > UNDER_WAY:
            self._wait(event, self.under_way.popleft())

    # -- step --------------------------------------------------------------------------------------------------

    def step(self, *, clip: bool) -> None:
        event = Event(Phase.STEP, -1, 0)
        for operation in self.operations:
            if operation.lane in (Lane.REDUCE, Lane.SYNC):
                self._wait(event, operation.index)
        world = self._extent(Axis.WORLD)
        if world > 1:
            sizes = MessageSizes.plain(1)
            for size in (control_bytes(self.units), *((NORM_BYTES,) if clip else ())):
                exchange = self._even(Kind.ALL_GATHER, Lane.CONTROL, Axis.WORLD, (), size * world, sizes, event)
                self._wait(event, exchange)
        if self._extent(Axis.SHARD) > 1:
            for unit in dict.fromkeys((*self.trace.needed, *range(len(self.units)))):
                self._spread(unit, event)

    def _spread(self, unit: int, event: Event) -> None:
        kind = Kind.ALL_GATHER if self.plan.partition == "intra" else Kind.BROADCAST
        for buffer in self.units[unit].buffers:
            if buffer.trainable:
                sizes = gather_sizes(self.plan.wire.spread, buffer)
                operation = self._add(
                    kind, Lane.SPREAD, Axis.SHARD, (unit,), buffer.shares, sizes, event, encoded=buffer.encoded
                )
                wait = Event(Phase.PRE_FORWARD, unit, 0) if self.plan.overlap.spread else event
                self._wait(wait, operation)

    # -- parts -------------------------------------------------------------------------------------------------

    def _need(self, unit: int, event: Event, *, from_secondary: bool) -> None:
        self._gather(unit, event, from_secondary=from_secondary)
        for operation in self.gathers.get(unit, ()):
            self._wait(event, operation)

    def _gather(self, unit: int, event: Event, *, from_secondary: bool) -> None:
        if not self.sharded or unit in self.gathers:
            return
        axis = Axis.SECONDARY if from_secondary and unit in self.secondary else Axis.PARAMS
        # The secondary shard holds what a gather brought: decoded once, not encoded again.
        codec = self.plan.wire.gather if axis is Axis.PARAMS else CodecSpec()
        self.gathers[unit] = [
            self._even(
                Kind.ALL_GATHER,
                Lane.GATHER,
                axis,
                (unit,),
                buffer.numel,
                gather_sizes(codec, buffer),
                event,
                encoded=buffer.encoded and axis is Axis.PARAMS,
            )
            for buffer in self.units[unit].buffers
            if self._extent(axis) > 1
        ]

    def _free(self, unit: int, event: Event) -> None:
        if unit in self.gathers:
            del self.gathers[unit]
            self.frees.setdefault(event, []).append(unit)

    def _even(
        self,
        kind: Kind,
        lane: Lane,
        axis: Axis,
        units: tuple[int, ...],
        numel: int,
        sizes: MessageSizes,
        event: Event,
        after: tuple[int, ...] = (),
        *,
        encoded: bool = False,
    ) -> int:
        """An operation over a vector of ``numel`` elements, cut evenly among the members of the axis."""
        count = self._extent(axis)
        return self._add(kind, lane, axis, units, Even(numel // count, count), sizes, event, after, encoded=encoded)

    def _add(
        self,
        kind: Kind,
        lane: Lane,
        axis: Axis,
        units: tuple[int, ...],
        pieces: Sequence[int],
        sizes: MessageSizes,
        event: Event,
        after: tuple[int, ...] = (),
        *,
        encoded: bool = False,
    ) -> int:
        local, nodes = self.shapes[axis]
        sent = hops(kind, local, nodes, pieces, self.places[axis], sizes, self.strides[axis])
        index = len(self.operations)
        self.operations.append(Operation(index, kind, lane, axis, units, sent, event, after, encoded))
        return index

    def _extent(self, axis: Axis) -> int:
        return math.prod(self.shapes[axis])

    def _wait(self, event: Event, operation: int) -> None:
        self.waits.setdefault(event, []).append(operation)
