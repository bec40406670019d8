"""Plays a script on a clock: one rank computes, and its lanes perform operations.

Where a section of the script repeats, the player compares the state of lanes and clock at the beginning of each time.
If a state comes again, what happened in between happens again until the section ends, so that the player skips it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from thinwire.cost import PricedStage
from thinwire.program import Axis, Lane, Operation
from thinwire.program.timeline import COMPUTE, WAITING, Level, Span
from thinwire.sim.clock import Burden, FluidClock, Resource, Task
from thinwire.sim.script import (
    GATHERED,
    GRADIENTS,
    Compute,
    Hold,
    Queue,
    Ref,
    Script,
    Section,
    StartedOperation,
    StartOperations,
    UpdateParameters,
    Wait,
)
from thinwire.spec import Plan

__all__ = ["Player"]

_SAME = 1e-11
"""States are the same if no task's remaining seconds differ by more than this share of the time in between."""

_LONGEST = 4
"""Most times of a section after which a state may come again."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One operation on its way.

    Attributes:
        launch: The operation.
        number: Its number in its lane, from 0.
        at: Number of its stages that have ended.
        needs: Operations that must end first.
        ended: Whether all of its stages have ended.
        then: Operations that need it.
        begin: When its present stage began.
    """

    launch: StartedOperation
    number: int
    at: int = 0
    needs: int = 0
    ended: bool = False
    then: list[_Flight] = field(default_factory=list)
    begin: float = 0.0
    key: Queue | None = None


