"""Gathered units: the operations that gather them, and the events that free them.

Whether a unit stays gathered until it is needed again is decided here, once, from the order of units, for the program
and for the runtime.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from thinwire.program.batches import gather_batches
from thinwire.program.draft import Draft
from thinwire.program.mesh import Axis, Kind
from thinwire.program.shares import LARGE_LEAF
from thinwire.program.step import BufferKey, Call, Event, HostLane, Lane, Phase, Trace, UnitInfo
from thinwire.program.wire import gather_sizes, used_codec
from thinwire.spec import CodecSpec, Plan


@dataclass(frozen=True, slots=True)
class Retention:
    """Units that stay gathered until they are needed again.

    Attributes:
        kept: Units that stay gathered from their forward to their backward.
        carried: Units that stay gathered from a backward to the next micro-batch's forward.
        persistent: Small units, which do both and are gathered together when the step begins.
    """

    kept: frozenset[int]
    carried: frozenset[int]
    persistent: frozenset[int]


def retention(plan: Plan, units: Sequence[UnitInfo], trace: Trace) -> Retention:
    """Choose the units that stay gathered.

    Small units persist. Of the others, those stay whose reuse distance is at most ``plan.reuse_bytes``, the closest
    first, as long as ``plan.live_bytes`` has room for them beside what computation and prefetch hold anyway. Units
    between forward and backward come before those between two micro-batches, so that the choice does not depend on
    their number.
    """
    excepted = {index: unit.keeps_gathered for index, unit in enumerate(units) if unit.keeps_gathered is not None}
    persistent = frozenset(
        index for index, unit in enumerate(units) if unit.nbytes <= plan.persist_bytes and excepted.get(index, True)
    )
    last = trace.tail if plan.kept_unit == "last" else frozenset[int]()
    kept = frozenset(index for index in range(len(units)) if excepted.get(index, index in last or index in persistent))
    chosen = Retention(kept, persistent, persistent)
    if not plan.reuse_bytes or not any_gathered(plan, units):
        return chosen
    played = _play(plan, units, trace, chosen)
    limit = math.inf if plan.live_bytes is None else plan.live_bytes
    stay, carry = set(kept), set(persistent)
    uses = [use for use in _uses(units, trace) if use.distance <= plan.reuse_bytes and excepted.get(use.unit, True)]
    for use in sorted(uses, key=lambda use: (use.carried, use.distance)):
        staying = carry if use.carried else stay
        if use.unit not in staying and played.take(use, units[use.unit].nbytes, limit):
            staying.add(use.unit)
    return Retention(frozenset(stay), frozenset(carry), persistent)


def gathered_peak(plan: Plan, units: Sequence[UnitInfo], trace: Trace) -> int:
    """Most bytes of gathered units at once in a step, with what joint gathers copy."""
    return max(_play(plan, units, trace, retention(plan, units, trace)).with_copies, default=0)


def check_live(plan: Plan, units: Sequence[UnitInfo]) -> None:
    """Refuse a limit that is less than one unit.

    Raises:
        SpecError: ``live_bytes`` is less than a unit takes beside units that are always gathered.
    """
    if plan.live_bytes is None or not any_gathered(plan, units):
        return
    always = {index for index, unit in enumerate(units) if unit.name == "" or unit.nbytes <= plan.persist_bytes}
    base = sum(units[index].nbytes for index in always)
    others = [unit for index, unit in enumerate(units) if index not in always]
    largest = max(others or units, key=lambda unit: unit.nbytes)
    if base + largest.nbytes > plan.live_bytes and others:
        cut = "" if plan.granularity == "module" else ', or cut units with granularity = "module"'
        raise plan.unsuitable(
            f"live_bytes = {plan.live_bytes}: unit {largest.name} alone has {largest.nbytes} bytes, beside {base} "
            f"that are always gathered; set live_bytes to at least {base + largest.nbytes}{cut}"
        )


def any_gathered(plan: Plan, units: Sequence[UnitInfo]) -> bool:
    return plan.gathers or any(unit.stored for unit in units)


class Lookahead:
    """Which units are gathered ahead."""

    def __init__(self, plan: Plan, units: Sequence[UnitInfo]) -> None:
        self._plan, self._units = plan, units
        self._counts = _large_blocks(units)

    def after(self, order: Sequence[int], position: int, depth: int) -> Sequence[int]:
        """Units to prefetch while ``order[position - 1]`` computes: the next units until they have ``prefetch_bytes``,
        the next ``depth`` units, or the rest of its block and the modules of the next ``depth`` blocks.

        A norm between blocks is no block to count: nothing hides behind it.
        """
        if self._plan.prefetch_bytes is not None:
            return self._until(order[position:], self._plan.prefetch_bytes)
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

    def _until(self, order: Sequence[int], at_least: int) -> Sequence[int]:
        size = 0
        for count, unit in enumerate(order):
            if size >= at_least:
                return order[:count]
            size += self._units[unit].nbytes
        return order


class Gathers:
    """Records the gathers and frees of a step. ``live`` are the bytes of units that are gathered or on their way,
    ``copied`` those that the event's joint gathers copy."""

    def __init__(self, plan: Plan, units: Sequence[UnitInfo], trace: Trace, draft: Draft, retention: Retention) -> None:
        self._plan, self._units, self._draft = plan, units, draft
        self._needed, self._needed_again = trace.needed, trace.needed_again
        self._sharded = [unit.gathered(plan) for unit in units]
        self._retention, self._ahead = retention, Lookahead(plan, units)
        self._under_way: dict[int, list[int]] = {}  # unit -> operations that have gathered it, or will
        # Units whose secondary shard is valid: nothing invalidates that of a frozen unit.
        self._secondary = {n for n, unit in enumerate(units) if not unit.trainable} if plan.secondary else set()
        self._position = 0  # units that this forward has needed so far
        self.live = self.copied = 0

    @property
    def gathered(self) -> frozenset[int]:
        """Units that are gathered, or on their way."""
        return frozenset(self._under_way)

    def at(self, event: Event, *, last: bool) -> None:
        """Play the next event of a step; ``last``: of its last micro-batch."""
        match event.phase:
            case Phase.PRE_FORWARD:
                self._need_in_forward(event)
            case Phase.POST_FORWARD:
                self._finish_forward(event)
            case Phase.PRE_BACKWARD:
                self._need_in_backward(event)
            case Phase.POST_BACKWARD:
                self._leave(event.unit, event, last=last)
            case Phase.BACKWARD_END:
                self._position = 0
                for unit in sorted(self._under_way):
                    self._leave(unit, event, last=last)

    def _need_in_forward(self, event: Event) -> None:
        """Gather a unit that the forward needs, and prefetch the next ones."""
        self.copied = 0
        plan, needed = self._plan, self._needed
        self._need(event.unit, event, from_secondary=plan.secondary_reuse)
        self._position += 1
        if not plan.overlap.gather:
            return
        if event.micro_batch == 0 and self._position == 1:
            persistent = [unit for unit in needed if unit in self._retention.persistent]
            self._gather(persistent, event, from_secondary=plan.secondary_reuse, at_least=math.inf)
        ahead = self._ahead.after(needed, self._position, plan.prefetch)
        self._gather_ahead(ahead, event, from_secondary=plan.secondary_reuse)

    def _need_in_backward(self, event: Event) -> None:
        """Gather a unit that the backward needs, and prefetch the next ones.

        A recomputed block needs all its modules at once, in the order of its forward. Their gathers then have the
        gradients of the block before to hide behind.
        """
        order, plan = self._needed_again, self._plan
        self.copied = 0
        self._need(event.unit, event, from_secondary=True)
        if plan.overlap.gather and (plan.prefetch or plan.prefetch_bytes is not None):
            position = order.index(event.unit) + 1
            one = plan.backward_prefetch == "module"
            ahead = order[position : position + 1] if one else self._ahead.after(order, position, 1)
            self._gather_ahead(ahead, event, from_secondary=True)

    def _leave(self, unit: int, event: Event, *, last: bool) -> None:
        """Free a unit that a backward has left, unless the next micro-batch finds it gathered."""
        if last or unit not in self._retention.carried:
            self._free(unit, event)

    def _free(self, unit: int, event: Event) -> None:
        if unit in self._under_way:
            del self._under_way[unit]
            self.live -= self._units[unit].nbytes
            self._draft.free(event, unit)

    def _finish_forward(self, event: Event) -> None:
        self.copied = 0
        unit = event.unit
        if not self._sharded[unit]:
            return
        kept = unit in self._retention.kept
        if self._plan.secondary is not None and (not kept or self._plan.secondary_reuse):
            self._secondary.add(unit)
        if not kept:
            self._free(unit, event)

    def _need(self, unit: int, event: Event, *, from_secondary: bool) -> None:
        self._gather((unit,), event, from_secondary=from_secondary)
        for operation in self._under_way.get(unit, ()):
            self._draft.wait(event, operation)

    def _gather_ahead(self, wanted: Sequence[int], event: Event, *, from_secondary: bool) -> None:
        """Gather units that are needed later, in order, as far as ``live_bytes`` has room for them."""
        limit = self._plan.live_bytes
        if limit is not None:
            fits, live = [], self.live
            for unit in dict.fromkeys(wanted):
                live += 0 if unit in self._under_way else self._units[unit].nbytes
                if live > limit:
                    break
                fits.append(unit)
            wanted = fits
        self._gather(wanted, event, from_secondary=from_secondary)

    def _gather(
        self, wanted: Sequence[int], event: Event, *, from_secondary: bool, at_least: float | None = None
    ) -> None:
        """Gather those of the wanted units that are not gathered yet, in as few operations as the plan allows."""
        plan = self._plan
        at_least = plan.gather_bytes if at_least is None else at_least
        fresh = [unit for unit in dict.fromkeys(wanted) if self._sharded[unit] and unit not in self._under_way]
        if not fresh:
            return
        self._under_way.update({unit: [] for unit in fresh})
        self.live += sum(self._units[unit].nbytes for unit in fresh)
        for axis in (Axis.PARAMS, Axis.SECONDARY):
            is_second = axis is Axis.SECONDARY
            order = [unit for unit in fresh if (from_secondary and unit in self._secondary) is is_second]
            if self._draft.extent(axis) > 1 or not is_second:
                for batch in gather_batches(
                    self._units, order, at_least, encoded_apart=not is_second, only_stored=not plan.gathers
                ):
                    self._gather_batch(axis, batch, event)

    def _gather_batch(self, axis: Axis, batch: Sequence[BufferKey], event: Event) -> None:
        # The secondary shard holds decoded parameters of a previous gather, which are sent without a codec.
        codec = used_codec(self._plan, "gather") if axis is Axis.PARAMS else CodecSpec()
        buffers = [self._units[unit].buffers[number] for unit, number in batch]
        units = tuple(dict.fromkeys(unit for unit, _ in batch))
        stored, shards = buffers[0].stored, self._draft.extent(Axis.PARAMS)
        encoded = axis is Axis.PARAMS and buffers[0].encoded
        decoded = sum(buffer.numel for buffer in buffers) if stored is not None else 0
        call = Call(Kind.ALL_GATHER, Lane.GATHER, axis, units, encoded, stored, tuple(batch), size=decoded)
        joint = len(batch) > 1
        parts = [(buffer.numel, gather_sizes(codec, buffer, shards=shards, joint=joint)) for buffer in buffers]
        coming: tuple[int, ...] = ()
        if self._plan.residence.streams_params and axis is Axis.PARAMS:
            size = sum(buffer.kept(shards, shards) for buffer in buffers)
            coming = (self._draft.record(Call(Kind.COPY, HostLane.UP, axis, units, size=size), event),)
        operation = self._draft.add(call, parts, event, coming)
        if joint and stored is None:
            self.copied += sum(buffer.nbytes for buffer in buffers)
        for unit in units:
            self._under_way[unit].append(operation)


