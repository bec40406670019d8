"""A program under construction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from thinwire.program.mesh import Axis, Hop, Kind, MessageSizes, axis_index, axis_stride, hops
from thinwire.program.shares import Even
from thinwire.program.step import Call, Event, HostLane, Lane, Operation, StepProgram, UnitInfo
from thinwire.program.wire import axis_shape
from thinwire.spec import Plan


class Draft:
    """A program under construction: operations so far, and the operations and units that events wait for and free."""

    def __init__(self, plan: Plan, position: int) -> None:
        self.operations: list[Operation] = []
        self._waits: dict[Event, list[int]] = {}
        self._frees: dict[Event, list[int]] = {}
        self._waited: set[int] = set()
        self._first_gathers: dict[int, list[int]] = {}  # unit -> the operations of its first gather in the step
        self._shapes = {axis: axis_shape(plan, axis) for axis in Axis}
        self._strides = {axis: axis_stride(plan, axis) for axis in Axis}
        self._hops_of: dict[tuple[Kind, Axis, Even, MessageSizes], tuple[Hop, ...]] = {}
        self.places = {axis: axis_index(plan, axis, position) for axis in Axis}

    def extent(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return math.prod(self._shapes[axis])

    def add(
        self,
        call: Call,
        parts: Sequence[tuple[int | Sequence[int], MessageSizes]],
        start: Event,
        after: tuple[int, ...] = (),
    ) -> int:
        """Add an operation on vectors whose messages travel as one; returns its index.

        Args:
            call: What the operation is.
            parts: For each vector, its elements and the sizes of its messages: a number of elements, which the members
                of the axis cut evenly, or that of each member's piece.
            start: Event that starts it.
            after: Operations whose results it needs.
        """
        of_parts = [self._hops(call, pieces, sizes) for pieces, sizes in parts]
        joint = of_parts[0]
        if len(of_parts) > 1:
            joint = tuple(replace(same[0], sent=sum(hop.sent for hop in same)) for same in zip(*of_parts, strict=True))
        return self.record(call, start, after, joint)

    def _hops(self, call: Call, pieces: int | Sequence[int], sizes: MessageSizes) -> tuple[Hop, ...]:
        axis = call.axis
        if isinstance(pieces, int):
            pieces = Even(pieces // self.extent(axis), self.extent(axis))
        # Blocks repeat. Sizes are compared by their functions, which are made once for each codec.
        key = (call.kind, axis, pieces, sizes) if isinstance(pieces, Even) else None
        if key is not None and key in self._hops_of:
            return self._hops_of[key]
        made = hops(call.kind, *self._shapes[axis], pieces, self.places[axis], sizes, self._strides[axis])
        if key is not None:
            self._hops_of[key] = made
        return made

    def record(self, call: Call, start: Event, after: tuple[int, ...] = (), hops: tuple[Hop, ...] = ()) -> int:
        """Add an operation with these hops; without any, no other rank takes part."""
        index = len(self.operations)
        fields = {name: getattr(call, name) for name in Call.__slots__}
        self.operations.append(Operation(**fields, index=index, hops=hops, start=start, after=after))
        gathers = call.lane is Lane.GATHER or (call.lane is HostLane.UP and call.axis is Axis.PARAMS)
        for unit in call.units if gathers else ():
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
        return StepProgram(
            units=tuple(units),
            micro_batches=micro_batches,
            operations=tuple(self.operations),
            waits={event: tuple(indices) for event, indices in self._waits.items()},
            frees={event: tuple(freed) for event, freed in self._frees.items()},
        )
