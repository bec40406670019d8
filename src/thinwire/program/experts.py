"""The program of a model whose experts neighbouring ranks share: that of the experts beside that of the rest.

The runtime performs two programs, one over all data-parallel ranks and one over those that hold the same experts. They
meet at the end of the backward and of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from thinwire.program.step import Event, Lane, Operation, StepProgram, UnitInfo


def beside(rest: StepProgram, experts: StepProgram, units: Sequence[UnitInfo]) -> StepProgram:
    """Join the programs of the units that are no experts and of those that are, each numbered among themselves. Spreads
    start in the order of the forward."""
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
        _add(waits, program.waits, place, partial(_number, numbers, offset))
        _add(frees, program.frees, place, place.__getitem__)
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


def _number(numbers: Mapping[int, int], offset: int, index: int) -> int:
    return numbers[index + offset]


def _at(event: Event, places: Sequence[int]) -> Event:
    return event if event.unit < 0 else event._replace(unit=places[event.unit])


def _add(
    table: dict[Event, tuple[int, ...]],
    more: Mapping[Event, tuple[int, ...]],
    places: Sequence[int],
    moved: Callable[[int], int],
) -> None:
    """Add a program's table to a table of both."""
    for event, members in more.items():
        at = _at(event, places)
        table[at] = (*table.get(at, ()), *map(moved, members))