def _large_blocks(units: Sequence[UnitInfo]) -> Mapping[int, bool]:
    """By block, whether its parameters take enough bytes for it to count as one."""
    sizes: dict[int, int] = {}
    for unit in units:
        sizes[unit.block] = sizes.get(unit.block, 0) + unit.nbytes
    return {block: size * LARGE_LEAF >= max(sizes.values()) for block, size in sizes.items()}


# -- what stays gathered -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """The time between two uses of a unit.

    Attributes:
        unit: The unit.
        carried: Whether the second use belongs to the next micro-batch.
        left: Event at which the unit would be freed.
        needed: Event that needs the unit again.
        distance: Bytes of units that are used between (the reuse distance).
    """

    unit: int
    carried: bool
    left: Event
    needed: Event
    distance: int


def _uses(units: Sequence[UnitInfo], trace: Trace) -> Iterator[_Use]:
    """The times between a unit's forward and its backward, and between its backward and its next forward."""
    events = [*trace.events(0), *itertools.islice(trace.events(1), len(trace.forward))]
    place: dict[Event, int] = {}
    used = [0]  # bytes of units that were used before each event
    for position, event in enumerate(events):
        place.setdefault(event, position)
        needs = event.phase in (Phase.PRE_FORWARD, Phase.PRE_BACKWARD)
        used.append(used[-1] + (units[event.unit].nbytes if needs else 0))
    for unit in range(len(units)):
        for carried, phase, again in ((False, Phase.POST_FORWARD, Phase.PRE_BACKWARD),
                                      (True, Phase.POST_BACKWARD, Phase.PRE_FORWARD)):  # fmt: skip
            left, needed = Event(phase, unit, 0), Event(again, unit, int(carried))
            if carried and left not in place:
                left = Event(Phase.BACKWARD_END, -1, 0)
            if left in place and needed in place:
                yield _Use(unit, carried, left, needed, used[place[needed]] - used[place[left]])


