"""Writes the script of a program: turns its operations into references, and equal blocks into repeated sections."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thinwire.cost import ModelPart, PricedStage, Rates
from thinwire.program import UNDER_WAY, Even, Event, Kind, Lane, Phase, StepProgram, UnitInfo, default_trace, together
from thinwire.program.stages import Stage
from thinwire.program.step import Moment
from thinwire.sim.repetition import Repeated, work_of
from thinwire.sim.script import (
    ACTIVATIONS,
    GATHERED,
    Compute,
    Execution,
    Hold,
    Instruction,
    Pricing,
    Ref,
    Script,
    Section,
    Sections,
    StartedOperation,
    StartOperations,
    UpdateParameters,
    Wait,
    Workload,
    part_seconds,
)
from thinwire.spec import Plan

__all__ = ["write"]


def write(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    program: StepProgram,
    execution: Execution,
    *,
    trace: bool = False,
    fewer: Repeated | None = None,
) -> Script | None:
    """Write the script of a program.

    Args:
        plan: The plan.
        workload: Work of the whole model.
        rates: Seconds of each part.
        program: Program of the step, lowered for the blocks that ``fewer`` leaves.
        execution: How the engine performs it.
        trace: Whether instructions carry names and memory levels.
        fewer: The blocks that are repeated; ``None``: the program has all of them.

    Returns:
        The script; ``None`` if the blocks that are to be repeated differ from those before them.
    """
    writer = _Writer(plan, workload, rates, program, execution, trace, fewer)
    try:
        return writer.script()
    except _Differs:
        return None


class _Differs(Exception):
    """The blocks that are to be repeated differ from those before."""


@dataclass(frozen=True, slots=True)
class _Raw:
    """Operations of the program to start or to wait for, by index."""

    operations: tuple[int, ...]
    starts: bool


_RawInstruction = Compute | Hold | _Raw


@dataclass(eq=False)
class _Writer:
    """Writes a script: turns the operations of a program into references."""

    _plan: Plan
    _whole: Workload
    _rates: Rates
    _program: StepProgram
    _execution: Execution
    _trace: bool
    _fewer: Repeated | None

    def __post_init__(self) -> None:
        self._workload = self._whole if self._fewer is None else self._fewer.workload
        self._moves = _memoised_moves(self._plan, self._program, self._execution.pricing)
        self._counts = dict.fromkeys(Lane, 0)
        self._numbers: dict[int, int] = {}  # operation -> its number in its lane
        self._updates = {} if self._whole.clip else _updates(self._workload, self._rates, self._program)
        self._final = set(_last_reductions(self._program).values())

    def script(self) -> Script:
        """The script of the step."""
        program, workload, rates = self._program, self._workload, self._rates
        trace = default_trace(workload.units, recompute=self._plan.recompute)
        seq, plan = workload.seq, self._plan
        same: dict[object, tuple[float, float]] = {}
        seconds = []
        exchanges = workload.exchanges or (0.0,) * len(workload.parts)
        for unit, part, exchange in zip(workload.units, workload.parts, exchanges, strict=True):
            key = work_of(unit, part)
            if key not in same:
                same[key] = part_seconds(rates, part, plan, seq, exchange)
            seconds.append((*same[key], part, unit))
        forward = [times[0] for times in seconds]
        backward = [_Backward.of(*times, plan, seq) for times in seconds]
        begin = self._begin()
        forwards, backwards = [], []
        for micro_batch in range(program.micro_batches):
            cells = self._cells(trace.forward, self._forward, forward, micro_batch)
            forwards.append(self._sections(cells, after=plan.prefetch + 1, spreads=micro_batch == 0))
            held: list[int] = []  # reductions that start once the next unit is gathered
            cells = self._cells(trace.backward, self._backward, backward, micro_batch, held)
            end = [_Raw(tuple(held), starts=True), *self._reach(Event(Phase.BACKWARD_END, -1, micro_batch))]
            cells.append((-1, list(self._resolved(end))))
            backwards.append(self._sections(cells, after=UNDER_WAY + 1, spreads=False))
        return Script(begin, forwards, backwards, [Section(self._end())], program.units)

    def _begin(self) -> Sections:
        """The spread of updated parameters, and the fixed seconds of a step."""
        event = Event(Phase.STEP, -1, 0)
        spreads = tuple(op.index for op in self._program.starts(event) if op.lane is Lane.SPREAD)
        start = self._started(spreads)
        awaited = [i for i in self._program.waits.get(event, ()) if self._program.operations[i].lane is Lane.SPREAD]
        rest = (Wait(self._refs(awaited)), Compute(self._rates.handling.step, "step"))
        if self._fewer is None or not self._per_block:
            return [Section((start, *rest))]
        every = self._fewer.period * self._per_block
        first = next(n for n, index in enumerate(spreads) if self._block(self._program.operations[index].units[0]) >= 0)
        middle = first + every
        before, again, after = start.launches[:middle], start.launches[middle : middle + every], start.launches[middle:]
        if again != start.launches[first:middle]:
            raise _Differs
        return [
            Section((StartOperations(before),)),
            Section((StartOperations(again),), self._fewer.times),
            Section((StartOperations(after), *rest)),
        ]

    @property
    def _per_block(self) -> int:
        """Spreads of each repeated block."""
        assert self._fewer is not None
        blocks = self._fewer.blocks
        spreads = [op for op in self._program.operations if op.lane is Lane.SPREAD]
        return sum(self._program.units[op.units[0]].block in blocks for op in spreads) // len(blocks)

    def _end(self) -> tuple[Instruction, ...]:
        """Update each unit when its gradients arrive, or all units after the exchange of the norm."""
        control = tuple(op.index for op in self._program.starts(Event(Phase.STEP, -1, 0)) if op.lane is Lane.CONTROL)
        start = self._started(control)
        wait = Wait(self._refs(control))
        everything = self._rates.update(sum(_update_shares(self._whole.units)))
        if self._whole.clip:
            return start, UpdateParameters(None), wait, Compute(everything, "update")
        if not self._final:
            return start, Compute(everything, "update"), wait
        return start, UpdateParameters(everything), wait

    # -- passes ------------------------------------------------------------------------------------------------

    def _block(self, unit: int) -> int:
        """Number of the repeated block that a unit belongs to; -1 for none."""
        block = self._program.units[unit].block
        return block if self._fewer is not None and block in self._fewer.blocks else -1

    def _cells(
        self, moments: Sequence[Moment], of_moment: Callable[..., Iterable[_RawInstruction]], *rest: Any
    ) -> list[tuple[int, list[Instruction]]]:
        """The instructions of a pass, ``of_moment(moment, *rest)``, block by block; -1 stands for units that are not
        repeated."""
        cells: list[tuple[int, list[Instruction]]] = []
        for moment in moments:
            block = self._block(moment[1])
            if not cells or cells[-1][0] != block:
                cells.append((block, []))
            cells[-1][1].extend(self._resolved(of_moment(moment, *rest)))
        return cells

    def _sections(self, cells: Sequence[tuple[int, list[Instruction]]], *, after: int, spreads: bool) -> Sections:
        """A pass with the missing periods, which follow the first two equal ones after ``after`` periods."""
        fewer = self._fewer
        if fewer is None:
            return [Section(tuple(itertools.chain.from_iterable(cell for _, cell in cells)))]
        first = next(index for index, (block, _) in enumerate(cells) if block >= 0)
        period, shift = fewer.period, fewer.period * self._per_block if spreads else 0
        begin = first + after * period
        before, again = cells[begin - period : begin], cells[begin : begin + period]
        if len(again) < period or any(block < 0 for block, _ in again):
            raise _Differs
        for (_, one), (_, other) in zip(before, again, strict=True):
            if one != [_further(instruction, -shift) for instruction in other]:
                raise _Differs
        parts = cells[:begin], again, cells[begin + period :]
        joined = [tuple(itertools.chain.from_iterable(cell for _, cell in part)) for part in parts]
        return [Section(joined[0]), Section(joined[1], 1 + fewer.times, shift), Section(joined[2])]

    def _forward(self, moment: Moment, seconds: Sequence[float], micro_batch: int) -> Iterator[_RawInstruction]:
        (phase, unit), program, kept = moment, self._program, self._whole.kept
        event, name = Event(phase, unit, micro_batch), program.units[unit].name
        later = self._unawaited(event) if self._execution.needed_first else ()
        yield from self._reach(event, later)
        if later:
            yield _Raw(later, starts=True)
        if phase is Phase.PRE_FORWARD and name:
            yield Compute(seconds[unit], f"forward {name}" if self._trace else "")
            if kept:
                yield Hold(ACTIVATIONS, kept[unit])
        elif phase is Phase.POST_FORWARD and not name:
            yield Compute(seconds[unit], "forward (root)")  # the root's own modules run last: norm, head, loss
            if kept:
                yield Hold(ACTIVATIONS, kept[unit])

    def _backward(
        self, moment: Moment, seconds: Sequence[_Backward], micro_batch: int, held: list[int]
    ) -> Iterator[_RawInstruction]:
        (phase, unit), program, kept = moment, self._program, self._whole.kept
        of_unit, name = seconds[unit], program.units[unit].name
        event, label = Event(phase, unit, micro_batch), f"backward {name or '(root)'}" if self._trace else ""
        if phase is Phase.GRADS_READY and name:
            yield Compute(of_unit.gradients, label)
            if kept:
                yield Hold(ACTIVATIONS, -kept[unit])
        holds = self._execution.holds_reductions and phase is Phase.GRADS_READY
        holding = self._unawaited(event) if holds else ()
        yield from self._reach(event, holding)
        held += holding
        if phase is Phase.PRE_BACKWARD:
            if held:
                yield _Raw(tuple(held), starts=True)
                held.clear()
            yield Compute(of_unit.again, f"forward again {name}" if self._trace else "")
            if not name:  # its own modules ran last, and its gradients are counted as ready when all others are
                yield Compute(of_unit.gradients, label)
                if kept:
                    yield Hold(ACTIVATIONS, -kept[unit])
        elif phase is Phase.INPUT_GRADIENT:
            yield Compute(of_unit.input, f"input gradient {name}" if self._trace else "")

    def _unawaited(self, event: Event) -> tuple[int, ...]:
        """Operations that start at an event and that computation does not wait for there."""
        awaited = self._program.waits.get(event, ())
        return tuple(operation.index for operation in self._program.starts(event) if operation.index not in awaited)

    def _reach(self, event: Event, holding: Sequence[int] = ()) -> Iterator[_RawInstruction]:
        """At an event: start operations but those held, free parameters, and wait for what is needed."""
        program = self._program
        if starts := [operation.index for operation in program.starts(event) if operation.index not in holding]:
            yield _Raw(tuple(starts), starts=True)
        if self._trace:
            for unit in program.frees.get(event, ()):
                yield Hold(GATHERED, -program.units[unit].nbytes)
        if needed := program.waits.get(event):
            yield _Raw(needed, starts=False)

    # -- references --------------------------------------------------------------------------------------------

    def _resolved(self, raw: Iterable[_RawInstruction]) -> Iterator[Instruction]:
        for instruction in raw:
            if isinstance(instruction, _Raw):
                operations = instruction.operations
                yield self._started(operations) if instruction.starts else Wait(self._refs(operations))
            elif not isinstance(instruction, Compute) or instruction.seconds > 0:
                yield instruction

    def _refs(self, operations: Iterable[int]) -> tuple[Ref, ...]:
        lanes = [(self._program.operations[index].lane, self._numbers[index]) for index in operations]
        return tuple((lane, n if lane is Lane.SPREAD else self._counts[lane] - 1 - n) for lane, n in lanes)

    def _started(self, operations: Sequence[int]) -> StartOperations:
        launches = []
        for index in operations:
            operation = self._program.operations[index]
            lane, moves = operation.lane, self._moves[index]
            stages: list[Stage | None] = [move.stage for move in moves]
            if not stages or not self._plan.overlap.stages:
                stages = [None]
            after = self._refs(operation.after)
            update = self._updates.get(index, 0.0) if index in self._final else None
            queues = tuple((lane, stage) for stage in stages)
            launches.append(StartedOperation(lane, moves, after, queues, update, operation))
            self._numbers[index] = self._counts[lane]
            self._counts[lane] += 1
        return StartOperations(tuple(launches))


def _further(instruction: Instruction, spreads: int) -> Instruction:
    """An instruction whose spreads are this much further on."""
    if not spreads:
        return instruction
    if isinstance(instruction, Wait):
        return Wait(_moved(instruction.operations, spreads))
    if isinstance(instruction, StartOperations):
        return StartOperations(tuple(replace(each, after=_moved(each.after, spreads)) for each in instruction.launches))
    return instruction


def _moved(refs: tuple[Ref, ...], spreads: int) -> tuple[Ref, ...]:
    return tuple((lane, number + spreads if lane is Lane.SPREAD else number) for lane, number in refs)


def _memoised_moves(plan: Plan, program: StepProgram, pricing: Pricing) -> list[tuple[PricedStage, ...]]:
    """The stages of every operation. Blocks repeat, so most operations share a price."""
    known: dict[tuple[object, ...], tuple[PricedStage, ...]] = {}
    moves = []
    key: tuple[object, ...]
    for op in program.operations:
        key = (op.kind, op.lane, op.axis, op.hops, op.encoded, op.chunks, len(op.buffers) > 1, len(op.bucket) > 1)
        if op.lane is Lane.GATHER:  # an engine may gather a block twice in the backward
            key += (op.start.phase,)
        if op.lane in (Lane.GATHER, Lane.REDUCE):  # a share of an operation may have no units
            key += (len(op.units),)
        if op.units:
            key += (program.units[op.units[0]].experts,)
        if op.kind is Kind.BROADCAST:  # the sizes of its pieces depend on the units
            key += op.units
        if key not in known:
            known[key] = tuple(pricing(plan, op, program.units))
        moves.append(known[key])
    return moves


@dataclass(frozen=True, slots=True)
class _Backward:
    """Seconds of a unit's backward.

    Attributes:
        again: The forward that recomputation repeats, from the moment the backward needs the unit.
        gradients: From then on, until the gradients of the unit's parameters exist.
        input: The gradient of the unit's input, if it comes after that.
    """

    again: float
    gradients: float
    input: float

    @staticmethod
    def of(forward: float, backward: float, part: ModelPart, unit: UnitInfo, plan: Plan, seq: int) -> _Backward:
        """The seconds of one part under a plan, given those of its forward and its whole backward."""
        again = forward if plan.recompute and part.kind == "block" else 0.0
        first = backward * part.weight_gradient_share(seq) if unit.weight_first else backward
        return _Backward(again, first, backward - first)


# -- the update --------------------------------------------------------------------------------------------------


def _updates(workload: Workload, rates: Rates, program: StepProgram) -> Mapping[int, float]:
    """Seconds of the update of what each operation completes."""
    shares, last = _update_shares(workload.units), _last_reductions(program)
    sizes: dict[int, int] = {}
    for unit, index in last.items():
        sizes[index] = sizes.get(index, 0) + shares[unit]
    return {index: rates.update(size) for index, size in sizes.items()}


def _last_reductions(program: StepProgram) -> dict[int, int]:
    """By unit, the operation that completes its gradients."""
    last: dict[int, int] = {}
    for op in program.operations:
        if op.lane in (Lane.REDUCE, Lane.SYNC):
            last.update(dict.fromkeys(op.units, op.index))
    return last


def _update_shares(units: Sequence[UnitInfo]) -> list[int]:
    """Number of elements in each unit that the rank with the largest share updates."""
    totals = together([buffer.shares for unit in units for buffer in unit.buffers])
    busiest = 0 if isinstance(totals, Even) else totals.index(max(totals))
    return [sum(buffer.shares[busiest] for buffer in unit.buffers) for unit in units]
