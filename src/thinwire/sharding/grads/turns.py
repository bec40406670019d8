"""The reductions of a backward, cut into turns: what happens when it is a unit's turn to be reduced.

Every rank reduces units in the same order. At an event, several units may be ready at once, or none, and autograd may
deliver gradients in another order than in the trace. The program is therefore cut into *turns*, one for each unit. A
turn stays valid at whatever event it comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.program import Event, Lane, Operation, StepProgram

_REDUCTIONS = (Lane.REDUCE, Lane.SYNC)


@dataclass(frozen=True, slots=True)
class ReductionTurn:
    """The actions of one unit's turn.

    Attributes:
        starts: Reductions to start, in order.
        waits: Reductions that computation then waits for, counted back from the newest one, which is 0. Unlike indices
            of operations, these counts are the same in every micro-batch.
        finishes: Units whose gradients take part in no later reduction of this micro-batch.
        continued: Indices of operations in ``starts`` whose results another reduction takes on.
    """

    starts: tuple[Operation, ...] = ()
    waits: tuple[int, ...] = ()
    finishes: tuple[int, ...] = ()
    continued: frozenset[int] = frozenset()


def reduction_turns(program: StepProgram, micro_batch: int, order: Sequence[int]) -> Mapping[int, ReductionTurn]:
    """Cut the reductions of one micro-batch into turns.

    Args:
        program: Program of a step.
        micro_batch: Number of the micro-batch.
        order: Trainable units, in reduction order.

    Returns:
        The turn of each of these units, in reduction order.
    """
    reductions = [op for op in program.operations if op.lane in _REDUCTIONS]
    position = {op.index: number for number, op in enumerate(reductions)}
    mine = [op for op in reductions if op.start.micro_batch == micro_batch]
    starts: dict[int, list[Operation]] = {unit: [] for unit in order}
    place = {unit: number for number, unit in enumerate(order)}
    turns: dict[int, int] = {}  # operation -> the unit in whose turn it starts
    turn_of: dict[int, int] = {}  # unit -> the unit in whose turn its last reduction starts
    closing: dict[Event, tuple[int, int]] = {}  # event -> the last turn taken at it, and that turn's newest reduction
    for op in mine:
        # A reduction starts when the last of its gradients exist, and those before it that it takes on have started.
        before = (turns[index] for index in op.after if index in turns)
        turn = turns[op.index] = max((op.units[-1], *before), key=place.__getitem__)
        starts[turn].append(op)
        turn_of.update(dict.fromkeys(op.units, turn))
        closing[op.start] = turn, position[op.index]
    waits = {
        turn: tuple(newest - position[index] for index in program.waits.get(event, ()) if index in position)
        for event, (turn, newest) in closing.items()
    }
    finishes: dict[int, list[int]] = {}
    for unit in starts:
        finishes.setdefault(turn_of.get(unit, unit), []).append(unit)
    taken_on = {index for op in mine for index in op.after}
    return {
        unit: ReductionTurn(
            tuple(operations),
            waits.get(unit, ()),
            tuple(finishes.get(unit, ())),
            frozenset(op.index for op in operations if op.index in taken_on),
        )
        for unit, operations in starts.items()
    }
