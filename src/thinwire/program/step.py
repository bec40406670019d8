"""The program of one step: its operations, the events that start them, their lanes, and the events that wait for them.

A :class:`StepProgram` is the meaning of a plan for a given list of units. The simulator prices it, the runtime performs
it, and a test compares the two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, TypeAlias

from thinwire.program.mesh import Axis, Hop, Kind, Scope
from thinwire.program.shares import compact
from thinwire.spec import CodecSpec, Plan


class Lane(StrEnum):
    """An in-order queue of communication with process groups of its own."""

    GATHER = "gather"
    REDUCE = "reduce"
    SYNC = "sync"
    SPREAD = "spread"
    CONTROL = "control"
    OUTER = "outer"
    """Exchanges between islands."""


class HostLane(StrEnum):
    """An in-order queue of work on states that live on the host. Nothing on it reaches another rank."""

    UPDATE = "update"
    """Updates, while the states are on the device."""
    UP = "up"
    """Copies from the host's memory to the device."""
    DOWN = "down"
    """Copies from the device to the host's memory."""


AnyLane: TypeAlias = Lane | HostLane


class Phase(StrEnum):
    """A phase of a unit, or of the whole model if the event names no unit."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    GRADS_READY = "grads_ready"
    """The last gradient of the unit's parameters exists."""
    INPUT_GRADIENT = "input_gradient"
    """The backward of a unit whose gradients exist computes the gradient of the unit's input
    (``overlap.input_gradient``)."""
    POST_BACKWARD = "post_backward"
    """The backward no longer reads the unit's parameters."""
    BACKWARD_END = "backward_end"
    """The backward of the whole model has ended."""
    STEP = "step"


class Event(NamedTuple):
    """A moment of a step: a phase of one unit in one micro-batch (``unit`` is -1 for the whole model)."""

    phase: Phase
    unit: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """One flat buffer of a unit.

    Attributes:
        numel: Padded length in elements; every factor of the plan divides it.
        itemsize: Bytes per element in the compute dtype.
        trainable: Whether the buffer has gradients and optimizer states.
        shares: Number of elements that each member of the shard axis owns in this rank's ``P`` shard, in axis order.
        encoded: Whether the plan's codecs apply to the buffer.
        stored: Codec of whose messages ranks keep one for each ``P`` shard, instead of values (``frozen.storage``).
    """

    numel: int
    itemsize: int
    trainable: bool
    shares: Sequence[int]
    encoded: bool = True
    stored: CodecSpec | None = None

    def __post_init__(self) -> None:
        # A canonical form makes equal buffers compare equal, and it stays small for many ranks.
        object.__setattr__(self, "shares", compact(self.shares))

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def kept(self, pieces: int, of: int) -> int:
        """Bytes that a rank keeps of the buffer if ``pieces`` ranks, a divisor of the ``of`` P shards, hold it among
        them."""
        if self.stored is None:
            return self.nbytes // pieces
        return of // pieces * self.stored.slot_bytes(self.numel // of, "float32")  # whatever the dtype


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """Properties of a unit that its program depends on.

    Attributes:
        name: Dotted module name; empty for the root.
        buffers: The unit's flat buffers.
        parameters: Number of trainable parameter tensors.
        block: Number of the unit's block; units of a block are prefetched together under ``granularity = "module"``.
        keeps_gathered: Whether the unit stays gathered from its forward to its backward, if the plan overrides this
            for the unit; ``None`` follows the plan's ``kept_unit``.
        weight_first: Whether the backward computes the gradients of the unit's parameters before that of its input.
        experts: Whether the unit holds experts that neighbouring ranks share.
    """

    name: str
    buffers: tuple[BufferInfo, ...]
    parameters: int
    block: int
    keeps_gathered: bool | None = None
    weight_first: bool = False
    experts: bool = False

    @property
    def trainable(self) -> bool:
        """Whether any of the unit's buffers has gradients."""
        return any(buffer.trainable for buffer in self.buffers)

    @property
    def stored(self) -> bool:
        """Whether ranks keep messages of a codec instead of some of the unit's values."""
        return any(buffer.stored is not None for buffer in self.buffers)

    def gathered(self, plan: Plan) -> bool:
        """Whether the unit is gathered before it is used. One that is stored is: a rank that holds all of it decodes
        it from what it keeps."""
        return plan.gathers or self.stored

    @property
    def nbytes(self) -> int:
        """Bytes of the unit's gathered parameters."""
        return sum(buffer.nbytes for buffer in self.buffers)


BufferKey = tuple[int, int]
"""A flat buffer: the number of its unit, and its own number among the unit's buffers."""

