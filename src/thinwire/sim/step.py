"""Prices a :class:`~thinwire.program.StepProgram` by playing the runtime's operations on a clock.

One rank represents all. It computes, and its lanes perform operations in program order; the stages of a lane run
concurrently. The program is a cycle: a step is played from the update of the previous step to its own update, so that
the spread of updated parameters overlaps its forward. At most three micro-batches are played; the time of further ones
is the difference between three and two. Of many equal blocks, a few are lowered, and no more are played than it takes
until the lanes are in the same state after each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

from thinwire.cost import PricedStage, Rates, moves
from thinwire.program import AnyLane, Lane, Operation, UnitInfo, exchange_operations, lower
from thinwire.program.stages import TRANSFERS
from thinwire.program.timeline import Level, Span
from thinwire.sim.clock import Resource
from thinwire.sim.player import Activity, Player
from thinwire.sim.repetition import repeated
from thinwire.sim.workload import Execution, Workload
from thinwire.spec import Plan
from thinwire.spec.profile import Handling

PLAYED = 3
"""Most micro-batches to play; further ones repeat the last of the middle ones."""


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
    """

    seconds: float
    computing: float
    exposed: Mapping[AnyLane, float]
    busy: Mapping[Resource, float]
    spans: tuple[Span, ...] = ()
    levels: tuple[Level, ...] = ()


def simulate(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    *,
    micro_batches: int = 1,
    trace: bool = False,
    execution: Execution | None = None,
) -> Simulated:
    """Play one step in steady state, by rates without slowdown. Its exchanges with other islands count with their mean
    over many steps."""
    played = play(plan, workload, rates, micro_batches=micro_batches, trace=trace, execution=execution)
    step = played.step(micro_batches)
    return step if plan.num_islands == 1 else with_exchanges(plan, workload.units, rates, step)


def with_exchanges(plan: Plan, units: Sequence[UnitInfo], rates: Rates, step: Simulated) -> Simulated:
    """A step of an island together with its exchanges, as a mean over many steps.

    Computation waits for what an exchange takes longer than ``delay`` steps. If exchanges come faster than links carry
    them, it waits until they have. Exchanges and the collectives inside an island are taken not to slow each other.
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


@dataclass(frozen=True, slots=True)
class Played:
    """A step that was played, from which steps with more micro-batches follow.

    Attributes:
        longest: The step with all of its micro-batches, or with three if it has more.
        shorter: The step with two if it has more than three; ``None`` otherwise.
    """

    longest: Simulated
    shorter: Simulated | None = None

    def step(self, micro_batches: int) -> Simulated:
        """The step with as many micro-batches as were asked for, or more if those were more than three."""
        if self.shorter is None:
            return self.longest
        three, two, more = self.longest, self.shorter, micro_batches - PLAYED

        def further(at_three: float, at_two: float) -> float:  # each takes what the third one adds
            return at_three + more * (at_three - at_two)

        return replace(
            three,
            seconds=further(three.seconds, two.seconds),
            computing=further(three.computing, two.computing),
            exposed={lane: max(0.0, further(three.exposed[lane], two.exposed[lane])) for lane in three.exposed},
            busy={resource: further(three.busy[resource], two.busy[resource]) for resource in Resource},
        )


def play(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    *,
    micro_batches: int = 1,
    trace: bool = False,
    execution: Execution | None = None,
) -> Played:
    """Play one step in steady state, with three micro-batches if it has more; arguments as of :func:`simulate`."""
    clip = workload.clip and execution is None  # constants of other engines were fitted to include their exchange
    execution = execution or _own(plan, rates)
    fewer = repeated(plan, workload) if execution.repeats and not trace else None
    units = workload.units if fewer is None else fewer.workload.units
    program = execution.revised(lower(plan, units, micro_batches=min(micro_batches, PLAYED), clip=clip))
    player = Player(plan, workload, rates, program, execution, trace=trace, fewer=fewer)
    if micro_batches <= PLAYED:
        player.play(chain(player.begin(), *_passes(player, range(micro_batches)), player.finish()))
        return Played(_simulated(player, rates))
    # Two and three micro-batches begin alike, and the last of either ends the step.
    player.play(chain(player.begin(), *_passes(player, [0]), player.forward(1)), drain=False)
    shorter = player.copy()
    shorter.leave_out(1)
    player.play(chain(player.backward(1), *_passes(player, [2]), player.finish()))
    shorter.play(chain(shorter.backward(2), shorter.finish()))
    return Played(_simulated(player, rates), _simulated(shorter, rates))


def _passes(player: Player, micro_batches: Sequence[int]) -> list[Activity]:
    """Forward and backward of these micro-batches."""
    return [part for number in micro_batches for part in (player.forward(number), player.backward(number))]


def _simulated(player: Player, rates: Rates) -> Simulated:
    busy = player.lanes.clock.busy
    return Simulated(
        seconds=player.end,
        computing=busy[Resource.COMPUTE],
        exposed=player.exposed,
        busy=busy,
        spans=tuple(player.lanes.spans or ()),
        levels=tuple(player.lanes.levels),
    )


def _own(plan: Plan, rates: Rates) -> Execution:
    """How thinwire's runtime performs a program."""
    of_experts = plan.for_experts()

    def pricing(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
        shared = bool(operation.units) and units[operation.units[0]].experts
        return moves(of_experts if shared else plan, operation, rates)

    return Execution(pricing, repeats=True)


def lane_work(plan: Plan, workload: Workload, rates: Rates) -> dict[Lane, tuple[float, float]]:
    """Seconds of work that each lane has in a step, without slowdown by anything else: of its hops, and of its codecs
    and copies. Exchanges with other islands count with their mean over many steps. What the runtime takes to prepare
    stages is no lane's work."""
    rates = copy(rates)
    rates.handling = Handling()
    pricing, seconds = _own(plan, rates).pricing, dict.fromkeys(Lane, (0.0, 0.0))
    for lane, operation, often in lane_operations(plan, workload.units, clip=workload.clip):
        for stage in pricing(plan, operation, workload.units):
            (moving, coding), taken = seconds[lane], often * stage.seconds
            is_transfer = stage.stage in TRANSFERS
            seconds[lane] = (moving + taken, coding) if is_transfer else (moving, coding + taken)
    return seconds


def lane_operations(
    plan: Plan, units: Sequence[UnitInfo], *, clip: bool, position: int = 0
) -> Iterator[tuple[Lane, Operation, float]]:
    """The operations of each lane in a step of the rank at this position, with how often a step has them: exchanges
    with other islands come less than once, as a mean over many steps."""
    program = lower(plan, units, micro_batches=plan.micro_batches, position=position, clip=clip)
    for operation in program.operations:
        if isinstance(operation.lane, Lane):
            yield operation.lane, operation, 1.0
    islands = plan.islands
    if islands is None or islands.count == 1:
        return
    for fragment in range(islands.fragments):
        for operation in exchange_operations(plan, units, fragment, position):
            yield Lane.OUTER, operation, islands.exchanges_per_step
