"""The work of one step on one rank, the seconds of its units, and how an engine performs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.cost import ModelPart, PricedStage, Rates
from thinwire.program import Even, Lane, Operation, StepProgram, UnitInfo, together
from thinwire.spec import Plan

Pricing = Callable[[Plan, Operation, Sequence[UnitInfo]], list[PricedStage]]
"""Prices an operation of a program over these units; returns its stages."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of one step on one rank.

    Attributes:
        parts: Parts of the model, in the order of ``units``.
        units: Descriptions of the units for the program.
        seq: Tokens per sequence.
        clip: Whether the update waits for the gradient norm.
        kept: Bytes that each part keeps from its forward to its backward; empty if memory is not simulated.
        exchanges: Seconds that ranks which share a part exchange in one pass over it, while computation waits; empty if
            they exchange nothing.
    """

    parts: tuple[ModelPart, ...]
    units: tuple[UnitInfo, ...]
    seq: int
    clip: bool = False
    kept: tuple[int, ...] = ()
    exchanges: tuple[float, ...] = ()


def work_of(unit: UnitInfo, part: ModelPart) -> object:
    """What the price of a unit depends on."""
    return unit.buffers, unit.parameters, unit.keeps_gathered, unit.weight_first, part.work


def part_seconds(rates: Rates, part: ModelPart, plan: Plan, seq: int, exchange: float = 0.0) -> tuple[float, float]:
    """Seconds of the forward and of the backward of this rank's tokens through a part, exchanges included."""
    forward, backward = rates.computing(part, plan, seq)
    return forward / plan.cp + exchange, backward / plan.cp + exchange


@dataclass(frozen=True, slots=True)
class Execution:
    """How another engine than thinwire's runtime performs a program.

    Attributes:
        pricing: Prices operations.
        revised: The program as the engine performs it.
        needed_first: Whether operations of the forward that computation waits for start before others of their event.
        holds_reductions: Whether reductions that nothing waits for start only once the next unit of the backward is
            gathered.
        repeats: Whether equal blocks are performed alike, so that it is enough to play some of them.
    """

    pricing: Pricing
    revised: Callable[[StepProgram], StepProgram] = lambda program: program
    needed_first: bool = False
    holds_reductions: bool = False
    repeats: bool = False


class UnitSeconds(NamedTuple):
    """Seconds of a unit's computation in one micro-batch.

    Attributes:
        forward: Its forward.
        again: The forward that recomputation repeats, from the moment the backward needs the unit.
        gradients: From then on, until the gradients of the unit's parameters exist.
        input: The gradient of the unit's input, if it comes after that.
    """

    forward: float
    again: float
    gradients: float
    input: float


def unit_seconds(plan: Plan, workload: Workload, rates: Rates) -> list[UnitSeconds]:
    """Seconds of each unit; equal units have the same."""
    known: dict[object, UnitSeconds] = {}
    seconds = []
    exchanges = workload.exchanges or (0.0,) * len(workload.parts)
    for unit, part, exchange in zip(workload.units, workload.parts, exchanges, strict=True):
        key = work_of(unit, part)
        if key not in known:
            forward, backward = part_seconds(rates, part, plan, workload.seq, exchange)
            again = forward if plan.recompute and part.kind == "block" else 0.0
            first = backward * part.weight_gradient_share(workload.seq) if unit.weight_first else backward
            known[key] = UnitSeconds(forward, again, first, backward - first)
        seconds.append(known[key])
    return seconds


def update_seconds(workload: Workload, rates: Rates, program: StepProgram) -> dict[int, float]:
    """The operations that complete gradients, each with the seconds of the update of what it completes."""
    last: dict[int, int] = {}  # by unit
    for op in program.operations:
        if op.lane in (Lane.REDUCE, Lane.SYNC):
            last.update(dict.fromkeys(op.units, op.index))
    sizes: Counter[int] = Counter()
    for unit, share in enumerate(update_shares(workload.units)):
        if unit in last:
            sizes[last[unit]] += share
    return {index: rates.update(size) for index, size in sizes.items()}


def update_shares(units: Sequence[UnitInfo]) -> list[int]:
    """Number of elements in each unit that the rank with the largest share updates."""
    trained = [[buffer.shares for buffer in unit.buffers if buffer.trainable] for unit in units]
    totals = together([shares for unit in trained for shares in unit])
    busiest = 0 if isinstance(totals, Even) else totals.index(max(totals))
    return [sum(shares[busiest] for shares in unit) for unit in trained]
