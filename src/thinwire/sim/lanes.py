"""Lanes on a clock: each performs its operations in order, the stages of an operation one after another.

The stages of a lane run concurrently, each with a queue of its own, unless the plan says that operations run one after
another as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.cost import PricedStage
from thinwire.program import AnyLane, Axis, HostLane, Kind, Lane, Operation, StepProgram
from thinwire.program.stages import Stage
from thinwire.program.timeline import Level, Span
from thinwire.sim.clock import Burden, FluidClock, Resource
from thinwire.sim.workload import Pricing
from thinwire.spec import Plan

GATHERED, GRADIENTS, ACTIVATIONS = "gathered parameters", "gradients on their way", "activations"
"""Names of the memory levels."""

_OF_HOST = {Stage.UP: Resource.UP, Stage.DOWN: Resource.DOWN, Stage.HOST_UPDATE: Resource.HOST}

Queue = tuple[AnyLane, Stage | None]
"""A stage of a lane; ``None`` if the operations of the lane run one after another as a whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """An operation of the program, ready to start; operations of one price have the same ``moves`` object."""

    operation: Operation
    number: int
    moves: tuple[PricedStage, ...]
    queues: tuple[Queue, ...]

    def __deepcopy__(self, memo: object) -> Launch:
        return self


@dataclass(slots=True, eq=False)
class Flight:
    """One operation on its way.

    Attributes:
        launch: The operation.
        number: Its place in its lane.
        at: Number of its stages that have ended.
        needs: Operations that must end first.
        ended: Whether all of its stages have ended.
        then: Operations that need it.
        begin: When its present stage began.
        queue: The queue of its present stage; ``None`` while it waits for its turn.
    """

    launch: Launch
    number: int
    at: int = 0
    needs: int = 0
    ended: bool = False
    then: list[Flight] = field(default_factory=list)
    begin: float = 0.0
    queue: Queue | None = None


