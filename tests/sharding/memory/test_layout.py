"""Flat buffers, shards, shares and fragments: every element of every parameter appears exactly once, and aligned."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.program import Axis, axis_index
from thinwire.program.shares import ALIGNMENT_BYTES
from thinwire.sharding.memory.layout import (
    FlatLayout,
    Fragment,
    Run,
    Slot,
    deal_shares,
    even_shares,
    lay_out,
)
from thinwire.spec import Factor, Plan

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(torch.Size), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan on a small mesh: each axis is a chain of divisors, and a factor that crosses nodes fills a node."""
    mesh = Factor(local=draw(st.sampled_from([1, 2, 3, 4])), nodes=draw(st.sampled_from([1, 2, 3])))

    def inside(outer: Factor) -> Factor:
        local = draw(st.sampled_from([d for d in range(1, outer.local + 1) if outer.local % d == 0]))
        nodes = draw(st.sampled_from([d for d in range(1, outer.nodes + 1) if outer.nodes % d == 0]))
        return Factor(local=mesh.local if nodes > 1 else local, nodes=nodes)

    optimizer = inside(mesh)
    params = inside(optimizer)
    grads = draw(st.sampled_from([params, optimizer]))
    return Plan(mesh=mesh, params=params, grads=grads, optimizer=optimizer)


def names(shapes: list[torch.Size]) -> list[tuple[str, torch.Size]]:
    return [(f"p{number}", shape) for number, shape in enumerate(shapes)]


def cover(parts: list[tuple[int, int]], whole: int) -> bool:
    """Whether ``(start, length)`` parts are disjoint and make up ``[0, whole)``."""
    position = 0
    for start, length in sorted(part for part in parts if part[1]):
        if start != position:
            return False
        position += length
    return position == whole


@pytest.mark.slow
@settings(deadline=None)
@given(SHAPES, plans(), DTYPES)
def test_parameters_follow_each_other_and_they_and_shards_are_aligned(
    shapes: list[torch.Size], plan: Plan, dtype: torch.dtype
) -> None:
    layout = lay_out(names(shapes), plan, dtype, trainable=True)
    assert [slot.shape for slot in layout.slots] == shapes
    unit, end, inside = max(1, ALIGNMENT_BYTES // dtype.itemsize), 0, []
    for slot in layout.slots:
        assert slot.offset * dtype.itemsize % ALIGNMENT_BYTES == 0
        assert end <= slot.offset < end + unit
        assert slot.numel == math.prod(slot.shape)
        end = slot.offset + slot.numel
        inside += range(slot.offset, end)
    assert end <= layout.numel
    padding = [element for gap in layout.gaps for element in range(gap.start, gap.stop)]
    assert sorted(inside + padding) == list(range(layout.numel)), "each element is a parameter's or padding"
    for ranks in (plan.params.ranks, plan.optimizer.ranks, plan.world):
        assert layout.numel % ranks == 0
        assert layout.numel // ranks * dtype.itemsize % ALIGNMENT_BYTES == 0
    assert layout.shard_numel * plan.params.ranks == layout.numel
    assert layout.numel >= 1, "an empty unit still has a buffer"
    spare = layout.numel - max(end, 1)
    assert spare < plan.world * max(1, ALIGNMENT_BYTES // dtype.itemsize), "no more padding than needed"
    assert layout.slot_by_name["p0"] is layout.slots[0]


@settings(deadline=None)
@given(SHAPES, plans())
def test_shards_partition_every_parameter(shapes: list[torch.Size], plan: Plan) -> None:
    layout = lay_out(names(shapes), plan, torch.float32, trainable=True)
    parts: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in layout.slots}
    for shard in range(layout.num_shards):
        for slot, offset, run in layout.pieces(shard):
            assert 0 <= run.start < run.start + run.length <= layout.shard_numel
            assert shard * layout.shard_numel + run.start == slot.offset + offset
            parts[slot.name].append((offset, run.length))
    assert all(cover(parts[slot.name], slot.numel) for slot in layout.slots)


@settings(deadline=None)
@given(SHAPES, plans(), st.booleans())
def test_fragments_partition_every_parameter(shapes: list[torch.Size], plan: Plan, inter: bool) -> None:
    layout = lay_out(names(shapes), plan, torch.float32, trainable=True)
    parts: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in layout.slots}
    for shard in range(layout.num_shards):
        shares = deal_shares([layout], plan, shard)[0] if inter else even_shares(layout, plan)
        assert len(shares) == plan.optimizer.ranks // plan.params.ranks
        for share in shares:
            # Runs laid end to end: position p of the share is this element of the shard.
            elements = [run.start + i for run in share for i in range(run.length)]
            assert len(set(elements)) == len(elements)
            for fragment in layout.fragments(shard, share):
                begin = shard * layout.shard_numel + elements[fragment.position]
                assert begin == fragment.slot.offset + fragment.offset
                run = elements[fragment.position : fragment.position + fragment.length]
                assert run == list(range(run[0], run[0] + fragment.length))
                assert fragment.whole == (fragment.length == fragment.slot.numel)
                parts[fragment.slot.name].append((fragment.offset, fragment.length))
    assert all(cover(parts[slot.name], slot.numel) for slot in layout.slots)


@pytest.mark.slow
@settings(deadline=None)
@given(SHAPES, plans())
def test_even_shares_are_equal_slices_in_order(shapes: list[torch.Size], plan: Plan) -> None:
    layout = lay_out(names(shapes), plan, torch.float32, trainable=True)
    shares = even_shares(layout, plan)
    length = layout.shard_numel // len(shares)
    assert shares == tuple((Run(i * length, length),) for i in range(len(shares)))
    assert length * len(shares) == layout.shard_numel
    assert length * 4 % ALIGNMENT_BYTES == 0