class _Played:
    """What is gathered at every event: bytes of units, and with copies of joint gathers that start there; numbers of
    the events, of repeated ones the first; by unit, those at which a gather of it starts."""

    def __init__(self) -> None:
        self.live: list[int] = []
        self.with_copies: list[int] = []
        self.places: dict[Event, int] = {}
        self.gathered: dict[int, list[int]] = {}
        self._before: frozenset[int] = frozenset()

    def note(self, gathers: Gathers, event: Event) -> None:
        place, present = len(self.live), gathers.gathered
        self.live.append(gathers.live)
        self.with_copies.append(gathers.live + gathers.copied)
        self.places.setdefault(event, place)
        for unit in present - self._before:
            self.gathered.setdefault(unit, []).append(place)
        self._before = present

    def take(self, use: _Use, size: int, limit: float) -> bool:
        """Take the ``size`` bytes that a unit needs between two uses, in both micro-batches, if the limit leaves them
        beside what is gathered anyway; returns whether it does."""
        spans = [span for shift in (0, 1) if (span := self._span(use, shift)) is not None]
        if any(max(self.live[span], default=0) + size > limit for span in spans):
            return False
        for span in spans:
            self.live[span] = [level + size for level in self.live[span]]
        return True

    def _span(self, use: _Use, micro_batch: int) -> slice | None:
        """Events between two uses, the first in this micro-batch, until the unit is gathered anyway."""
        left = self.places.get(use.left._replace(micro_batch=micro_batch))
        if left is None:
            return None
        gathered = self.gathered.get(use.unit, [])
        again = bisect_right(gathered, left)
        return slice(left + 1, gathered[again] if again < len(gathered) else len(self.live))


def _play(plan: Plan, units: Sequence[UnitInfo], trace: Trace, chosen: Retention) -> _Played:
    """Play two micro-batches of several."""
    gathers, played = Gathers(plan, units, trace, Draft(plan, 0), chosen), _Played()
    for event in itertools.chain(trace.events(0), trace.events(1)):
        gathers.at(event, last=False)
        played.note(gathers, event)
    return played
