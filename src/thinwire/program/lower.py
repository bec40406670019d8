"""Lowers a plan and a list of units to a :class:`~thinwire.program.step.StepProgram`.

Lowering walks through one step, event by event, in the order in which the runtime's hooks will see it, and records
every collective. Gathers are prefetched along the trace, gradients are reduced in reverse forward order, gradients are
synchronized in buckets, and updated parameters are spread in forward order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from thinwire.program.batches import buckets, reduction_batches, spread_batches
from thinwire.program.draft import Draft
from thinwire.program.gathers import Gathers, check_live, retention
from thinwire.program.islands import add_exchange
from thinwire.program.mesh import Axis, Kind, MessageSizes
from thinwire.program.residence import HostGradients, add_return, add_update
from thinwire.program.shares import Even, Span, chunk_spans, padded, together, within
from thinwire.program.step import BufferInfo, Call, Event, HostLane, Lane, Phase, StepProgram, Trace, UnitInfo, beside
from thinwire.program.wire import gather_sizes, reduction_sizes, used_codec
from thinwire.spec import Plan

CONTROL_WORDS = 3
"""Number of 64-bit words in the step's control exchange: order hash, unfinished gradients, step number."""

NORM_BYTES = 8
"""Bytes that a rank contributes to the exchange of the gradient norm: the squared norm of its share, fp64."""

UNDER_WAY = 4
"""Most reductions in flight during the backward. If links are slower than computation, the backward has to wait for
them anyway; without this bound, gradients would fill the memory first."""

SMALL_SPREAD = 1 << 16
"""Bytes of parameters below which a spread takes as long as its round trips, rather than its bytes."""


def control_bytes(units: Sequence[UnitInfo]) -> int:
    """Bytes that each rank contributes to the step's control exchange: the words and a bit per trainable parameter."""
    return 8 * CONTROL_WORDS + padded(sum(unit.parameters for unit in units), 64) // 8


def default_trace(units: Sequence[UnitInfo], *, recompute: bool = False) -> Trace:
    """The trace of units that run one after another, blocks once more in the backward if ``recompute``. Unit 0 encloses
    all others if it is the root (unnamed)."""
    has_root = bool(units) and units[0].name == ""
    inner = [(phase, u) for u in range(has_root, len(units)) for phase in (Phase.PRE_FORWARD, Phase.POST_FORWARD)]
    forward = [(Phase.PRE_FORWARD, 0), *inner, (Phase.POST_FORWARD, 0)] if has_root else inner
    return Trace.of_forward(forward, units, recompute=recompute)