@given(st.lists(SHAPES, min_size=1, max_size=3), plans())
@settings(max_examples=60, deadline=None)
def test_dealt_shares_split_nothing_and_are_balanced(units: list[list[torch.Size]], plan: Plan) -> None:
    layouts = [lay_out(names(shapes), plan, torch.float32, trainable=True) for shapes in units]
    for shard in range(plan.params.ranks):
        dealt = deal_shares(layouts, plan, shard)
        assert dealt == deal_shares(layouts, plan, shard), "every rank deals alike"
        loads = [0] * (plan.optimizer.ranks // plan.params.ranks)
        largest = 0
        for layout, shares in zip(layouts, dealt, strict=True):
            pieces = [run for _, _, run in layout.pieces(shard)]
            largest = max([largest, *(piece.length for piece in pieces)])
            runs = [run for share in shares for run in share]
            for piece in pieces:  # whole, inside one run
                assert sum(run.start <= piece.start < run.start + run.length for run in runs) == 1
                home = next(run for run in runs if run.start <= piece.start < run.start + run.length)
                assert piece.start + piece.length <= home.start + home.length
            assert sum(run.length for run in runs) == sum(piece.length for piece in pieces), "padding belongs to nobody"
            for owner, share in enumerate(shares):
                assert list(share) == sorted(share, key=lambda run: run.start)
                ends = [run.start + run.length for run in share]
                assert all(end < run.start for end, run in zip(ends, share[1:], strict=False)), "neighbours are joined"
                loads[owner] += sum(run.length for run in share)
        assert max(loads) <= sum(loads) / len(loads) + largest
        assert max(loads) - min(loads) <= largest


def test_dealing_by_size() -> None:
    """Largest first, to the rank that holds least: 5 | 4 1 | 3 2 of five tensors."""
    plan = Plan(mesh="3x1", params="1x1", grads="1x1", optimizer="3x1", partition="inter")
    sizes = [1, 5, 2, 4, 3]
    layout = lay_out(names([torch.Size([n * 100]) for n in sizes]), plan, torch.float32, trainable=True)
    (shares,) = deal_shares([layout], plan, 0)
    assert shares == (
        (Run(100, 500),),
        (Run(0, 100), Run(800, 400)),
        (Run(600, 200), Run(1200, 300)),
    )


def test_neighbours_are_one_run() -> None:
    plan = Plan(mesh="2x1", params="1x1", grads="1x1", optimizer="2x1", partition="inter")
    layout = lay_out(names([torch.Size([8]), torch.Size([3]), torch.Size([4])]), plan, torch.float32, trainable=True)
    assert deal_shares([layout], plan, 0) == [((Run(0, 8),), (Run(8, 3), Run(12, 4)))]
    layout = lay_out(names([torch.Size([8]), torch.Size([4]), torch.Size([3])]), plan, torch.float32, trainable=True)
    assert deal_shares([layout], plan, 0) == [((Run(0, 8),), (Run(8, 7),))]


def test_a_fragment_of_several() -> None:
    """The second of four slices of 16 elements holds the end of one matrix and the beginning of the next; the fourth
    holds the end of that one, two elements of padding and a scalar."""
    plan = Plan(mesh="4x1", params="4x1", grads="4x1", optimizer="4x1")
    shapes = [torch.Size([4, 5]), torch.Size([6, 5]), torch.Size([])]
    layout = lay_out(names(shapes), plan, torch.float32, trainable=True)
    first, second, scalar = layout.slots
    assert (scalar.offset + scalar.numel, layout.numel, layout.shard_numel) == (53, 64, 16)
    assert layout.fragments(1, [Run(0, 16)]) == (Fragment(first, 16, 4, 0), Fragment(second, 0, 12, 4))
    assert layout.fragments(3, [Run(0, 16)]) == (Fragment(second, 28, 2, 0), Fragment(scalar, 0, 1, 4))
    assert layout.fragments(3, [Run(0, 16)])[1].whole
    assert layout.fragments(1, [Run(2, 4), Run(12, 2)]) == (
        Fragment(first, 18, 2, 0),
        Fragment(second, 0, 2, 2),
        Fragment(second, 8, 2, 4),
    )


def test_parameters_without_elements_lie_nowhere() -> None:
    plan = Plan(mesh="2x1", params="2x1", grads="2x1", optimizer="2x1")
    layout = lay_out(names([torch.Size([0]), torch.Size([3]), torch.Size([2, 0])]), plan, torch.float32, trainable=True)
    order = [slot.name for shard in (0, 1) for slot, _, _ in layout.pieces(shard)]
    assert order == ["p1"]
    empty = lay_out(names([torch.Size([0])]), plan, torch.float32, trainable=True)
    assert (empty.pieces(0), empty.numel) == ([], 8)


@pytest.mark.parametrize("rank", range(8))
def test_which_shard_a_rank_holds(rank: int) -> None:
    plan = Plan.preset("amsp-30b", nodes=2, local=4)
    assert axis_index(plan, Axis.PARAMS, rank) == rank % 4


def test_slots_are_found_by_value() -> None:
    slots = (Slot("a", torch.Size([2]), 0), Slot("b", torch.Size([2]), 2))
    layout = FlatLayout(slots, 8, 1, torch.float32, trainable=True, encoded=True)
    assert layout.slots.index(Slot("b", torch.Size([2]), 2)) == 1
