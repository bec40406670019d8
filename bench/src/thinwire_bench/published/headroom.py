"""Little room in an engine's buffers: what does not fit ahead of its use is sent when computation waits for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.program import Axis, Event, Lane, Operation, Phase, StepProgram


@dataclass(frozen=True, slots=True)
class Headroom:
    """What an engine's buffers have room for, as shares of a block.

    Attributes:
        ahead: Share of the next unit's parameters that is gathered while a unit of the forward computes. The rest, and
            in the backward all, is gathered when it is needed. 1: gathers start as early as in the program.
        bucket: Share of a unit's gradients that waits in a bucket until the next unit of the backward is gathered, and
            is reduced while that unit computes. Computation waits for the rest. ``None``: every reduction starts as
            soon as its gradients exist, and nothing waits for it.
        crossing: Share of what the backward gathers from a second shard that is gathered over all ranks instead,
            because hooks of the repeated forward ask for it.
    """

    ahead: float = 1.0
    bucket: float | None = None
    crossing: float = 0.0

    def revised(self, program: StepProgram) -> StepProgram:
        """The program with operations that start ahead only as far as there is room."""
        return _split_reductions(_split_gathers(_over_all_ranks(program, self), self), self)


def _over_all_ranks(program: StepProgram, room: Headroom) -> StepProgram:
    """The program with a share of each gather from a second shard over all ranks."""
    if room.crossing <= 0:
        return program
    whole = {op.units: op for op in program.operations if op.lane is Lane.GATHER and op.axis is Axis.PARAMS}
    operations, waits = list(program.operations), dict(program.waits)
    for event, awaited in program.waits.items():
        for operation in map(program.operations.__getitem__, awaited):
            if operation.lane is not Lane.GATHER or operation.axis is not Axis.SECONDARY:
                continue
            operations[operation.index] = _scaled(operation, 1 - room.crossing)
            rest = _scaled(whole[operation.units], room.crossing)
            _add(operations, waits, rest, start=operation.start, awaited_at=event)
    return replace(program, operations=tuple(operations), waits=waits)


def _split_gathers(program: StepProgram, room: Headroom) -> StepProgram:
    """The program with gathers of parameters that start ahead only as far as there is room, and only in the forward;
    the rest of a gather starts when its unit is needed."""
    if room.ahead >= 1:
        return program
    operations, waits = list(program.operations), dict(program.waits)
    for event, awaited in program.waits.items():
        for operation in map(program.operations.__getitem__, awaited):
            if operation.lane is not Lane.GATHER or operation.start == event:
                continue
            if event.phase is not Phase.PRE_FORWARD or room.ahead <= 0:
                operations[operation.index] = replace(operation, start=event)
                continue
            operations[operation.index] = _scaled(operation, room.ahead)
            _add(operations, waits, _scaled(operation, 1 - room.ahead), start=event, awaited_at=event)
    return replace(program, operations=tuple(operations), waits=waits)


def _split_reductions(program: StepProgram, room: Headroom) -> StepProgram:
    """The program with each reduction over the parameters' shards in two: computation waits for what overflows."""
    overflow = 0.0 if room.bucket is None else 1 - room.bucket
    operations, waits = list(program.operations), dict(program.waits)
    for operation in program.operations if overflow > 0 else ():
        if operation.lane is not Lane.REDUCE or operation.axis is not Axis.PARAMS:
            continue
        operations[operation.index] = _scaled(operation, 1 - overflow)
        _add(operations, waits, _scaled(operation, overflow), start=operation.start, awaited_at=operation.start)
    return replace(program, operations=tuple(operations), waits=waits)


def _add(
    operations: list[Operation],
    waits: dict[Event, tuple[int, ...]],
    share: Operation,
    *,
    start: Event,
    awaited_at: Event,
) -> None:
    """Add a share of an operation as one of its own. What hosts and accelerators do for its units, and their memory,
    count once, with the other share."""
    waits[awaited_at] = (*waits.get(awaited_at, ()), len(operations))
    operations.append(replace(share, index=len(operations), start=start, units=(), buffers=(), bucket=()))


def _scaled(operation: Operation, share: float) -> Operation:
    """A share of an operation's bytes."""
    return replace(operation, hops=tuple(replace(hop, sent=round(hop.sent * share)) for hop in operation.hops))