def lower(
    plan: Plan,
    units: Sequence[UnitInfo],
    *,
    micro_batches: int = 1,
    trace: Trace | None = None,
    position: int = 0,
    clip: bool = False,
    fragments: Sequence[int] = (),
) -> StepProgram:
    """Record the operations of one step.

    Args:
        plan: The plan.
        units: The units, in the runtime's numbering. If some hold experts that ranks share, these have a program of
            their own beside that of the others, in default order.
        micro_batches: Forward and backward passes per step (``M``).
        trace: Observed order of units; default: :func:`default_trace`.
        position: Position in the mesh of the rank whose bytes are counted; ranks differ only if shares have unequal
            sizes.
        clip: Whether ranks add up the gradient norm in an exchange of its own.
        fragments: Fragments that the step begins to exchange with other islands; see
            :func:`~thinwire.program.islands.due_fragments`.

    Returns:
        The program of that rank. Operations, order and axes are the same on every rank.

    Raises:
        SpecError: ``live_bytes`` is less than a unit needs.
    """
    if plan.ep > 1 and any(unit.experts for unit in units):
        rest, experts = ([unit for unit in units if unit.experts is flag] for flag in (False, True))
        return beside(
            lower(plan, rest, micro_batches=micro_batches, clip=clip),
            lower(plan.for_experts(), experts, micro_batches=micro_batches, clip=clip),
            units,
        )
    check_live(plan, units)
    trace = trace or default_trace(units, recompute=plan.recompute)
    draft = Draft(plan, position)
    gathers = Gathers(plan, units, trace, draft, retention(plan, units, trace))
    reductions = _Reductions(plan, units, trace, draft)
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        reductions.begin(last=last)
        for event in trace.events(micro_batch):
            reductions.at(event)
            gathers.at(event, last=last)
    _take_step(plan, units, trace, draft, clip=clip, fragments=fragments)
    return draft.program(units, micro_batches)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of a bucket: its span in every piece, and the units with elements in it. It starts in the turn of the
    last."""

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

    def __init__(self, plan: Plan, units: Sequence[UnitInfo], trace: Trace, draft: Draft) -> None:
        self._plan, self._units, self._draft = plan, units, draft
        self._host = HostGradients(plan, units, draft)
        self._sizes = cache(lambda axis, encoded: reduction_sizes(plan, axis, encoded=encoded))
        self._order = tuple(unit for unit in trace.reduction_order if units[unit].trainable)
        members, replicas = draft.extent(Axis.PARAMS), draft.extent(Axis.REPLICA)
        # By unit: chunks that start in its turn, over the params axis and after that.
        self._params_turns: dict[int, list[tuple[_Bucket, _Chunk]]] = {}
        self._turns: dict[int, list[tuple[_Bucket, _Chunk]]] = {}
        self._place = {unit: number for number, unit in enumerate(self._order)}
        closing: dict[int, int] = {}  # unit -> the unit in whose turn its last chunk over the params axis starts
        if members > 1:
            batches = reduction_batches(plan, units, trace.reduction_order)
            for bucket in self._cut(batches, lambda buffer: Even(buffer.numel // members, members), 1):
                for chunk in bucket.chunks:
                    self._params_turns.setdefault(chunk.units[-1], []).append((bucket, chunk))
                    closing.update(dict.fromkeys(chunk.units, chunk.units[-1]))
        if draft.extent(Axis.SHARD) * replicas > 1:
            batches = buckets(plan, units, trace.reduction_order)
            for bucket in self._cut(batches, lambda buffer: buffer.shares, replicas):
                for chunk in bucket.chunks:
                    turn = max((closing.get(unit, unit) for unit in chunk.units), key=self._place.__getitem__)
                    self._turns.setdefault(turn, []).append((bucket, chunk))
        self._over_params: dict[int, list[int]] = {}  # unit -> reduce-scatters of it over the params axis
        # By axis, units and encoding of a bucket's reduction: its chunks that have started, while others have not.
        self._open: dict[tuple[Axis, tuple[int, ...], bool], list[int]] = {}
        # By unit: those that take part in no reduction after its turn, of those turns that have any.
        self._params_ends = self._ends_of(self._params_turns)
        self._ends = self._ends_of(self._params_turns, self._turns)
        self._begun = 0  # operations before this micro-batch
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

    def _ends_of(self, *turns: Mapping[int, Sequence[tuple[_Bucket, _Chunk]]]) -> Mapping[int, Sequence[int]]:
        """By turn, the units whose last reduction starts in it."""
        ends = {unit: unit for unit in self._order}
        for of_axis in turns:
            for turn, chunks in of_axis.items():
                for unit in (unit for _, chunk in chunks for unit in chunk.units):
                    ends[unit] = max(ends[unit], turn, key=self._place.__getitem__)
        by_turn: dict[int, list[int]] = {}
        for unit, turn in ends.items():
            by_turn.setdefault(turn, []).append(unit)
        return by_turn

    def begin(self, *, last: bool) -> None:
        """Begin a micro-batch."""
        self._last, self._begun = last, len(self._draft.operations)
        self._host.begin()
        self._pending = deque(self._order)
        self._ready.clear()
        self._over_params.clear()

    def at(self, event: Event) -> None:
        """Play the next event. A unit is reduced in its turn, once its gradients are ready, or at the end of the
        backward if they never are."""
        if event.phase is Phase.PRE_BACKWARD:
            self._host.fetch(event.unit, event)
        if event.phase is Phase.GRADS_READY:
            self._ready.add(event.unit)
            self._host.need(event.unit, event)
        if event.phase in (Phase.GRADS_READY, Phase.BACKWARD_END):
            while self._pending and (self._pending[0] in self._ready or event.phase is Phase.BACKWARD_END):
                self._reduce(self._pending.popleft(), event)

    def _reduce(self, unit: int, event: Event) -> None:
        for bucket, chunk in self._params_turns.get(unit, ()):
            self._reduce_over_params(bucket, chunk, event)
        for bucket, chunk in self._turns.get(unit, ()):
            self._reduce_chunk(bucket, chunk, event)
        if self._plan.residence.streams_gradients:
            goes_on = self._last or (self._plan.grads_like_optimizer and self._draft.extent(Axis.SHARD) > 1)
            ended = (self._ends if goes_on else self._params_ends).get(unit, ())
            started = [op.index for op in self._draft.operations[self._begun :] if op.lane in (Lane.REDUCE, Lane.SYNC)]
            self._host.finish(ended, event, started, last=self._last)

    def _reduce_over_params(self, bucket: _Bucket, chunk: _Chunk, event: Event) -> None:
        call = self._call(Kind.REDUCE_SCATTER, Lane.REDUCE, Axis.PARAMS, bucket, chunk)
        sizes = self._sizes(Axis.PARAMS, bucket.encoded)
        operation = self._draft.add(call, [(within(bucket.pieces, chunk.span), sizes)], event)
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
            sizes = self._sizes(Axis.SHARD, bucket.encoded)
            after = (self._draft.add(call, [(within(bucket.pieces, chunk.span), sizes)], event, after),)
            self._chunk_started(bucket, call, after[0], event, overlapped=overlapped)
        replicas = self._draft.extent(Axis.REPLICA)
        if self._last and replicas > 1:
            call = self._call(Kind.ALL_REDUCE, Lane.SYNC, Axis.REPLICA, bucket, chunk)
            share = padded(bucket.pieces[self._draft.places[Axis.SHARD]], replicas)
            sizes = self._sizes(Axis.REPLICA, bucket.encoded)
            synced = self._draft.add(call, [(within((share,), chunk.span)[0], sizes)], event, after)
            self._chunk_started(bucket, call, synced, event, overlapped=overlapped)

    @staticmethod
    def _call(kind: Kind, lane: Lane, axis: Axis, bucket: _Bucket, chunk: _Chunk) -> Call:
        return Call(
            kind,
            lane,
            axis,
            chunk.units,
            bucket.encoded,
            bucket=bucket.units,
            chunk=chunk.number,
            chunks=len(bucket.chunks),
        )

    def _chunk_started(self, bucket: _Bucket, call: Call, operation: int, event: Event, *, overlapped: bool) -> None:
        """Note that a chunk of a bucket has started. Computation waits for it at once; or once the bucket's last chunk
        has started, for the oldest bucket if too many are under way."""
        if not overlapped:
            self._draft.wait(event, operation)
            return
        key = call.axis, bucket.units, bucket.encoded
        self._open.setdefault(key, []).append(operation)
        if len(self._open[key]) == len(bucket.chunks):
            self._under_way.append(self._open.pop(key))
            if len(self._under_way) > UNDER_WAY:
                for oldest in self._under_way.popleft():
                    self._draft.wait(event, oldest)


def _take_step(
    plan: Plan, units: Sequence[UnitInfo], trace: Trace, draft: Draft, *, clip: bool, fragments: Sequence[int]
) -> None:
    """Record the end of a step: wait for reductions, run the control exchange, exchange with other islands, and spread
    updated parameters."""
    event = Event(Phase.STEP, -1, 0)
    for operation in draft.operations:
        if operation.lane in (Lane.REDUCE, Lane.SYNC, HostLane.DOWN):
            draft.wait(event, operation.index)
    world = draft.extent(Axis.WORLD)
    for size in (control_bytes(units), *((NORM_BYTES,) if clip else ())) if world > 1 else ():
        call = Call(Kind.ALL_GATHER, Lane.CONTROL, Axis.WORLD, ())
        draft.wait(event, draft.add(call, [(size * world, MessageSizes.plain(1))], event))
    add_exchange(plan, units, draft, fragments)
    spreads, streams = draft.extent(Axis.SHARD) > 1, not plan.residence.on_device
    if not spreads and not streams:
        return
    needed = tuple(dict.fromkeys(trace.needed))  # a unit that runs twice is updated and spread once
    skipped = [[unit] for unit in range(len(units)) if unit not in needed]
    down: list[int] = []
    for clusters in (_spread_clusters(units, needed), skipped):
        for batch in spread_batches(plan, units, clusters):
            trained = [unit for unit in batch if units[unit].trainable]
            updates = (add_update(plan, units, draft, trained, down),) if streams and trained else ()
            spread = _spread(plan, batch, units, draft, updates, needed=clusters is not skipped) if spreads else ()
            if plan.residence.streams_params:
                add_return(units, draft, trained, (*updates, *spread))
            _await_updates(plan, trained, trace, draft, updates)


def _await_updates(plan: Plan, batch: Sequence[int], trace: Trace, draft: Draft, updates: tuple[int, ...]) -> None:
    """Let the first gather of updated units, their first forward, and the backward, which writes gradients where the
    update reads them, wait for the update."""
    for update in updates:
        for unit in batch:
            draft.hold_back(unit, updates)
        if not plan.overlap.spread:
            draft.wait(Event(Phase.STEP, -1, 0), update)
        elif batch[0] in trace.needed:
            draft.wait(Event(Phase.PRE_FORWARD, batch[0], 0), update)
        elif trace.backward:
            draft.wait(Event(*trace.backward[0], 0), update)


def _spread_clusters(units: Sequence[UnitInfo], needed: Sequence[int]) -> list[list[int]]:
    """Units in the order in which their updated parameters are spread: that in which the forward needs them, except
    that small ones follow the next large one, and are in one cluster with it. Links would stand still while a small
    message makes its way, and the forward cannot go far without the large one."""
    clusters: list[list[int]] = []
    small: list[int] = []  # units that wait for the next large one, together below SMALL_SPREAD
    for unit in needed:
        if units[unit].nbytes >= SMALL_SPREAD:
            clusters.append([unit, *small])
            small = []
        elif sum(units[u].nbytes for u in (unit, *small)) >= SMALL_SPREAD:
            clusters += [[u] for u in (*small, unit)]
            small = []
        else:
            small.append(unit)
    return [*clusters, *([unit] for unit in small)]


def _spread(
    plan: Plan,
    batch: Sequence[int],
    units: Sequence[UnitInfo],
    draft: Draft,
    after: tuple[int, ...],
    *,
    needed: bool,
) -> tuple[int, ...]:
    """Spread the updated parameters of some units. The next step's first gather of a unit and its first forward wait
    for it.

    A reader of a unit that the forward does not need waits as well, at an event outside the program.
    """
    started: list[int] = []
    event = Event(Phase.STEP, -1, 0)
    kind = Kind.ALL_GATHER if plan.partition == "intra" else Kind.BROADCAST
    buffers = {
        (unit, number): buffer
        for unit in batch
        for number, buffer in enumerate(units[unit].buffers)
        if buffer.trainable
    }
    if len(batch) == 1:
        apart = [[key] for key in buffers]
    else:
        apart = [[key for key, buffer in buffers.items() if buffer.encoded is encoded] for encoded in (True, False)]
    for keys in filter(None, apart):
        together = tuple(dict.fromkeys(unit for unit, _ in keys))
        joint = len(batch) > 1
        encoded = buffers[keys[0]].encoded
        call = Call(kind, Lane.SPREAD, Axis.SHARD, together, encoded, buffers=tuple(keys))
        codec, shards = used_codec(plan, "spread"), plan.params.ranks
        spread = [buffers[key] for key in keys]
        parts = [(buffer.shares, gather_sizes(codec, buffer, shards=shards, joint=joint)) for buffer in spread]
        operation = draft.add(call, parts, event, after)
        started.append(operation)
        for unit in together if plan.overlap.spread else ():
            draft.hold_back(unit, (operation,))
        if needed or not plan.overlap.spread:
            draft.wait(Event(Phase.PRE_FORWARD, together[0], 0) if plan.overlap.spread else event, operation)
    return tuple(started)
