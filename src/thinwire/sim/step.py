"""Prices a :class:`~thinwire.program.StepProgram` by playing the runtime's operations on a clock.

One rank represents all. It computes, and its lanes perform operations in program order; the stages of a lane run
concurrently. The program is a cycle: a step is played from the update of the previous step to its own update, so that
the spread of updated parameters overlaps its forward. At most three micro-batches are played; the time of further ones
is the difference between three and two. Of many equal blocks, a few are lowered, and no more are played than it takes
until the lanes are in the same state after each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from thinwire.cost import PricedStage, Rates, moves
from thinwire.program import Axis, Event, Lane, Operation, Phase, StepProgram, UnitInfo, exchange_operations, lower
from thinwire.program.timeline import Level, Span
from thinwire.sim.clock import Resource
from thinwire.sim.player import Player
from thinwire.sim.script import UNLIMITED, Headroom, Pricing, Script, Section, Workload, part_seconds, repeated, write
from thinwire.spec import Plan

__all__ = ["PLAYED", "Played", "Pricing", "Simulated", "Workload", "part_seconds", "play", "simulate"]

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
    played = play(plan, workload, rates, micro_batches=micro_batches, trace=trace, pricing=pricing, room=room)
    step = played.step(micro_batches)
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
        return _further(self.longest, self.shorter, micro_batches - PLAYED)


def play(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    *,
    micro_batches: int = 1,
    trace: bool = False,
    pricing: Pricing | None = None,
    room: Headroom = UNLIMITED,
) -> Played:
    """Play one step in steady state, with three micro-batches if it has more; arguments as of :func:`simulate`."""
    script = _script(plan, workload, rates, min(micro_batches, PLAYED), trace, pricing, room)
    player = Player(plan, script, trace=trace)
    if micro_batches <= PLAYED:
        player.play([*script.begin, *_passes(script, range(micro_batches)), *script.end])
        return Played(_simulated(player, rates))
    # Two and three micro-batches begin alike, and the last of either ends the step.
    player.play([*script.begin, *_passes(script, [0]), *script.forwards[1]], drain=False)
    shorter = player.copy()
    player.play([*script.backwards[1], *_passes(script, [2]), *script.end])
    shorter.play([*script.backwards[2], *script.end])
    return Played(_simulated(player, rates), _simulated(shorter, rates))


def _further(three: Simulated, two: Simulated, more: int) -> Simulated:
    """A step with ``more`` micro-batches than three: each takes what the third one adds."""

    def further(at_three: float, at_two: float) -> float:
        return at_three + more * (at_three - at_two)

    return replace(
        three,
        seconds=further(three.seconds, two.seconds),
        computing=further(three.computing, two.computing),
        exposed={lane: max(0.0, further(three.exposed[lane], two.exposed[lane])) for lane in Lane},
        busy={resource: further(three.busy[resource], two.busy[resource]) for resource in Resource},
    )


def _passes(script: Script, micro_batches: Sequence[int]) -> list[Section]:
    """Forward and backward of these micro-batches."""
    return [part for number in micro_batches for part in (*script.forwards[number], *script.backwards[number])]


def _simulated(player: Player, rates: Rates) -> Simulated:
    return Simulated(
        seconds=player.end,
        computing=player.busy[Resource.COMPUTE],
        exposed=player.exposed,
        busy=player.busy,
        spans=tuple(player.spans or ()),
        levels=tuple(player.levels),
        extrapolated=rates.extrapolated,
    )


def _script(
    plan: Plan,
    workload: Workload,
    rates: Rates,
    micro_batches: int,
    trace: bool = False,
    pricing: Pricing | None = None,
    room: Headroom = UNLIMITED,
) -> Script:
    """The script of a step, of fewer blocks if those that are left out repeat others."""

    of_experts = plan.for_experts()

    def thinwire(plan: Plan, operation: Operation, units: Sequence[UnitInfo]) -> list[PricedStage]:
        shared = bool(operation.units) and units[operation.units[0]].experts
        return moves(of_experts if shared else plan, operation, rates)

    whole = trace or pricing is not None or room != UNLIMITED
    fewer = None if whole else repeated(plan, workload)
    if fewer is not None:
        program = lower(plan, fewer.workload.units, micro_batches=micro_batches)
        script = write(plan, workload, rates, program, thinwire, fewer=fewer)
        if script is not None:
            return script
    program = lower(plan, workload.units, micro_batches=micro_batches)
    if not plan.overlap.gather:
        room = replace(room, ahead=1.0)
    if not plan.overlap.reduce:
        room = replace(room, bucket=None)
    program = _split_reductions(_split_gathers(program, room), room)
    script = write(plan, workload, rates, program, pricing or thinwire, trace=trace, room=room)
    assert script is not None, "a whole script repeats nothing"
    return script


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