@dataclass(slots=True)
class _Computing:
    """Computation that runs on the clock.

    Attributes:
        name: What is computed.
        begin: When it began.
    """

    name: str
    begin: float


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state at the beginning of one time of a section, and what had been counted until then.

    Attributes:
        state: What is on its way, without times.
        left: Remaining seconds of the tasks that run.
        now: The time.
        busy: Seconds of work by resource.
        exposed: Seconds of waiting by lane.
        counts: Operations started by lane.
        finals: Number of operations that complete gradients.
    """

    state: tuple[object, ...]
    left: tuple[float, ...]
    now: float
    busy: dict[Resource, float]
    exposed: dict[Lane, float]
    counts: dict[Lane, int]
    finals: int


class _Lanes:
    """Lanes that perform operations on a clock, and what is recorded of them.

    Args:
        plan: The plan.
        script: The script whose operations are performed.
        trace: Whether to keep spans and levels.

    Attributes:
        spans: Spans of the step; ``None`` without tracing.
        levels: Memory levels of the step.
    """

    def __init__(self, plan: Plan, script: Script, *, trace: bool = False) -> None:
        self._plan, self._script = plan, script
        self._clock = FluidClock()
        self.spans: list[Span] | None = [] if trace else None
        self.levels: list[Level] = []
        self._held: dict[str, int] = {}
        self._counts = dict.fromkeys(Lane, 0)
        self._pending: dict[Lane, dict[int, _Flight]] = {lane: {} for lane in Lane}
        self._queues: dict[Queue, deque[_Flight]] = {}
        self._busy_queues: set[Queue] = set()
        self._loads: dict[int, Burden] = {}
        self._finals: list[tuple[float, _Flight | None]] = []  # seconds of the update, and the operation
        self._spreads = 0  # spreads by which references are further on

    @property
    def busy(self) -> dict[Resource, float]:
        """Seconds of work by resource, without slowdown."""
        return self._clock.busy

    def _run(self, ref: Ref) -> _Flight | None:
        """The operation of a reference; ``None`` if it has ended."""
        lane, number = ref
        number = number + self._spreads if lane is Lane.SPREAD else self._counts[lane] - 1 - number
        return self._pending[lane].get(number)

    def _enqueue(self, launch: StartedOperation) -> None:
        lane = launch.lane
        if self.spans is not None:
            self._carry(launch.operation, 1)
        needed = [other for ref in launch.after if (other := self._run(ref)) is not None]
        run = _Flight(launch, self._counts[lane], needs=len(needed))
        self._pending[lane][run.number] = run
        self._counts[lane] += 1
        if launch.update is not None and launch.lane in (Lane.REDUCE, Lane.SYNC):
            self._finals.append((launch.update, run))
        for other in needed:
            other.then.append(run)
        for key in launch.queues:
            if (queue := self._queues.get(key)) is None:
                queue = self._queues[key] = deque()
            queue.append(run)
        for key in launch.queues:
            self._pull(key)

    def _pull(self, key: Queue) -> None:
        """Start the first operation of a queue, if it is that operation's turn."""
        queue = self._queues.get(key)
        if not queue or key in self._busy_queues:
            return
        run = queue[0]
        if run.needs:
            return
        moves = run.launch.moves
        if run.at == len(moves):
            queue.popleft()
            self._ended(run)
            self._pull(key)
            return
        move = moves[run.at]
        if key[1] and move.stage != key[1]:
            return
        self._busy_queues.add(key)
        run.begin, run.key = self._clock.now, key
        self._clock.start(self._load(move), move.seconds, run)

    def _load(self, move: PricedStage) -> Burden:
        load = self._loads.get(id(move))  # stages live as long as the script
        if load is None:
            load = self._clock.load(Resource.of(move.scope), move.beside, move.spine_load)
            self._loads[id(move)] = load
        return load

    def _moved(self, run: _Flight) -> None:
        """End one stage of an operation."""
        key, operation, moves = run.key, run.launch.operation, run.launch.moves
        assert key is not None, "a stage that runs has a queue"
        self._busy_queues.discard(key)
        if self.spans is not None:
            self._note(f"{operation.lane} {moves[run.at].stage}", f"{operation.kind} {operation.axis}", run.begin)
        run.at += 1
        run.key = None
        whole = run.at == len(moves)
        if key[1] or whole:
            self._queues[key].popleft()
        if whole:
            self._ended(run)
        else:
            self._pull((key[0], moves[run.at].stage) if key[1] else key)
        self._pull(key)

    def _ended(self, run: _Flight) -> None:
        run.ended = True
        del self._pending[run.launch.lane][run.number]
        if self.spans is not None and run.launch.lane is not Lane.GATHER:
            self._carry(run.launch.operation, -1)  # gathered parameters stay until they are freed
        for other in run.then:
            other.needs -= 1
            if not other.needs:
                for key in dict.fromkeys(other.launch.queues):
                    self._pull(key)
        run.then.clear()

    # -- what is recorded --------------------------------------------------------------------------------------

    def _carry(self, operation: Operation, sign: int) -> None:
        """Change the memory level of an operation in flight."""
        if operation.lane not in (Lane.GATHER, Lane.REDUCE, Lane.SYNC):
            return
        units = self._script.units
        if operation.lane is Lane.GATHER:
            self._hold(GATHERED, sign * sum(units[unit].buffers[number].nbytes for unit, number in operation.buffers))
        else:
            whole = sum(units[unit].nbytes for unit in operation.bucket) // operation.chunks
            shared = {Axis.PARAMS: 1, Axis.SHARD: self._plan.params.ranks}.get(
                operation.axis, self._plan.optimizer.ranks
            )
            self._hold(GRADIENTS, sign * (whole // shared))

    def _hold(self, name: str, change: int) -> None:
        if self.spans is not None:
            self._held[name] = self._held.get(name, 0) + change
            self.levels.append(Level(name, self._clock.now, self._held[name]))

    def _note(self, track: str, name: str, begin: float) -> None:
        if self.spans is not None:
            self.spans.append(Span(track, name, begin, self._clock.now))


class Player(_Lanes):
    """Plays a script: computation, beside the lanes.

    Args:
        plan: The plan.
        script: Its script; sections of it are played.
        trace: Whether to keep spans and levels.

    Attributes:
        end: When the script ended.
        exposed: Seconds that computation waited, by lane.
    """

    def __init__(self, plan: Plan, script: Script, *, trace: bool = False) -> None:
        super().__init__(plan, script, trace=trace)
        self.end = 0.0
        self.exposed = dict.fromkeys(Lane, 0.0)
        self._awaited: _Flight | None = None
        self._waited_since = 0.0
        # Where computation is: section, time, instruction; then operations that it waits for, and updates to do.
        self._sections: list[Section] = []
        self._at = (0, 0, 0)
        self._marks: list[_Mark] = []
        self._waits: deque[_Flight] = deque()
        self._updating: deque[tuple[_Flight | None, float | None]] = deque()
        self._done = False

    def play(self, sections: list[Section], *, drain: bool = True) -> None:
        """Play sections, after those that were played before.

        Args:
            sections: The sections.
            drain: Whether operations that computation does not wait for go on to their end.
        """
        self._sections, self._at, self._done = sections, (0, 0, 0), False
        self._marks.clear()
        self._compute_on()
        while not self._done:
            assert self._clock.active, "the program waits for what never starts"
            self._advance()
        self.end = self._clock.now
        while drain and self._clock.active:
            self._advance()

    def copy(self) -> Player:
        """A player that continues from here on its own."""
        runs: dict[int, _Flight] = {}

        def of(run: _Flight) -> _Flight:
            if id(run) not in runs:
                runs[id(run)] = made = _Flight(
                    run.launch, run.number, run.at, run.needs, run.ended, [], run.begin, run.key
                )
                made.then = [of(other) for other in run.then]
            return runs[id(run)]

        other = Player(self._plan, self._script)
        clock, other._loads = other._clock, self._loads
        clock.now, clock.busy = self._clock.now, dict(self._clock.busy)
        clock.share(self._clock)
        clock.active = [
            Task(task.load, task.left, of(task.done) if isinstance(task.done, _Flight) else task.done, task.late)
            for task in self._clock.active
        ]
        other.exposed = dict(self.exposed)
        other._counts = dict(self._counts)
        other._pending = {lane: {n: of(run) for n, run in pending.items()} for lane, pending in self._pending.items()}
        other._queues = {key: deque(map(of, queue)) for key, queue in self._queues.items()}
        other._busy_queues = set(self._busy_queues)
        other._finals = [(seconds, None if run is None else of(run)) for seconds, run in self._finals]
        other._spreads = self._spreads
        return other

    def _advance(self) -> None:
        for done in self._clock.advance():
            if isinstance(done, _Flight):
                self._moved(done)
            else:
                self._note(COMPUTE, done.name, done.begin)
                self._compute_on()

    # -- computation -------------------------------------------------------------------------------------------

    def _compute_on(self) -> None:
        """Go on with the script until computation is busy, waits, or has come to the end."""
        while True:
            if self._waits and self._wait():
                return
            if self._updating and self._update():
                return
            if not self._waits and not self._updating:
                break
        section_index, time, position = self._at
        while section_index < len(self._sections):
            section = self._sections[section_index]
            instructions = section.instructions
            while time < section.times:
                if position == 0 and section.times > 1:
                    time += self._repeat(section, time)
                    if time >= section.times:
                        break
                while position < len(instructions):
                    instruction = instructions[position]
                    position += 1
                    if isinstance(instruction, Compute):
                        if self._compute(instruction.seconds, instruction.name):
                            self._at = section_index, time, position
                            return
                    elif isinstance(instruction, StartOperations):
                        for launch in instruction.launches:
                            self._enqueue(launch)
                    elif isinstance(instruction, Wait):
                        self._waits.extend(run for ref in instruction.operations if (run := self._run(ref)) is not None)
                        if self._waits and self._wait():
                            self._at = section_index, time, position
                            return
                    elif isinstance(instruction, Hold):
                        self._hold(instruction.name, instruction.change)
                    elif self._begin_update(instruction):
                        self._at = section_index, time, position
                        return
                position = 0
                time += 1
            time = 0
            section_index += 1
            self._marks.clear()
        self._at = section_index, time, position
        self._done = True

    def _compute(self, seconds: float, name: str) -> bool:
        """Compute. Returns whether it takes the clock; while no operation is on its way, it is done at once."""
        if any(self._pending.values()):
            self._clock.start(self._clock.load(Resource.COMPUTE), seconds, _Computing(name, self._clock.now))
            return True
        begin = self._clock.now
        self._clock.compute(seconds)
        self._note(COMPUTE, name, begin)
        return False

    def _wait(self) -> bool:
        """Wait for the next operation that has not ended. Returns whether there is one."""
        while self._waits:
            if not self._waits[0].ended:
                self._awaited, self._waited_since = self._waits[0], self._clock.now
                return True
            self._waits.popleft()
        return False

    def _begin_update(self, instruction: UpdateParameters) -> bool:
        """Update parameters as their gradients arrive. Returns whether computation is busy or waits."""
        each = instruction.seconds is not None
        self._updating.extend((run, seconds if each else None) for seconds, run in self._finals)
        return self._update()

    def _update(self) -> bool:
        while self._updating:
            run, seconds = self._updating[0]
            if run is not None and not run.ended:
                self._waits.append(run)
                return self._wait()
            self._updating.popleft()
            if seconds and self._compute(seconds, "update"):
                return True
        return False

    def _ended(self, run: _Flight) -> None:
        super()._ended(run)
        if run is self._awaited:
            self._awaited = None
            self.exposed[run.launch.lane] += self._clock.now - self._waited_since
            self._note(WAITING, f"for {run.launch.lane}", self._waited_since)
            self._compute_on()

    # -- repeated sections -------------------------------------------------------------------------------------

    def _repeat(self, section: Section, time: int) -> int:
        """Begin one more time of a section. Returns how many times of it are skipped, because all of them are alike."""
        if time == 0:
            self._marks.clear()
        else:
            self._spreads += section.spreads
        if section.spreads and self._pending[Lane.SPREAD]:
            return 0  # they are on their way since the step began, and no state comes again before they have arrived
        mark = self._mark()
        for earlier in range(1, min(_LONGEST, len(self._marks)) + 1):
            before = self._marks[-earlier]
            skipped = (section.times - time) // earlier
            if skipped and _same(before, mark):
                self._skip(before, mark, skipped)
                self._spreads += section.spreads * earlier * skipped
                self._marks.clear()
                return earlier * skipped
        self._marks.append(mark)
        return 0

    def _mark(self) -> _Mark:
        state: list[object] = []
        left: list[float] = []
        for lane, pending in self._pending.items():
            count = self._counts[lane]
            for number, run in pending.items():
                key = run.key[1] if run.key else None
                state.append((lane, count - number, run.at, run.needs, key, id(run.launch.moves)))
        for task in self._clock.active:
            run = task.done
            name = (run.launch.lane, self._counts[run.launch.lane] - run.number) if isinstance(run, _Flight) else None
            state.append((id(task.load), name))
            left += (task.left, task.late)
        return _Mark(
            tuple(state),
            tuple(left),
            self._clock.now,
            dict(self._clock.busy),
            dict(self.exposed),
            dict(self._counts),
            len(self._finals),
        )

    def _skip(self, before: _Mark, mark: _Mark, times: int) -> None:
        """Let what happened between two marks happen some more times."""
        self._clock.now += times * (mark.now - before.now)
        for resource, seconds in mark.busy.items():
            self._clock.busy[resource] += times * (seconds - before.busy[resource])
        for lane, waited in mark.exposed.items():
            self.exposed[lane] += times * (waited - before.exposed[lane])
            more = times * (mark.counts[lane] - before.counts[lane])
            self._counts[lane] += more
            pending = list(self._pending[lane].values())
            for run in pending:
                run.number += more
            self._pending[lane] = {run.number: run for run in pending}
        # All of the skipped operations have ended, except those that are on their way now.
        again = [(seconds, None) for seconds, _ in self._finals[before.finals : mark.finals]]
        self._finals[before.finals : before.finals] = again * times


def _same(one: _Mark, other: _Mark) -> bool:
    """Whether a state has come again."""
    if one.state != other.state:
        return False
    most = _SAME * (other.now - one.now)
    return all(abs(a - b) <= most for a, b in zip(one.left, other.left, strict=True))
