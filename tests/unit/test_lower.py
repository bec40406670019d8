"""Lowering: what a plan's prefetch means where each module is a unit."""

from __future__ import annotations

import pytest

from thinwire.program import BufferInfo, Lane, Phase, UnitInfo, lower
from thinwire.spec import Plan

BLOCKS = 4
MODULES = ("query", "output", "up")


def modules_of_blocks() -> list[UnitInfo]:
    """Units of equal size, three for each block."""
    return [
        UnitInfo(f"blocks.{block}.{name}", (BufferInfo(64, 2, True, (16,) * 4),), parameters=1, block=block)
        for block in range(BLOCKS)
        for name in MODULES
    ]


def gathered_at(prefetch: int) -> dict[str, set[str]]:
    """In the forward, the modules whose gathers start when a module is reached, by that module."""
    units = modules_of_blocks()
    plan = Plan.preset("zero3", nodes=2, local=2, granularity="module", prefetch=prefetch)
    started: dict[str, set[str]] = {}
    for operation in lower(plan, units).operations:
        if operation.lane is Lane.GATHER and operation.start.phase is Phase.PRE_FORWARD:
            gathered = {units[unit].name for unit in operation.units}
            started.setdefault(units[operation.start.unit].name, set()).update(gathered)
    return started


def names(*blocks: int) -> set[str]:
    return {f"blocks.{block}.{name}" for block in blocks for name in MODULES}


@pytest.mark.parametrize("prefetch", [1, 2])
def test_the_forward_gathers_every_module_of_the_next_blocks(prefetch: int) -> None:
    """AMSP, section V-C: when a block begins, all modules of the next one are on their way."""
    started = gathered_at(prefetch)
    assert started["blocks.0.query"] == names(*range(1 + prefetch))
    for block in range(1, BLOCKS - prefetch):
        assert started[f"blocks.{block}.query"] == names(block + prefetch)


def test_without_prefetch_a_block_gathers_its_own_modules() -> None:
    started = gathered_at(0)
    assert started == {f"blocks.{block}.query": names(block) for block in range(BLOCKS)}
