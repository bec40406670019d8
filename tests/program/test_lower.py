"""Lowering: what a plan's prefetch means where each module is a unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from thinwire.cost.units import units as units_of
from thinwire.program import SLOTS, Axis, BufferInfo, Event, HostLane, Kind, Lane, Phase, UnitInfo, lower
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ModelSpec, Plan

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


def test_modules_of_a_large_model_take_as_many_collectives_as_blocks() -> None:
    """At most 1.1 times as many: what starts together travels as one."""
    model = ModelSpec.preset("llama-7b")

    def collectives(**fields: object) -> int:
        plan = Plan.preset("zero3", nodes=4, local=8, **fields)
        return len(lower(plan, units_of(model, plan), micro_batches=4).operations)

    blocks, apart = collectives(), collectives(granularity="module")
    together = collectives(granularity="module", gather_bytes="512MiB", reduce_bytes="512MiB")
    assert apart > 3 * blocks
    assert together <= 1.1 * blocks


def started_by(event: Event, **fields: object) -> list[tuple[Lane, tuple[int, ...]]]:
    """Collectives that start at an event of the only micro-batch, each with its units."""
    plan = Plan.preset("zero3", nodes=2, local=2, granularity="module", **fields)
    program = lower(plan, modules_of_blocks())
    return [(operation.lane, operation.units) for operation in program.starts(event)]


def spreads(units: Sequence[UnitInfo], **fields: object) -> list[tuple[int, ...]]:
    """Units of each spread, in order."""
    program = lower(Plan.preset("zero1", nodes=2, local=2, **fields), units)
    return [operation.units for operation in program.operations if operation.lane is Lane.SPREAD]


def test_updated_parameters_are_spread_together_up_to_a_number_of_bytes() -> None:
    """A module has 128 bytes."""
    units = modules_of_blocks()
    apart = spreads(units)
    assert all(len(of_units) == 1 for of_units in apart)
    assert [len(of_units) for of_units in spreads(units, spread_bytes=384)] == [3] * (len(apart) // 3)
    assert spreads(units, spread_bytes="1MiB") == [tuple(unit for (unit,) in apart)]
    assert spreads(units, spread_bytes="1MiB", partition="inter") == apart, "shares of unequal sizes travel by unit"


def test_small_units_are_spread_behind_the_next_large_one() -> None:
    def unit(numel: int) -> UnitInfo:
        return replace(modules_of_blocks()[1], buffers=(BufferInfo(numel, 2, True, (numel // 4,) * 4),))

    small, large = 64, 1 << 16
    assert spreads([unit(n) for n in (small, large, small, small, large)]) == [(1,), (0,), (4,), (2,), (3,)]
    assert spreads([unit(small)] * 4) == [(0,), (1,), (2,), (3,)]
    together = spreads([unit(n) for n in (small, large, small, small, large)], spread_bytes=1)
    assert together == [(1, 0), (4, 2, 3)], "what the forward needs first does not wait for the large one after that"


def test_gathers_that_start_together_travel_as_one_until_they_have_enough_bytes() -> None:
    """A module has 128 bytes."""
    first = Event(Phase.PRE_FORWARD, 0, 0)
    needed, ahead = (Lane.GATHER, (0,)), (1, 2, 3, 4, 5)
    assert started_by(first, gather_bytes=129) == [
        needed,
        *[(Lane.GATHER, ahead[begin : begin + 2]) for begin in range(0, 5, 2)],
    ]
    assert started_by(first, gather_bytes=128) == [needed, *[(Lane.GATHER, (unit,)) for unit in ahead]]


def test_reductions_wait_until_they_have_enough_bytes() -> None:
    """The last module's gradients wait for those of the one before it."""
    ready = [Event(Phase.GRADS_READY, unit, 0) for unit in (11, 10, 9)]
    reduced = [started_by(event, reduce_bytes=129) for event in ready]
    assert reduced == [[], [(Lane.REDUCE, (11, 10))], []]


