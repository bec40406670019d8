"""Equal blocks of a model: a step is played with a few of them, of which one period is repeated."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.program import UNDER_WAY, UnitInfo
from thinwire.program.wire import ITEMSIZE, spreads_difference
from thinwire.sim.workload import Workload, work_of
from thinwire.spec import Plan


@dataclass(frozen=True, slots=True)
class Repeated:
    """A model with fewer equal blocks, of which a period is missing some times: the program repeats itself after it."""

    workload: Workload
    blocks: frozenset[int]
    period: int
    times: int


_ENDS = 2
"""Blocks at the end of a pass that differ from those before, beside those that are prefetched."""


def repeated(plan: Plan, workload: Workload) -> Repeated | None:
    """Leave out equal blocks whose operations repeat those of other blocks; ``None`` if there are too few of them.

    Args:
        plan: The plan. Choices that depend on all blocks together, such as units that stay gathered as far as memory
            reaches, are not repeated.
        workload: The work of the whole model.
    """
    by_bytes = (plan.gather_bytes, plan.reduce_bytes, plan.spread_bytes, plan.gathers_by_bytes)
    if (
        not plan.residence.on_device
        or plan.ep > 1
        or any(by_bytes)
        or plan.partition == "inter"
        or not plan.overlap.spread
        or spreads_difference(plan)
    ):
        return None
    first, length, size = _equal_blocks(workload)
    period = _period(plan, workload.units[first : first + size])
    # The backward repeats the period after the first UNDER_WAY, in which reductions wait for others already, and the
    # forward the one after as many as are prefetched. Another one follows, like it.
    shortest = period * (max(UNDER_WAY, plan.prefetch) + 2) + plan.prefetch + _ENDS
    missing = (length - shortest) // period
    if missing < 2:
        return None
    kept = length - missing * period
    out = slice(first + kept * size, first + length * size)
    units, parts, exchanges = list(workload.units), list(workload.parts), list(workload.exchanges)
    # The control exchange has a bit for each parameter, of all blocks.
    parameters = sum(unit.parameters for unit in units[out])
    blocks = frozenset(unit.block for unit in units[first : out.start])
    del units[out], parts[out], exchanges[out]
    units[-1] = replace(units[-1], parameters=units[-1].parameters + parameters)
    fewer = replace(workload, units=tuple(units), parts=tuple(parts), kept=(), exchanges=tuple(exchanges))
    return Repeated(fewer, blocks, period, missing)


def _equal_blocks(workload: Workload) -> tuple[int, int, int]:
    """The longest run of equal blocks: its first unit, the number of blocks, and the number of units of each."""
    best, run = (0, 0, 0), (0, 0, 0)
    before: list[object] = []
    position = 0
    for _, members in itertools.groupby(zip(workload.units, workload.parts, strict=True), lambda pair: pair[0].block):
        same = [work_of(unit, part) for unit, part in members]
        run = (run[0], run[1] + 1, run[2]) if same == before else (position, 1, len(same))
        best = max(best, run, key=lambda found: found[1])
        before = same
        position += len(same)
    return best


def _period(plan: Plan, block: Sequence[UnitInfo]) -> int:
    """Blocks after which buckets begin at the same unit of a block again."""
    if plan.params.ranks == plan.world:
        return 1
    itemsize, ranks = ITEMSIZE[plan.effective_reduce_dtype], plan.params.ranks
    sizes = [sum(b.numel // ranks * itemsize for b in unit.buffers if b.trainable) for unit in reversed(block)]
    if not any(sizes):  # frozen blocks
        return 1
    places: dict[int, int] = {}
    unit = 0
    while unit % len(sizes) not in places:
        places[unit % len(sizes)] = unit
        size = 0
        while size < plan.bucket_bytes:
            size += sizes[unit % len(sizes)]
            unit += 1
    return (unit - places[unit % len(sizes)]) // len(sizes)
