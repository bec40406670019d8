"""Plays a step on a clock: one rank computes, beside its lanes.

Computation is a generator for each pass over the model. It starts operations, and yields what takes time: computation
itself, and operations that it waits for.

Of a model with many equal blocks, a program with few of them is played, and one period of blocks again for each that is
missing: everything on its way then takes the place of operations a period earlier. Once the lanes are in a state in
which they have been before, what happened since happens again, and the player skips it.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from thinwire.cost import Rates
from thinwire.program import UNDER_WAY, AnyLane, Event, HostLane, Lane, Phase, StepProgram, default_trace
from thinwire.program.step import Moment
from thinwire.program.timeline import COMPUTE, WAITING
from thinwire.sim.clock import Resource
from thinwire.sim.lanes import ACTIVATIONS, GATHERED, Flight, Lanes
from thinwire.sim.repetition import Repeated
from thinwire.sim.workload import Execution, Workload, unit_seconds, update_seconds, update_shares
from thinwire.spec import Plan

_SAME = 1e-11
"""States are the same if no task's remaining seconds differ by more than this share of the time in between."""

_LONGEST = 4
"""Most periods after which a state may come again."""

_STEP = Event(Phase.STEP, -1, 0)

_AFTER_UPDATE = (HostLane.UP, HostLane.UPDATE, HostLane.DOWN, Lane.SPREAD)
"""Lanes of what begins with an update."""


class _Computing(NamedTuple):
    """Computation."""

    seconds: float
    name: str


Activity = Iterator[Flight | _Computing]
"""What takes a rank's time, in order: computation itself, and waiting for operations."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state after a period (what is on its way, without times), and what had been counted until then."""

    state: tuple[object, ...]
    left: tuple[float, ...]
    now: float
    busy: dict[Resource, float]
    exposed: dict[AnyLane, float]
    finals: int

    def is_again(self, other: _Mark) -> bool:
        """Whether the state has come again in a later mark."""
        most = _SAME * (other.now - self.now)
        return self.state == other.state and all(abs(a - b) <= most for a, b in zip(self.left, other.left, strict=True))