def test_a_bucket_starts_once_its_gradients_are_reduced_over_params() -> None:
    plan = Plan.preset(
        "amsp-30b", nodes=2, local=2, granularity="module", reduce_bytes=300, bucket_bytes=1, optimizer="2x2"
    )
    units = [replace(unit, buffers=(BufferInfo(64, 2, True, (16,) * 2),)) for unit in modules_of_blocks()]
    program = lower(plan, units)
    begun = {operation.index: operation.start for operation in program.operations}
    scatters = [operation for operation in program.operations if operation.axis is Axis.SHARD and operation.bucket]
    assert scatters
    for operation in scatters:
        assert [begun[index] for index in operation.after] == [operation.start]


@pytest.mark.parametrize(("preset", "shares"), [("zero1", 4), ("zero3", 1), ("amsp-30b", 2)])
def test_gradients_on_the_host_travel_once_a_micro_batch_after_their_own_reductions(preset: str, shares: int) -> None:
    """They come up for the next micro-batch, which adds to them, and for the update. Micro-batches before the last one
    add to a shard of G, which has ``shares`` shares of OS."""
    micro_batches, on_host = 3, {"residence": {"optimizer": "host-stream", "gradients": "host"}}
    units = [replace(unit, buffers=(BufferInfo(64, 2, True, (16,) * shares),)) for unit in modules_of_blocks()]
    plan = Plan.preset(preset, nodes=2, local=2, optimizer="2x2", **on_host)
    program = lower(plan, units, micro_batches=micro_batches)
    copies = [
        operation
        for operation in program.operations
        if operation.kind is Kind.COPY and operation.start.phase is not Phase.STEP and operation.lane in tuple(HostLane)
    ]
    for lane, times in ((HostLane.UP, micro_batches - 1), (HostLane.DOWN, micro_batches)):
        travelled = Counter(
            (operation.units, operation.start.micro_batch) for operation in copies if operation.lane is lane
        )
        assert len(travelled) == times * len(units)
        assert set(travelled.values()) == {1}
    share = 16 * ITEMSIZE[plan.accumulate_dtype]
    for copy in copies:
        last = copy.lane is HostLane.DOWN and copy.start.micro_batch == micro_batches - 1
        assert copy.size == (share if last else shares * share)
    reductions = [operation for operation in program.operations if operation.lane is Lane.REDUCE]
    for copy in (operation for operation in copies if operation.lane is HostLane.DOWN):
        ended = {index for index in copy.after if copy.units[0] in program.operations[index].units}
        assert ended == set(copy.after)
        assert ended == {
            reduction.index
            for reduction in reductions
            if copy.units[0] in reduction.units and reduction.start.micro_batch == copy.start.micro_batch
        }


def test_a_unit_that_is_used_again_soon_stays_gathered_between_its_forward_and_its_backward() -> None:
    units, plan = modules_of_blocks(), Plan.preset("zero3", nodes=2, local=2, granularity="module")

    def gathers(reuse_bytes: int) -> list[int]:
        program = lower(plan.with_(reuse_bytes=reuse_bytes), units)
        return sorted(unit for op in program.operations if op.lane is Lane.GATHER for unit in op.units)

    each = list(range(len(units)))
    assert gathers(0) == sorted([*each, *each[:-1]]), "the backward of the last module follows its forward"
    assert gathers(2 * units[0].nbytes) == sorted([*each, *each[:-2]])
    assert gathers(2 * len(units) * units[0].nbytes) == each


@pytest.mark.parametrize("where", ["host-stream", "host-update"])
def test_states_come_up_once_those_of_earlier_batches_have_left(where: str) -> None:
    plan = Plan.preset("zero1", nodes=2, local=2, residence={"optimizer": where})
    copies = [
        operation
        for operation in lower(plan, modules_of_blocks()).operations
        if operation.kind is Kind.COPY and operation.start.phase is Phase.STEP
    ]
    up, down = ([copy for copy in copies if copy.lane is lane] for lane in (HostLane.UP, HostLane.DOWN))
    left = down if where == "host-stream" else up
    assert len(up) > SLOTS
    for batch, copy in enumerate(up):
        before = {earlier.index for earlier in left} & set(copy.after)
        assert before == ({left[batch - SLOTS].index} if batch >= SLOTS else set())
