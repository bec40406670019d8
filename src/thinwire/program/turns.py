"""The reductions of a backward, cut into turns: what happens when it is a unit's turn to be reduced.

Every rank reduces units in the same order. At an event, several units may be ready at once, or none, and autograd may
deliver gradients in another order than in the trace. The program is therefore cut into *turns*, one for each unit. A
turn stays valid at whatever event it comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinwire.program.mesh import Axis
from thinwire.program.step import Event, Lane, Operation, StepProgram

__all__ = ["ReductionTurn", "reduction_turns"]

_REDUCTIONS = (Lane.REDUCE, Lane.SYNC)


@dataclass(frozen=True, slots=True)
class ReductionTurn:
    """The actions of one unit's turn.

    Attributes:
        starts: Reductions to start, in order.
        waits: Reductions that computation then waits for, counted back from the newest one, which is 0. Unlike indices
            of operations, these counts are the same in every micro-batch.
        settles: Units whose gradients take part in no later reduction of this micro-batch.
    """

    starts: tuple[Operation, ...] = ()
    waits: tuple[int, ...] = ()
    settles: tuple[int, ...] = ()


def reduction_turns(
    program: StepProgram, micro_batch: int, closed: Sequence[tuple[int, ...]]
) -> Mapping[int, ReductionTurn]:
    """Cut the reductions of one micro-batch into turns.

    Args:
        program: Program of a step.
        micro_batch: Number of the micro-batch.
        closed: Buckets of trainable units, in reduction order.

    Returns:
        The turn of each of these units, in reduction order.
    """
    reductions = [op for op in program.operations if op.lane in _REDUCTIONS]
    position = {op.index: number for number, op in enumerate(reductions)}
    mine = [op for op in reductions if op.start.micro_batch == micro_batch]
    starts: dict[int, list[Operation]] = {unit: [] for bucket in closed for unit in bucket}
    closes = {unit: bucket[-1] for bucket in closed for unit in bucket}
    turn_of: dict[int, int] = {}  # unit -> the unit in whose turn its last reduction starts
    closing: dict[Event, tuple[int, int]] = {}  # event -> the last turn taken at it, and that turn's newest reduction
    for op in mine:
        # A bucket is reduced in the turn of its last unit.
        turn = op.units[0] if op.axis is Axis.PARAMS else closes[op.units[0]]
        starts[turn].append(op)
        turn_of.update(dict.fromkeys(op.units, turn))
        closing[op.start] = turn, position[op.index]
    waits = {
        turn: tuple(newest - position[index] for index in program.waits.get(event, ()) if index in position)
        for event, (turn, newest) in closing.items()
    }
    settles: dict[int, list[int]] = {}
    for unit in starts:
        settles.setdefault(turn_of.get(unit, unit), []).append(unit)
    return {
        unit: ReductionTurn(tuple(starts[unit]), waits.get(unit, ()), tuple(settles.get(unit, ()))) for unit in starts
    }