class Player:
    """Plays a step, by a program that is lowered for the blocks that ``fewer`` leaves. ``exposed`` are the seconds that
    computation waited, by lane."""

    def __init__(
        self,
        plan: Plan,
        workload: Workload,
        rates: Rates,
        program: StepProgram,
        execution: Execution,
        *,
        trace: bool = False,
        fewer: Repeated | None = None,
    ) -> None:
        self.lanes = Lanes(plan, program, execution.pricing, trace=trace)
        self.end, self.exposed = 0.0, dict[AnyLane, float].fromkeys((*Lane, *HostLane), 0.0)
        self._plan, self._whole, self._rates = plan, workload, rates
        self._program, self._execution, self._fewer = program, execution, fewer
        played = workload if fewer is None else fewer.workload
        self._trace = default_trace(played.units, recompute=plan.recompute)
        self._seconds = unit_seconds(plan, played, rates)
        self._on_host = not plan.residence.on_device
        self._updates = {} if self._on_host else update_seconds(played, rates, program)
        self._finals: list[tuple[float, Flight | None]] = []  # seconds of the update, and the operation
        self._computation: Activity | None = None
        self._current: Flight | _Computing | None = None
        self._since = 0.0

    def play(self, computation: Activity, *, drain: bool = True) -> None:
        """Play what :meth:`begin`, :meth:`forward`, :meth:`backward` and :meth:`finish` return, after what was played
        before. With ``drain``, operations that computation does not wait for go on to their end."""
        self._computation = computation
        self._go_on()
        while self._current is not None:
            assert self.lanes.clock.active, "the program waits for what never starts"
            self._advance()
        self.end, self._computation = self.lanes.clock.now, None
        while drain and self.lanes.clock.active:
            self._advance()

    def copy(self) -> Player:
        """A player that continues from here on its own."""
        other = copy.copy(self)
        same = {id(each): each for each in self.lanes.shared}
        other.lanes, other.exposed, other._finals = copy.deepcopy((self.lanes, self.exposed, self._finals), same)
        return other

    def leave_out(self, micro_batch: int) -> None:
        """Go on as if this micro-batch, whose forward was the last to be played, were the next one."""
        counts = Counter(op.lane for op in self._program.operations if op.start.micro_batch == micro_batch)
        self.lanes.renumber({lane: -count for lane, count in counts.items()})

    def _advance(self) -> None:
        lanes = self.lanes
        for done in lanes.clock.advance():
            if isinstance(done, Flight):
                lanes.moved(done)
            else:
                lanes.note(COMPUTE, done.name, self._since)
                self._go_on()
        awaited = self._current
        if isinstance(awaited, Flight) and awaited.ended:
            lane = awaited.launch.operation.lane
            self.exposed[lane] += lanes.clock.now - self._since
            lanes.note(WAITING, f"for {lane}", self._since)
            self._go_on()

    def _go_on(self) -> None:
        """Go on until computation is busy, waits, or has come to the end."""
        lanes, clock = self.lanes, self.lanes.clock
        assert self._computation is not None
        for step in self._computation:
            self._since = clock.now
            if isinstance(step, Flight):
                if step.ended:
                    continue
            elif lanes.are_idle:  # it takes as long as it takes alone
                clock.compute(step.seconds)
                lanes.note(COMPUTE, step.name, self._since)
                continue
            else:
                clock.start(clock.load(Resource.COMPUTE), step.seconds, step)
            self._current = step
            return
        self._current = None

    # -- what one rank computes --------------------------------------------------------------------------------

    def begin(self) -> Activity:
        """The spread of updated parameters, and the fixed seconds of a step. States that live on the host are updated
        first, batch by batch."""
        program, launches = self._program, self.lanes.launches
        starting = [op for op in program.starts(_STEP) if op.lane in _AFTER_UPDATE]
        if self._on_host:
            self._start(op.index for op in starting)
        else:
            spreads = [launches[op.index] for op in starting]
            if self._fewer is not None and self._spreads:
                blocks, units = self._fewer.blocks, program.units
                first = next(n for n, each in enumerate(spreads) if units[each.operation.units[0]].block in blocks)
                spreads[first:first] = spreads[first : first + self._spreads] * self._fewer.times
            for number, launch in enumerate(spreads):
                self.lanes.start(launch, number)
        yield from self._wait([i for i in program.waits.get(_STEP, ()) if program.operations[i].lane in _AFTER_UPDATE])
        yield from _compute(self._rates.handling.step, "step")

    def forward(self, micro_batch: int) -> Activity:
        # In the first one, updated parameters are on their way to all blocks.
        more: dict[AnyLane, int] = {Lane.SPREAD: self._spreads} if micro_batch == 0 else {}
        return self._pass(self._trace.forward, self._forward_at, micro_batch, self._plan.prefetch, more)

    def backward(self, micro_batch: int) -> Activity:
        held: list[int] = []  # reductions that start once the next unit is gathered
        at = partial(self._backward_at, held=held)
        yield from self._pass(self._trace.backward, at, micro_batch, UNDER_WAY, {})
        self._start(held)
        yield from self._reach(Event(Phase.BACKWARD_END, -1, micro_batch))

    def finish(self) -> Activity:
        """Update each unit when its gradients arrive, or all units after the exchange of the norm."""
        control = [op.index for op in self._program.starts(_STEP) if op.lane is Lane.CONTROL]
        self._start(control)
        everything = 0.0 if self._on_host else self._rates.update(sum(update_shares(self._whole.units)))
        for seconds, flight in self._finals:
            if flight is not None:
                yield flight
            if not self._whole.clip:
                yield from _compute(seconds, "update")
        if not self._whole.clip and not self._updates:
            yield from _compute(everything, "update")
        yield from self._wait(control)
        if self._whole.clip:
            yield from _compute(everything, "update")

    def _forward_at(self, event: Event) -> Activity:
        unit, name = event.unit, self._program.units[event.unit].name
        later = self._unawaited(event) if self._execution.needed_first else ()
        yield from self._reach(event, later)
        self._start(later)
        # The root's own modules run last: norm, head, loss.
        if event.phase is (Phase.PRE_FORWARD if name else Phase.POST_FORWARD):
            yield from _compute(self._seconds[unit].forward, f"forward {name or '(root)'}")
            self._keep(unit, 1)

    def _backward_at(self, event: Event, held: list[int]) -> Activity:
        phase, unit, name = event.phase, event.unit, self._program.units[event.unit].name
        seconds = self._seconds[unit]
        if phase is Phase.GRADS_READY and name:
            yield from _compute(seconds.gradients, f"backward {name}")
            self._keep(unit, -1)
        holding = self._unawaited(event) if self._execution.holds_reductions and phase is Phase.GRADS_READY else ()
        yield from self._reach(event, holding)
        held += holding
        if phase is Phase.PRE_BACKWARD:
            self._start(held)
            held.clear()
            yield from _compute(seconds.again, f"forward again {name}")
            if not name:  # its own modules ran last, and its gradients are counted as ready when all others are
                yield from _compute(seconds.gradients, "backward (root)")
                self._keep(unit, -1)
        elif phase is Phase.INPUT_GRADIENT:
            yield from _compute(seconds.input, f"input gradient {name}")

    def _unawaited(self, event: Event) -> tuple[int, ...]:
        """Operations that start at an event and that computation does not wait for there."""
        awaited = self._program.waits.get(event, ())
        return tuple(operation.index for operation in self._program.starts(event) if operation.index not in awaited)

    def _reach(self, event: Event, holding: Sequence[int] = ()) -> Iterator[Flight]:
        """At an event: start operations but those held, free parameters, and wait for what is needed."""
        program = self._program
        self._start(operation.index for operation in program.starts(event) if operation.index not in holding)
        if self.lanes.spans is not None:
            for unit in program.frees.get(event, ()):
                self.lanes.hold(GATHERED, -program.units[unit].nbytes)
        if awaited := program.waits.get(event):
            yield from self._wait(awaited)

    def _start(self, operations: Iterable[int]) -> None:
        for index in operations:
            flight = self.lanes.start(self.lanes.launches[index])
            if index in self._updates:
                self._finals.append((self._updates[index], flight))

    def _wait(self, operations: Iterable[int]) -> Iterator[Flight]:
        for flight in [self.lanes.flight(index) for index in operations]:
            if flight is not None:
                yield flight

    def _keep(self, unit: int, sign: int) -> None:
        if self._whole.kept:
            self.lanes.hold(ACTIVATIONS, sign * self._whole.kept[unit])

    # -- repeated blocks ---------------------------------------------------------------------------------------

    @property
    def _spreads(self) -> int:
        """Spreads of a period of blocks."""
        if self._fewer is None:
            return 0
        blocks = self._fewer.blocks
        spreads = [op for op in self._program.operations if op.lane is Lane.SPREAD]
        of_blocks = sum(self._program.units[op.units[0]].block in blocks for op in spreads)
        return self._fewer.period * of_blocks // len(blocks)

    def _pass(
        self,
        moments: Sequence[Moment],
        at: Callable[[Event], Activity],
        micro_batch: int,
        after: int,
        more: Mapping[AnyLane, int],
    ) -> Activity:
        """All moments of a pass, one period again for each that is missing.

        Args:
            moments: The moments.
            at: What is computed at a moment.
            micro_batch: Number of the micro-batch.
            after: Number of periods before the one that is repeated, from which on all are alike.
            more: Number of operations of a period by lane, beside those that start in it.
        """
        events, missing = [Event(*moment, micro_batch) for moment in moments], 0
        begin = end = len(events)
        if self._fewer is not None:
            blocks, units, period = self._fewer.blocks, self._program.units, self._fewer.period
            numbers = [units[unit].block for _, unit in moments]
            begins = [n for n, block in enumerate(numbers) if block in blocks and block != numbers[n - 1]]
            begin, end, missing = begins[after * period], begins[(after + 1) * period], self._fewer.times
        for event in events[:end]:
            yield from at(event)
        again = events[begin:end]
        older = {**Counter(op.lane for event in again for op in self._program.starts(event)), **more}
        marks: deque[_Mark] = deque(maxlen=_LONGEST)
        while missing := missing - self._skipped(marks, missing):
            self.lanes.renumber(older)
            for event in again:
                yield from at(event)
            missing -= 1
        for event in events[end:]:
            yield from at(event)

    def _skipped(self, marks: deque[_Mark], left: int) -> int:
        """Note the state after a period, and skip what is left of them if the state was the same some periods ago.
        Returns how many were skipped."""
        if not left or self.lanes.pending[Lane.SPREAD]:
            return 0  # they are on their way since the step began, and no state comes again before they have arrived
        mark = self._state()
        for periods, before in enumerate(reversed(marks), start=1):
            if left >= periods and before.is_again(mark):
                self._skip(before, mark, left // periods)
                marks.clear()
                return left // periods * periods
        marks.append(mark)
        return 0

    def _state(self) -> _Mark:
        state: list[object] = []
        left: list[float] = []
        for lane, pending in self.lanes.pending.items():
            for number, flight in pending.items():
                stage = flight.queue[1] if flight.queue else None
                state.append((lane, number, flight.at, flight.needs, stage, id(flight.launch.moves)))
        clock = self.lanes.clock
        for task in clock.active:
            of = task.done
            state.append((id(task.load), (of.launch.operation.lane, of.number) if isinstance(of, Flight) else None))
            left += (task.left, task.late)
        return _Mark(tuple(state), tuple(left), clock.now, dict(clock.busy), dict(self.exposed), len(self._finals))

    def _skip(self, before: _Mark, mark: _Mark, times: int) -> None:
        """Let what happened between two marks happen some more times."""
        clock = self.lanes.clock
        clock.now += times * (mark.now - before.now)
        for resource, seconds in mark.busy.items():
            clock.busy[resource] += times * (seconds - before.busy[resource])
        for lane, waited in mark.exposed.items():
            self.exposed[lane] += times * (waited - before.exposed[lane])
        # All of the skipped operations have ended, except those that are on their way now.
        again = [(seconds, None) for seconds, _ in self._finals[before.finals : mark.finals]]
        self._finals[before.finals : before.finals] = again * times


def _compute(seconds: float, name: str) -> Iterator[_Computing]:
    if seconds > 0:
        yield _Computing(seconds, name)