class Lanes:
    """Lanes that perform operations on a clock, and what is recorded of them: spans, ``None`` without tracing, and
    levels of memory."""

    def __init__(self, plan: Plan, program: StepProgram, pricing: Pricing, *, trace: bool = False) -> None:
        self.plan, self.program = plan, program
        self.clock = FluidClock()
        self.spans: list[Span] | None = [] if trace else None
        self.levels: list[Level] = []
        self.launches = _launches(plan, program, pricing)
        self.pending: dict[AnyLane, dict[int, Flight]] = {lane: {} for lane in (*Lane, *HostLane)}
        self._held: dict[str, int] = {}
        self._queues: dict[Queue, deque[Flight]] = {}
        self._busy_queues: set[Queue] = set()
        self._loads: dict[int, Burden] = {}

    @property
    def shared(self) -> tuple[Any, ...]:
        """What copies have in common."""
        return self.plan, self.program, self.launches, self._loads, *self.clock.shared

    @property
    def are_idle(self) -> bool:
        return not any(self.pending.values())

    def flight(self, index: int) -> Flight | None:
        """The operation with this index on its way; ``None`` if it has ended."""
        launch = self.launches[index]
        return self.pending[launch.operation.lane].get(launch.number)

    def renumber(self, older: Mapping[AnyLane, int]) -> None:
        """Let everything on its way take the place of operations that are older by so many of each lane."""
        for lane, count in older.items():
            flights = self.pending[lane].values()
            for flight in flights:
                flight.number -= count
            self.pending[lane] = {flight.number: flight for flight in flights}

    def start(self, launch: Launch, number: int | None = None) -> Flight:
        """Start an operation, at another place of its lane if ``number`` names one."""
        lane = launch.operation.lane
        if self.spans is not None:
            self._carry(launch.operation, 1)
        needed = [other for index in launch.operation.after if (other := self.flight(index)) is not None]
        flight = Flight(launch, launch.number if number is None else number, needs=len(needed))
        self.pending[lane][flight.number] = flight
        for other in needed:
            other.then.append(flight)
        for key in launch.queues:
            if (queue := self._queues.get(key)) is None:
                queue = self._queues[key] = deque()
            queue.append(flight)
        for key in launch.queues:
            self._pull(key)
        return flight

    def moved(self, flight: Flight) -> None:
        """End the present stage of an operation."""
        key, operation, moves = flight.queue, flight.launch.operation, flight.launch.moves
        assert key is not None, "a stage that runs has a queue"
        self._busy_queues.discard(key)
        if self.spans is not None:
            track = f"{operation.lane} {moves[flight.at].stage}"
            self.note(track, f"{operation.kind} {operation.axis}", flight.begin)
        flight.at += 1
        flight.queue = None
        whole = flight.at == len(moves)
        if key[1] or whole:
            self._queues[key].popleft()
        if whole:
            self._ended(flight)
        else:
            self._pull((key[0], moves[flight.at].stage) if key[1] else key)
        self._pull(key)

    def _pull(self, key: Queue) -> None:
        """Start the first operation of a queue, if it is that operation's turn."""
        queue = self._queues.get(key)
        if not queue or key in self._busy_queues:
            return
        flight = queue[0]
        if flight.needs:
            return
        moves = flight.launch.moves
        if flight.at == len(moves):
            queue.popleft()
            self._ended(flight)
            self._pull(key)
            return
        move = moves[flight.at]
        if key[1] and move.stage != key[1]:
            return
        self._busy_queues.add(key)
        flight.begin, flight.queue = self.clock.now, key
        self.clock.start(self._load(move), move.seconds, flight)

    def _load(self, move: PricedStage) -> Burden:
        load = self._loads.get(id(move))  # stages live as long as the launches
        if load is None:
            resource = _OF_HOST.get(move.stage) or Resource.of(move.scope)
            load = self.clock.load(resource, move.beside, move.spine_load)
            self._loads[id(move)] = load
        return load

    def _ended(self, flight: Flight) -> None:
        operation, flight.ended = flight.launch.operation, True
        del self.pending[operation.lane][flight.number]
        if self.spans is not None and operation.lane is not Lane.GATHER:
            self._carry(operation, -1)  # gathered parameters stay until they are freed
        for other in flight.then:
            other.needs -= 1
            if not other.needs:
                for key in dict.fromkeys(other.launch.queues):
                    self._pull(key)
        flight.then.clear()

    # -- what is recorded --------------------------------------------------------------------------------------

    def _carry(self, operation: Operation, sign: int) -> None:
        """Change the memory level of an operation in flight."""
        if operation.lane not in (Lane.GATHER, Lane.REDUCE, Lane.SYNC):
            return
        units = self.program.units
        if operation.lane is Lane.GATHER:
            self.hold(GATHERED, sign * sum(units[unit].buffers[number].nbytes for unit, number in operation.buffers))
        else:
            whole = sum(units[unit].nbytes for unit in operation.bucket) // operation.chunks
            shared = {Axis.PARAMS: 1, Axis.SHARD: self.plan.params.ranks}.get(operation.axis, self.plan.optimizer.ranks)
            self.hold(GRADIENTS, sign * (whole // shared))

    def hold(self, name: str, change: int) -> None:
        """Change a memory level by some bytes."""
        if self.spans is not None:
            self._held[name] = self._held.get(name, 0) + change
            self.levels.append(Level(name, self.clock.now, self._held[name]))

    def note(self, track: str, name: str, begin: float) -> None:
        """Note an activity that ends now."""
        if self.spans is not None:
            self.spans.append(Span(track, name, begin, self.clock.now))


def _launches(plan: Plan, program: StepProgram, pricing: Pricing) -> Sequence[Launch]:
    """Every operation with its price. Blocks repeat, so most operations share one."""
    known: dict[tuple[object, ...], tuple[PricedStage, ...]] = {}
    counts = dict[AnyLane, int].fromkeys((*Lane, *HostLane), 0)
    launches = []
    key: tuple[object, ...]
    for op in program.operations:
        several = len(op.buffers) > 1, len(op.bucket) > 1
        key = (op.kind, op.lane, op.axis, op.hops, op.encoded, op.stored, op.chunks, op.size, *several)
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
        moves = known[key]
        stages: list[Stage | None] = [move.stage for move in moves] if moves and plan.overlap.stages else [None]
        launches.append(Launch(op, counts[op.lane], moves, tuple((op.lane, stage) for stage in stages)))
        counts[op.lane] += 1
    return launches
