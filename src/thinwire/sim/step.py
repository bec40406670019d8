"""Prices a :class:`~thinwire.program.StepProgram` by playing the runtime's operations on a clock.

One rank represents all. It computes, and its lanes perform operations in program order; the stages of a lane run
concurrently. The program is a cycle: a step is played from the update of the previous step to its own update, so that
the spread of updated parameters overlaps its forward. At most three micro-batches are played; the time of further ones
is the difference between three and two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from thinwire.cost import ModelPart, PricedStage, Rates, moves
from thinwire.program import (
    Axis,
    Even,
    Event,
    Kind,
    Lane,
    Operation,
    Phase,
    StepProgram,
    Trace,
    UnitInfo,
    default_trace,
    exchange_operations,
    lower,
    together,
)
from thinwire.program.stages import Stage
from thinwire.program.timeline import COMPUTE, WAITING, Level, Span
from thinwire.sim.clock import FluidClock, Resource
from thinwire.spec import Plan

__all__ = ["Pricing", "Simulated", "Workload", "simulate"]

Pricing = Callable[[Plan, Operation, Sequence[UnitInfo]], list[PricedStage]]
"""Prices an operation of a program over these units; returns its stages."""

GATHERED, GRADIENTS, ACTIVATIONS = "gathered parameters", "gradients on their way", "activations"
"""Names of the memory levels."""

PLAYED = 3
"""Most micro-batches to play; further ones repeat the last of the middle ones."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step on one rank.

    Attributes:
        parts: Parts of the model, in the order of ``units``.
        units: Descriptions of the units for the program.
        seq: Tokens per sequence.
        clip: Whether the update waits for the gradient norm.
        kept: Bytes that each part keeps from its forward to its backward; empty if memory is not simulated.
    """

    parts: tuple[ModelPart, ...]
    units: tuple[UnitInfo, ...]
    seq: int
    clip: bool = False
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Headroom:
    """What an engine's buffers have room for, as shares of a block.

    Attributes:
        ahead: Share of the next unit's parameters that is gathered while a unit of the forward computes. The rest, and
            in the backward all, is gathered when it is needed. 1: gathers start as early as in the program.
        bucket: Share of a unit's gradients that waits in a bucket until the next unit of the backward is gathered, and
            is reduced while that unit computes. Computation waits for the rest. ``None``: every reduction starts as
            soon as its gradients exist, and nothing waits for it.
    """

    ahead: float = 1.0
    bucket: float | None = None


UNLIMITED = Headroom()
"""Room for everything."""


@dataclass(frozen=True)
class Simulated:
    """One step in steady state.

    Attributes:
        seconds: Seconds per step.
        computing: Seconds of computation, without slowdown.
        exposed: Seconds that computation waited, by lane.
        busy: Seconds of work by resource, without slowdown.
        spans: Spans of the measured step; empty without tracing.
        levels: Memory over time in addition to model states: gathered parameters, gradients in flight, and activations;
            empty without tracing.
        extrapolated: Whether any rate lies outside the measured range.
    """

    seconds: float
    computing: float
    exposed: Mapping[Lane, float]
    busy: Mapping[Resource, float]
    spans: tuple[Span, ...] = ()
    levels: tuple[Level, ...] = ()
    extrapolated: bool = False


def simulate(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    *,
    micro_batches: int = 1,
    trace: bool = False,
    pricing: Pricing | None = None,
    room: Headroom = UNLIMITED,
) -> Simulated:
    """Play one step in steady state. Its exchanges with other islands count with their mean over many steps.

    Args:
        plan: The plan.
        workload: The model and its batch.
        rates: Seconds of each part without slowdown.
        micro_batches: Micro-batches per step (``M``).
        trace: Whether to keep spans and levels.
        pricing: Prices operations in an engine other than thinwire.
        room: What the engine's buffers have room for.
    """
    step = _simulate_island(plan, workload, rates, micro_batches, trace, pricing, room)
    return step if plan.num_islands == 1 else with_exchanges(plan, workload.units, rates, step)


def with_exchanges(plan: Plan, units: Sequence[UnitInfo], rates: Rates, step: Simulated) -> Simulated:
    """A step of an island together with its exchanges, as a mean over many steps.

    Computation waits for what an exchange takes longer than ``delay`` steps. If exchanges come faster than links carry
    them, it waits until they have. Exchanges and the collectives inside an island are taken not to slow each other.

    Args:
        plan: The plan.
        units: Units of the model.
        rates: Seconds of each part without slowdown.
        step: The step without exchanges.
    """
    islands = plan.islands
    assert islands is not None
    fragments = [
        [move for operation in exchange_operations(plan, units, fragment) for move in moves(plan, operation, rates)]
        for fragment in range(islands.fragments)
    ]
    seconds = [sum(move.seconds for move in of_fragment) for of_fragment in fragments]
    late = sum(max(0.0, taken - islands.delay * step.seconds) for taken in seconds) * islands.exchanges_per_step
    exposed = max(late, sum(seconds) * islands.exchanges_per_step - step.seconds)
    busy = dict(step.busy)
    for move in chain.from_iterable(fragments):
        busy[Resource.of(move.scope)] += move.seconds * islands.exchanges_per_step
    return replace(step, seconds=step.seconds + exposed, exposed={**step.exposed, Lane.OUTER: exposed}, busy=busy)


def _simulate_island(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    micro_batches: int,
    trace: bool,
    pricing: Pricing | None,
    room: Headroom,
) -> Simulated:
    if micro_batches <= PLAYED:
        return _play(plan, workload, rates, micro_batches, trace, pricing, room)
    two, three = (
        _play(plan, workload, rates, count, trace and count == PLAYED, pricing, room) for count in (PLAYED - 1, PLAYED)
    )
    more = micro_batches - PLAYED

    def further(at_three: float, at_two: float) -> float:
        return at_three + more * (at_three - at_two)

    return Simulated(
        further(three.seconds, two.seconds),
        further(three.computing, two.computing),
        {lane: max(0.0, further(three.exposed[lane], two.exposed[lane])) for lane in Lane},
        {resource: further(three.busy[resource], two.busy[resource]) for resource in Resource},
        three.spans,
        three.levels,
        three.extrapolated,
    )


def _play(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    micro_batches: int,
    trace: bool,
    pricing: Pricing | None = None,
    room: Headroom = UNLIMITED,
) -> Simulated:
    program = lower(plan, workload.units, micro_batches=micro_batches)
    if not plan.overlap.gather:
        room = replace(room, ahead=1.0)
    if not plan.overlap.reduce:
        room = replace(room, bucket=None)
    program = _split_reductions(_split_gathers(program, room), room)

    def thinwire(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
        del units
        return moves(plan, operation, rates)

    return _Player(plan, workload, rates, program, pricing or thinwire, trace, room).play()


def _split_gathers(program: StepProgram, room: Headroom) -> StepProgram:
    """The program with gathers of parameters that start ahead only as far as there is room, and only in the forward.

    The rest of a gather starts when its unit is needed. What hosts and accelerators do for a unit counts once, with
    the share that starts ahead.
    """
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
            rest = _without_units(_scaled(operation, 1 - room.ahead), len(operations), event)
            operations.append(rest)
            waits[event] = (*waits[event], rest.index)
    return replace(program, operations=tuple(operations), waits=waits)


def _split_reductions(program: StepProgram, room: Headroom) -> StepProgram:
    """The program with each reduction over the parameters' shards in two: computation waits for what overflows."""
    overflow = 0.0 if room.bucket is None else 1 - room.bucket
    operations, waits = list(program.operations), dict(program.waits)
    for operation in program.operations if overflow > 0 else ():
        if operation.lane is not Lane.REDUCE or operation.axis is not Axis.PARAMS:
            continue
        operations[operation.index] = _scaled(operation, 1 - overflow)
        # What the host and the accelerator do for its units counts once, with the other share.
        waited = _without_units(_scaled(operation, overflow), len(operations), operation.start)
        operations.append(waited)
        waits[operation.start] = (*waits.get(operation.start, ()), waited.index)
    return replace(program, operations=tuple(operations), waits=waits)