Moment = tuple[Phase, int]
"""Phase and unit of an event, for any micro-batch."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The order in which the units of one micro-batch ran. Prefetching follows it.

    Attributes:
        forward: Moments with phase ``PRE_FORWARD`` or ``POST_FORWARD``.
        backward: Moments with phase ``PRE_BACKWARD`` (the backward first needs the unit), ``GRADS_READY``,
            ``INPUT_GRADIENT`` (only where the input gradient comes after the others) or ``POST_BACKWARD``. A unit
            without ``GRADS_READY`` is reduced, and one without ``POST_BACKWARD`` is freed, at the end of the backward.
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]

    @staticmethod
    def of_forward(forward: Iterable[Moment], units: Sequence[UnitInfo] = (), *, recompute: bool = False) -> Trace:
        """A trace with the given forward, and a backward in the reverse order of the ends of the forwards.

        The gradients of a unit that encloses others are ready at the end of the backward.

        Args:
            forward: Moments of the forward.
            units: Descriptions of the units; they tell which units belong to a block, and which compute the gradients
                of their parameters first.
            recompute: Whether the backward runs the forward of every block again before it computes gradients.
        """
        trace = Trace(tuple(forward), ())
        finished = dict.fromkeys(unit for phase, unit in reversed(trace.forward) if phase is Phase.POST_FORWARD)
        enclosing = trace.enclosing if trace.forward else frozenset[int]()
        backward: list[Moment] = []
        for group in _recomputed_together(tuple(finished), units if recompute else ()):
            # The backward reaches the output of the last unit, which starts the recomputation of the whole group.
            backward += [(Phase.PRE_BACKWARD, unit) for unit in (group[0], *reversed(group[1:]))]
            for unit in group:
                if unit not in enclosing:
                    backward += _gradients(unit, weight_first=bool(units) and units[unit].weight_first)
        for unit in finished:
            if unit in enclosing:
                backward += _gradients(unit, weight_first=False)
        return Trace(trace.forward, tuple(backward))

    def events(self, micro_batch: int) -> Iterator[Event]:
        """The events of a micro-batch, in order."""
        for phase, unit in (*self.forward, *self.backward, (Phase.BACKWARD_END, -1)):
            yield Event(phase, unit, micro_batch)

    @property
    def needed(self) -> tuple[int, ...]:
        """Units in the order in which the forward needs them, repeats included."""
        return tuple(unit for phase, unit in self.forward if phase is Phase.PRE_FORWARD)

    @property
    def needed_again(self) -> tuple[int, ...]:
        """Units in the order in which the backward first needs them."""
        return tuple(unit for phase, unit in self.backward if phase is Phase.PRE_BACKWARD)

    @property
    def reduction_order(self) -> tuple[int, ...]:
        """Units in the order in which every rank reduces their gradients: the reverse of the forward."""
        return tuple(reversed(tuple(dict.fromkeys(self.needed))))

    @property
    def tail(self) -> frozenset[int]:
        """Units that finish their forward after the last unit began. The backward needs them first."""
        last = max((i for i, (phase, _) in enumerate(self.forward) if phase is Phase.PRE_FORWARD), default=0)
        return frozenset(unit for _, unit in self.forward[last:])

    @property
    def enclosing(self) -> frozenset[int]:
        """Units of the tail that began before the last unit of the tail."""
        return self.tail - frozenset(self.needed[-1:])  # none, if a backward in the forward has ended a micro-batch


def _gradients(unit: int, *, weight_first: bool) -> list[Moment]:
    """A unit's moments from its gradients on."""
    between = [(Phase.INPUT_GRADIENT, unit)] if weight_first else []
    return [(Phase.GRADS_READY, unit), *between, (Phase.POST_BACKWARD, unit)]


def _recomputed_together(finished: Sequence[int], units: Sequence[UnitInfo]) -> list[tuple[int, ...]]:
    """Cut units, in the order of the backward, into groups whose forward runs again as a whole: blocks if ``units``
    describes them, otherwise single units."""
    if not units:
        return [(unit,) for unit in finished]
    return [tuple(group) for _, group in itertools.groupby(finished, lambda unit: units[unit].block)]


@dataclass(frozen=True, slots=True)
class Call:
    """What depends on neither the size nor the time of an operation.

    Attributes:
        kind: Kind of the collective.
        lane: The queue that the operation runs on; operations of a lane run in program order.
        axis: Axis of the mesh that the operation runs along.
        units: Units whose data the operation transfers, in the order of its vector.
        encoded: Whether the plan's codecs apply to the data.
        stored: Codec of the messages that ranks keep, which a gather of them carries and decodes.
        buffers: Flat buffers that a gather or a spread carries, in the order of its vector: pairs of a unit and the
            number of the unit's buffer; empty for other operations.
        bucket: Units whose gradients are reduced as one vector, of which the operation carries a chunk; empty for
            other operations.
        chunk: Number of the operation's chunk, from 0.
        chunks: Number of chunks of the vector.
        delay: Number of steps that end before computation waits for the operation, at the event of its waits.
        size: Bytes that a copy between device and host moves, elements that an update changes, or elements that a
            gather of what ranks keep encoded decodes.
    """

    kind: Kind
    lane: AnyLane
    axis: Axis
    units: tuple[int, ...]
    encoded: bool = False
    stored: CodecSpec | None = None
    buffers: tuple[BufferKey, ...] = ()
    bucket: tuple[int, ...] = ()
    chunk: int = 0
    chunks: int = 1
    delay: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Call):
    """One collective of the step, or one part of the update of states that live on the host.

    Attributes:
        index: Position in ``StepProgram.operations``.
        hops: The exchanges of the operation, with the bytes that this rank sends in each.
        start: Event that starts the operation.
        after: Operations on other lanes whose results the operation needs. A spread in this list belongs to the
            previous step.
    """

    index: int
    hops: tuple[Hop, ...]
    start: Event
    after: tuple[int, ...] = ()

    def sent(self, scope: Scope) -> int:
        """Bytes that this rank sends inside its node or across nodes."""
        return sum(hop.sent for hop in self.hops if hop.scope is scope)


