"""The program of a backward as the runtime performs it: what happens when it is a unit's turn to be reduced.

Units are reduced in one order on every rank. An event may find several units ready at once, or none, and autograd may
deliver gradients in another order than it did when the trace was taken. The program is therefore cut into *turns*, one
for each unit, which hold in whatever event a unit's turn comes.
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
    """What happens when it is a unit's turn to be reduced.

    Attributes:
        starts: reductions that start, in order.
        waits: reductions that computation then waits for, counted back from the newest one, which is 0. A count holds
            in every micro-batch, whatever the index of the operation.
        settles: units whose gradients take part in no later reduction of this micro-batch.
    """

    starts: tuple[Operation, ...] = ()
    waits: tuple[int, ...] = ()
    settles: tuple[int, ...] = ()


def reduction_turns(
    program: StepProgram, micro_batch: int, closed: Sequence[tuple[int, ...]]
) -> Mapping[int, ReductionTurn]:
    """Cut the reductions of one micro-batch into turns.

    Args:
        program: the program of a step.
        micro_batch: which of its micro-batches.
        closed: the buckets that trainable units are reduced in, in order.

    Returns:
        The turn of each of these units, in order.
    """
    reductions = [op for op in program.operations if op.lane in _REDUCTIONS]
    position = {op.index: number for number, op in enumerate(reductions)}
    mine = [op for op in reductions if op.start.micro_batch == micro_batch]
    starts: dict[int, list[Operation]] = {unit: [] for bucket in closed for unit in bucket}
    closes = {unit: bucket[-1] for bucket in closed for unit in bucket}
    turn_of: dict[int, int] = {}  # unit -> the unit in whose turn its last reduction starts
    closing: dict[Event, tuple[int, int]] = {}  # event -> the last turn that it takes, and its newest reduction
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