def _without_units(operation: Operation, index: int, start: Event) -> Operation:
    """A share of an operation as one of its own. Its units and their memory count with the other share."""
    return replace(operation, index=index, start=start, units=(), buffers=(), bucket=())


def _scaled(operation: Operation, share: float) -> Operation:
    """A share of an operation's bytes."""
    return replace(operation, hops=tuple(replace(hop, sent=round(hop.sent * share)) for hop in operation.hops))


_Queue = tuple[Lane, Stage | None]
"""A stage of a lane; ``None`` if the operations of a lane run one after another as a whole."""


@dataclass(slots=True, eq=False)
class _Run:
    """One operation of one step on its way."""

    operation: Operation
    moves: deque[PricedStage]
    needs: int
    """Operations that must end first."""
    ended: bool = False
    then: list[Callable[[], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Compute:
    seconds: float
    name: str


@dataclass(frozen=True, slots=True)
class _Wait:
    operations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Start:
    operations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Hold:
    """A change of a memory level."""

    name: str
    change: int


_Instruction = _Compute | _Wait | _Start | _Hold


class _Player:
    """Plays a program: computation is a list of instructions, and each lane is a set of queues."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload,
        rates: Rates,
        program: StepProgram,
        pricing: Pricing,
        trace: bool,
        room: Headroom,
    ) -> None:
        self._plan, self._workload, self._rates, self._program = plan, workload, rates, program
        self._clock = FluidClock()
        self._moves = _memoised_moves(plan, program, pricing)
        self._runs: dict[int, _Run] = {}
        self._queues: dict[_Queue, deque[_Run]] = {}
        self._busy_queues: set[_Queue] = set()
        self._exposed = dict.fromkeys(Lane, 0.0)
        self._spans: list[Span] | None = [] if trace else None
        self._levels: list[Level] = []
        self._held: dict[str, int] = {}
        self._script = _script(plan, workload, rates, program, room)
        self._end: float | None = None

    def play(self) -> Simulated:
        self._compute_on()
        self._clock.run()
        assert self._end is not None, "the program waits for what never starts"
        return Simulated(
            seconds=self._end,
            computing=self._clock.busy[Resource.COMPUTE],
            exposed=self._exposed,
            busy=self._clock.busy,
            spans=tuple(self._spans or ()),
            levels=tuple(self._levels),
            extrapolated=self._rates.extrapolated,
        )

    # -- computation -------------------------------------------------------------------------------------------

    def _compute_on(self, again: tuple[_Instruction, ...] = ()) -> None:
        """Continue with postponed instructions, then with the script, until computation is busy or waits."""
        for instruction in chain(again, self._script):
            match instruction:
                case _Compute(seconds, name):
                    if seconds <= 0:
                        continue
                    self._compute(seconds, name)
                    return
                case _Wait(operations):
                    run = next((r for i in operations if not (r := self._runs[i]).ended), None)
                    if run is not None:
                        self._wait_for(run, instruction)
                        return
                case _Start(operations):
                    for index in operations:
                        self._enqueue(index)
                case _Hold(name, change):
                    self._hold(name, change)
        self._end = self._clock.now

    def _compute(self, seconds: float, name: str) -> None:
        begin = self._clock.now

        def computed() -> None:
            self._note(COMPUTE, name, begin)
            self._compute_on()

        self._clock.begin(Resource.COMPUTE, seconds, computed)

    def _wait_for(self, run: _Run, instruction: _Wait) -> None:
        begin = self._clock.now

        def resume() -> None:
            self._exposed[run.operation.lane] += self._clock.now - begin
            self._note(WAITING, f"for {run.operation.lane}", begin)
            self._compute_on((instruction,))  # other operations of the same wait may still run

        run.then.append(resume)

    # -- lanes -------------------------------------------------------------------------------------------------

    def _enqueue(self, index: int) -> None:
        operation = self._program.operations[index]
        self._carry(operation, 1)
        run = _Run(operation, deque(self._moves[index]), 0)
        self._runs[index] = run
        for other in (self._runs[index] for index in operation.after):
            if not other.ended:
                run.needs += 1
                other.then.append(lambda: self._freed(run))
        lane = operation.lane
        stages: list[Stage | None] = [move.stage for move in run.moves]
        if not stages or not self._plan.overlap.stages:
            stages = [None]
        for stage in stages:
            self._queues.setdefault((lane, stage), deque()).append(run)
        for stage in stages:
            self._pull((lane, stage))

    def _freed(self, run: _Run) -> None:
        run.needs -= 1
        for key in [key for key in self._queues if key[0] is run.operation.lane]:
            self._pull(key)

    def _pull(self, key: _Queue) -> None:
        """Start the first operation of a queue, if it is that operation's turn."""
        queue = self._queues.get(key)
        if not queue or key in self._busy_queues:
            return
        run = queue[0]
        if run.needs:
            return
        if not run.moves:
            queue.popleft()
            self._ended(run)
            self._pull(key)
            return
        move = run.moves[0]
        if key[1] and move.stage != key[1]:
            return
        self._busy_queues.add(key)
        begin = self._clock.now
        self._clock.begin(
            Resource.of(move.scope),
            move.seconds,
            lambda: self._moved(run, move, key, begin),
            move.beside,
            move.spine_load,
        )

    def _moved(self, run: _Run, move: PricedStage, key: _Queue, begin: float) -> None:
        self._busy_queues.discard(key)
        self._note(f"{run.operation.lane} {move.stage}", f"{run.operation.kind} {run.operation.axis}", begin)
        run.moves.popleft()
        if key[1] or not run.moves:
            self._queues[key].popleft()
        if run.moves:
            self._pull((key[0], run.moves[0].stage) if key[1] else key)
        else:
            self._ended(run)
        self._pull(key)

    def _ended(self, run: _Run) -> None:
        run.ended = True
        if run.operation.lane is not Lane.GATHER:  # gathered parameters stay until they are freed
            self._carry(run.operation, -1)
        for callback in run.then:
            callback()
        run.then.clear()

    def _carry(self, operation: Operation, sign: int) -> None:
        """Change the memory level of an operation in flight."""
        if self._spans is None or operation.lane not in (Lane.GATHER, Lane.REDUCE, Lane.SYNC):
            return
        units = self._program.units
        if operation.lane is Lane.GATHER:
            self._hold(GATHERED, sign * sum(units[unit].buffers[number].nbytes for unit, number in operation.buffers))
        else:
            whole = sum(units[unit].nbytes for unit in operation.bucket) // operation.chunks
            shared = {Axis.PARAMS: 1, Axis.SHARD: self._plan.params.ranks}.get(
                operation.axis, self._plan.optimizer.ranks
            )
            self._hold(GRADIENTS, sign * (whole // shared))

    def _hold(self, name: str, change: int) -> None:
        if self._spans is not None:
            self._held[name] = self._held.get(name, 0) + change
            self._levels.append(Level(name, self._clock.now, self._held[name]))

    def _note(self, track: str, name: str, begin: float) -> None:
        if self._spans is not None:
            self._spans.append(Span(track, name, begin, self._clock.now))


def _memoised_moves(plan: Plan, program: StepProgram, pricing: Pricing) -> list[list[PricedStage]]:
    """The stages of every operation. Blocks repeat, so most operations share a price."""
    known: dict[tuple[object, ...], list[PricedStage]] = {}
    moves = []
    key: tuple[object, ...]
    for op in program.operations:
        key = (op.kind, op.lane, op.axis, op.hops, op.encoded, op.chunks, len(op.buffers) > 1, len(op.bucket) > 1)
        if op.lane is Lane.GATHER:  # an engine may gather a block twice in the backward
            key += (op.start.phase,)
        if op.lane in (Lane.GATHER, Lane.REDUCE):  # a share of an operation may have no units
            key += (len(op.units),)
        if op.kind is Kind.BROADCAST:  # the sizes of its pieces depend on the units
            key += op.units
        if key not in known:
            known[key] = pricing(plan, op, program.units)
        moves.append(known[key])
    return moves


# -- what computation does ---------------------------------------------------------------------------------------


def _script(
    plan: Plan, workload: Workload, rates: Rates, program: StepProgram, room: Headroom
) -> Iterator[_Instruction]:
    """The instructions of one step, in the order of the runtime's hooks."""
    trace = default_trace(workload.units, recompute=plan.recompute)
    forward = [rates.forward(part, plan, workload.seq) for part in workload.parts]
    backward = [_Backward.of(part, unit, plan, workload.seq, rates)
                for part, unit in zip(workload.parts, workload.units, strict=True)]  # fmt: skip
    end = Event(Phase.STEP, -1, 0)
    spreads = tuple(op.index for op in program.starts(end) if op.lane is Lane.SPREAD)
    yield _Start(spreads)
    yield _Wait(tuple(i for i in program.waits.get(end, ()) if program.operations[i].lane is Lane.SPREAD))
    yield _Compute(rates.step, "step")
    for micro_batch in range(program.micro_batches):
        yield from _forward(program, trace, forward, workload.kept, micro_batch, room)
        yield from _backward(program, trace, backward, workload.kept, micro_batch, room)
    yield from _update(workload, rates, program)


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
    def of(part: ModelPart, unit: UnitInfo, plan: Plan, seq: int, rates: Rates) -> _Backward:
        """The seconds of one part under a plan."""
        again = rates.forward(part, plan, seq) if plan.recompute and part.kind == "block" else 0.0
        whole = rates.backward(part, plan, seq)
        first = whole * part.weight_gradient_share(seq) if unit.weight_first else whole
        return _Backward(again, first, whole - first)


def _forward(
    program: StepProgram,
    trace: Trace,
    seconds: Sequence[float],
    kept: Sequence[int],
    micro_batch: int,
    room: Headroom,
) -> Iterator[_Instruction]:
    for phase, unit in trace.forward:
        event = Event(phase, unit, micro_batch)
        # With little room, what the unit needs is gathered first.
        ahead = _unawaited(program, event) if room.ahead < 1 else ()
        yield from _reach(program, event, ahead)
        yield _Start(ahead)
        if phase is Phase.PRE_FORWARD and program.units[unit].name:
            yield _Compute(seconds[unit], f"forward {program.units[unit].name}")
            if kept:
                yield _Hold(ACTIVATIONS, kept[unit])
        elif phase is Phase.POST_FORWARD and not program.units[unit].name:
            yield _Compute(seconds[unit], "forward (root)")  # the root's own modules run last: norm, head, loss
            if kept:
                yield _Hold(ACTIVATIONS, kept[unit])


def _backward(
    program: StepProgram,
    trace: Trace,
    seconds: Sequence[_Backward],
    kept: Sequence[int],
    micro_batch: int,
    room: Headroom,
) -> Iterator[_Instruction]:
    held: list[int] = []  # reductions that start once the next unit is gathered
    for phase, unit in trace.backward:
        of_unit, name = seconds[unit], program.units[unit].name
        event, label = Event(phase, unit, micro_batch), f"backward {name or '(root)'}"
        if phase is Phase.GRADS_READY and name:
            yield _Compute(of_unit.gradients, label)
            if kept:
                yield _Hold(ACTIVATIONS, -kept[unit])
        holding = _unawaited(program, event) if room.bucket is not None and phase is Phase.GRADS_READY else ()
        yield from _reach(program, event, holding)
        held += holding
        if phase is Phase.PRE_BACKWARD:
            yield _Start(tuple(held))
            held = []
            yield _Compute(of_unit.again, f"forward again {name}")
            if not name:  # its own modules ran last, and its gradients are counted as ready when all others are
                yield _Compute(of_unit.gradients, label)
                if kept:
                    yield _Hold(ACTIVATIONS, -kept[unit])
        elif phase is Phase.INPUT_GRADIENT:
            yield _Compute(of_unit.input, f"input gradient {name}")
    yield _Start(tuple(held))
    yield from _reach(program, Event(Phase.BACKWARD_END, -1, micro_batch))


def _unawaited(program: StepProgram, event: Event) -> tuple[int, ...]:
    """Operations that start at an event and that computation does not wait for there."""
    awaited = program.waits.get(event, ())
    return tuple(operation.index for operation in program.starts(event) if operation.index not in awaited)


def _update(workload: Workload, rates: Rates, program: StepProgram) -> Iterator[_Instruction]:
    """Update each unit when its gradients arrive, or all units after the exchange of the norm."""
    end = Event(Phase.STEP, -1, 0)
    control = tuple(op.index for op in program.starts(end) if op.lane is Lane.CONTROL)
    yield _Start(control)
    shares = _update_shares(workload.units)
    last = _last_reductions(program)
    final = set(last.values())
    awaited = [op for op in program.operations if op.index in final]
    if workload.clip:
        yield _Wait(tuple(op.index for op in awaited))
        yield _Wait(control)
        yield _Compute(rates.update(sum(shares)), "update")
    else:
        for op in awaited:
            yield _Wait((op.index,))
            yield _Compute(rates.update(sum(shares[u] for u in op.units if last[u] == op.index)), "update")
        if not awaited:
            yield _Compute(rates.update(sum(shares)), "update")
        yield _Wait(control)


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


def _reach(program: StepProgram, event: Event, holding: Sequence[int] = ()) -> Iterator[_Instruction]:
    """The instructions at an event: start operations but those held, free parameters, and wait for what is needed."""
    if starts := [operation.index for operation in program.starts(event) if operation.index not in holding]:
        yield _Start(tuple(starts))
    for unit in program.frees.get(event, ()):
        yield _Hold(GATHERED, -program.units[unit].nbytes)
    if needed := program.waits.get(event):
        yield _Wait(needed)