@dataclass(frozen=True)
class StepProgram:
    """The ordered operations of one step in steady state.

    The program is a cycle: spreads start at the ``STEP`` event, and the next step's first gathers (or pre-forwards)
    wait for them.

    Attributes:
        units: Units that the program was lowered for.
        micro_batches: Forward and backward passes per step.
        operations: Every collective, in the order in which a rank starts them.
        waits: Operations that computation waits for, by event. Computation first starts the event's own operations. It
            waits for each operation once.
        frees: Units whose gathered parameters are freed, by event.
    """

    units: tuple[UnitInfo, ...]
    micro_batches: int
    operations: tuple[Operation, ...]
    waits: Mapping[Event, tuple[int, ...]] = field(default_factory=dict)
    frees: Mapping[Event, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def _starts(self) -> dict[Event, tuple[Operation, ...]]:
        table: dict[Event, list[Operation]] = {}
        for operation in self.operations:
            table.setdefault(operation.start, []).append(operation)
        return {event: tuple(operations) for event, operations in table.items()}

    def starts(self, event: Event) -> tuple[Operation, ...]:
        """Operations that start at ``event``, in order."""
        return self._starts.get(event, ())

    def traffic(self) -> dict[Lane, dict[Scope, int]]:
        """Bytes that this rank sends per step, by lane and scope."""
        total = {lane: dict.fromkeys(Scope, 0) for lane in Lane}
        for operation in self.operations:
            for hop in operation.hops:
                if isinstance(operation.lane, Lane):
                    total[operation.lane][hop.scope] += hop.sent
        return total


def beside(rest: StepProgram, experts: StepProgram, units: Sequence[UnitInfo]) -> StepProgram:
    """The program of a model whose experts neighbouring ranks share: that of the experts beside that of the rest.

    The runtime performs two programs, one over all data-parallel ranks and one over those that hold the same experts,
    each with units numbered among themselves. They meet at the end of the backward and of the step. Spreads start in
    the order of the forward.
    """
    places = [[number for number, unit in enumerate(units) if unit.experts is flag] for flag in (False, True)]
    first = len(rest.operations)
    joined = [_moved(op, places[0], 0) for op in rest.operations]
    joined += [_moved(op, places[1], first) for op in experts.operations]
    # Only the order of spreads matters: lanes perform operations as they start, and these start at one event.
    spreads = [op for op in joined if op.lane is Lane.SPREAD]
    others = [op for op in joined if op.lane is not Lane.SPREAD]
    ordered = [*others, *sorted(spreads, key=lambda op: op.units[0])]
    numbers = {op.index: number for number, op in enumerate(ordered)}
    operations = tuple(
        replace(op, index=number, after=tuple(numbers[index] for index in op.after))
        for number, op in enumerate(ordered)
    )
    waits: dict[Event, tuple[int, ...]] = {}
    frees: dict[Event, tuple[int, ...]] = {}
    for program, place, offset in ((rest, places[0], 0), (experts, places[1], first)):
        for event, indices in program.waits.items():
            at = _at(event, place)
            waits[at] = (*waits.get(at, ()), *(numbers[index + offset] for index in indices))
        for event, freed in program.frees.items():
            at = _at(event, place)
            frees[at] = (*frees.get(at, ()), *(place[unit] for unit in freed))
    return StepProgram(tuple(units), rest.micro_batches, operations, waits, frees)


def _moved(operation: Operation, places: Sequence[int], offset: int) -> Operation:
    """An operation with the numbers of its units among all units, and of other operations further on."""
    return replace(
        operation,
        index=operation.index + offset,
        units=tuple(places[unit] for unit in operation.units),
        start=_at(operation.start, places),
        after=tuple(index + offset for index in operation.after),
        buffers=tuple((places[unit], number) for unit, number in operation.buffers),
        bucket=tuple(places[unit] for unit in operation.bucket),
    )


def _at(event: Event, places: Sequence[int]) -> Event:
    return event if event.unit < 0 else event._replace(unit=places[event.unit])
