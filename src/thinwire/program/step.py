"""The program of one step: which operation starts at which event, on which lane, and what waits for it.

A :class:`StepProgram` is what a plan *means* for a given list of units. The simulator prices it, the runtime performs
it, and a test holds the one against the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from thinwire.program.mesh import Axis, Hop, Kind, Scope
from thinwire.program.shares import compact

__all__ = ["BufferInfo", "Event", "Lane", "Moment", "Operation", "Phase", "StepProgram", "Trace", "UnitInfo"]


class Lane(StrEnum):
    """An in-order queue of communication with process groups of its own."""

    GATHER = "gather"
    REDUCE = "reduce"
    SYNC = "sync"
    SPREAD = "spread"
    CONTROL = "control"


class Phase(StrEnum):
    """What happens to a unit, or to the whole model when an event names no unit."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    GRADS_READY = "grads_ready"
    """The last gradient of the unit's parameters exists."""
    POST_BACKWARD = "post_backward"
    """Nothing reads the unit's parameters any more in this backward."""
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
        numel: padded length in elements; every factor of the plan divides it.
        itemsize: bytes of one element in compute dtype.
        trainable: whether gradients and optimizer states exist for it.
        shares: elements of each member's part of this rank's ``P`` shard along the shard axis, in axis order.
        encoded: whether the plan's codecs apply to it.
    """

    numel: int
    itemsize: int
    trainable: bool
    shares: Sequence[int]
    encoded: bool = True

    def __post_init__(self) -> None:
        # One form for equal content, and a small one for many ranks.
        object.__setattr__(self, "shares", compact(self.shares))


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """What the program must know of a unit.

    Attributes:
        name: dotted module name; empty for the root.
        buffers: its flat buffers.
        parameters: number of trainable parameters (tensors).
        block: number of the block it belongs to; units of a block are prefetched together under
            ``granularity = "module"``.
        keeps_gathered: whether it stays gathered from its forward to its backward by an exception of the plan;
            ``None`` follows ``keep_gathered``.
    """

    name: str
    buffers: tuple[BufferInfo, ...]
    parameters: int
    block: int
    keeps_gathered: bool | None = None

    @property
    def trainable(self) -> bool:
        """Whether any buffer has gradients."""
        return any(buffer.trainable for buffer in self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters when they are gathered."""
        return sum(buffer.numel * buffer.itemsize for buffer in self.buffers)


Moment = tuple[Phase, int]
"""An event of any one micro-batch: its phase and its unit."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The order in which the units of one micro-batch ran. Prefetching follows it.

    Attributes:
        forward: moments of phases ``PRE_FORWARD`` and ``POST_FORWARD``.
        backward: moments of phases ``PRE_BACKWARD`` (when backward first needs a unit), ``GRADS_READY`` and
            ``POST_BACKWARD``. A unit without one of the latter two is reduced, or freed, when the backward ends.
    """

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]

    @staticmethod
    def of_forward(forward: Iterable[Moment]) -> Trace:
        """A trace whose backward runs against the order in which units finished their forward.

        Units that enclose others have their gradients at the end of the backward.
        """
        trace = Trace(tuple(forward), ())
        finished = dict.fromkeys(unit for phase, unit in reversed(trace.forward) if phase is Phase.POST_FORWARD)
        enclosing = trace.enclosing if trace.forward else frozenset[int]()
        backward: list[Moment] = []
        for unit in finished:
            backward.append((Phase.PRE_BACKWARD, unit))
            if unit not in enclosing:
                backward += [(Phase.GRADS_READY, unit), (Phase.POST_BACKWARD, unit)]
        for unit in finished:
            if unit in enclosing:
                backward += [(Phase.GRADS_READY, unit), (Phase.POST_BACKWARD, unit)]
        return Trace(trace.forward, tuple(backward))

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
        """Units in the one order in which their gradients are reduced, on every rank: against the forward."""
        return tuple(reversed(tuple(dict.fromkeys(self.needed))))

    @property
    def tail(self) -> frozenset[int]:
        """Units that finish their forward after the last unit began: backward needs them first."""
        last = max((i for i, (phase, _) in enumerate(self.forward) if phase is Phase.PRE_FORWARD), default=0)
        return frozenset(unit for _, unit in self.forward[last:])

    @property
    def enclosing(self) -> frozenset[int]:
        """Units of the tail that began before its last one."""
        return self.tail - {self.needed[-1]}


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective of the step.

    Attributes:
        index: position in ``StepProgram.operations``.
        kind: what it does.
        lane: the queue it runs on; operations of a lane run in program order.
        axis: the direction of the mesh.
        units: the units whose data it carries.
        hops: what this rank sends, inside and across nodes.
        start: the event that starts it.
        after: operations on other lanes whose result it needs. Spreads among them are those of the step before.
        encoded: whether the plan's codecs apply to what it carries.
    """

    index: int
    kind: Kind
    lane: Lane
    axis: Axis
    units: tuple[int, ...]
    hops: tuple[Hop, ...]
    start: Event
    after: tuple[int, ...] = ()
    encoded: bool = False

    def sent(self, scope: Scope) -> int:
        """Bytes this rank sends inside its node or across nodes."""
        return sum(hop.sent for hop in self.hops if hop.scope is scope)


@dataclass(frozen=True)
class StepProgram:
    """The ordered operations of one step in steady state.

    The program is a cycle: parameter spreads start at the ``STEP`` event and the next step's first gathers (or
    pre-forwards) wait for them.

    Attributes:
        units: the units it was lowered for.
        micro_batches: forward/backward passes of the step.
        operations: every collective, in the order in which one rank starts them.
        waits: operations that computation waits for at an event, after it has started what starts there. Each
            operation is waited for once.
        frees: units whose gathered parameters are freed at an event.
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
        """Bytes this rank sends per step, by lane and scope."""
        total = {lane: dict.fromkeys(Scope, 0) for lane in Lane}
        for operation in self.operations:
            for hop in operation.hops:
                total[operation.lane][hop.scope] += hop.sent
        return total
