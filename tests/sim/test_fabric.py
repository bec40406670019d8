"""Leaf switches and the spine: the share of a group's traffic that crosses the spine, and its cost in a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.sums import closed_form

from thinwire.cost import Efficiency, LibraryCollectives, NominalRates, Pricer, parts, units
from thinwire.errors import SpecError
from thinwire.program import Kind, Scope
from thinwire.sim import Case, Resource, Workload, answer, simulate
from thinwire.sim.clock import FluidClock
from thinwire.spec import ClusterSpec, Fabric, Factor, ModelSpec, Plan

MODEL = ModelSpec(layers=6, hidden=1024, heads=8, vocab=4096, seq=2048)
NIC = 800e9


def cluster(nodes: int = 32, *, leaf: int = 8, oversubscription: float | None = 4.0, **changes: Any) -> ClusterSpec:
    spine = {} if oversubscription is None else {"spine": {"bandwidth": NIC / oversubscription, "latency": "4us"}}
    links = {"nic": {"bandwidth": NIC, "latency": "10us"}, **spine}
    return ClusterSpec.named(f"a800-80g:{nodes}x4", leaves=leaf, links=links, **changes)


@pytest.mark.parametrize(
    ("nodes", "stride", "exchange", "crossing"),
    [
        (8, 1, False, 0.0),  # neighbours below one leaf
        (2, 4, True, 0.0),
        (16, 1, False, 1 / 8),  # of a ring over two leaves, one node of each sends across
        (16, 1, True, 8 / 15),  # of 15 pieces, 8 are for nodes below the other leaf
        (4, 8, False, 1.0),  # one member below each leaf
        (4, 8, True, 1.0),
        (16, 2, False, 2 / 8),  # two rings, four members of each below a leaf
    ],
)
def test_stride_says_what_crosses_the_spine(nodes: int, stride: int, exchange: bool, crossing: float) -> None:
    route = Fabric(cluster()).route(nodes, stride, exchange=exchange)
    assert route.crossing == pytest.approx(crossing)
    assert route.load == pytest.approx(4 * crossing)
    assert route.bandwidth == pytest.approx(NIC / max(1, 4 * crossing))
    assert route.latency == pytest.approx(10e-6 + crossing * 4e-6)


def flows(size: int, nodes: int, stride: int, exchange: bool) -> Iterator[tuple[int, int, float]]:
    """Sender, receiver and share of what it sends, one by one."""
    for first in range(size):
        if first % (nodes * stride) < stride:
            group = [first + stride * k for k in range(nodes)]
            for k, sender in enumerate(group):
                if exchange:
                    yield from ((sender, other, 1 / (nodes - 1)) for other in group if other != sender)
                else:
                    yield sender, group[(k + 1) % nodes], 1.0


@given(st.data())
def test_crossings_are_those_of_all_flows(data: st.DataObject) -> None:
    """Against every flow, below leaves of any size in any order."""
    leaves = data.draw(st.lists(st.integers(0, 3), min_size=12, max_size=12))
    nodes, stride = data.draw(st.sampled_from([(2, 1), (2, 6), (3, 2), (4, 3), (6, 2), (12, 1)]))
    exchange = data.draw(st.booleans())
    leaving = dict.fromkeys(leaves, 0.0)
    for sender, receiver, share in flows(12, nodes, stride, exchange):
        leaving[leaves[sender]] += share * (leaves[sender] != leaves[receiver])
    below = Counter(leaves)
    named = cluster(12).with_(leaves=leaves)
    crossing = Fabric(named).route(nodes, stride, exchange=exchange).crossing
    assert crossing == pytest.approx(max(leaving[leaf] / below[leaf] for leaf in below))


def test_a_network_without_a_spine_is_as_before() -> None:
    plain = ClusterSpec.named("a800-80g:32x4", links={"nic": {"bandwidth": NIC, "latency": "10us"}})
    leaves = cluster(oversubscription=None)
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        one, other = (
            NominalRates(which).hop(kind, Scope.ACROSS, 8, 1 << 20, encoded=False, stride=4)
            for which in (plain, leaves)
        )
        assert one == other == 10e-6 * 7 + 8 * (1 << 20) / (NIC * (Efficiency().nic / 4))
    wide = cluster(oversubscription=0.5)
    assert NominalRates(wide).spine_load(Kind.ALL_GATHER, Scope.ACROSS, 4, 8) == 0.5


def test_a_leaf_switch_limits_every_node() -> None:
    leaf = {"nic": {"bandwidth": NIC}, "leaf": {"bandwidth": NIC / 2, "latency": "5us"}}
    route = Fabric(ClusterSpec.named("a800-80g:4x8", links=leaf)).route(4)
    assert (route.bandwidth, route.latency, route.load) == pytest.approx((NIC / 2, 15e-6, 0.0))


def test_an_order_of_nodes_moves_their_leaves() -> None:
    four = cluster(4, leaf=2)
    assert four.in_order((0, 2, 1, 3)).leaf_of_nodes == (0, 1, 0, 1)
    assert four.in_order((1, 0)).leaf_of_nodes == (0, 0, 1, 1)
    assert ClusterSpec.named("a800-80g:4x8").in_order((3, 2, 1, 0)).leaves is None
    with pytest.raises(SpecError, match="order = \\[0, 2\\] should name each of its nodes once"):
        four.in_order((0, 2))
    with pytest.raises(SpecError, match="leaves names 2 leaf switches, but there are 4 nodes"):
        four.with_(leaves=[0, 1])
    assert four.with_(leaves=[0, 0, 1, 1]).leaf_of_nodes == four.leaf_of_nodes


def test_an_order_of_nodes_moves_their_groups() -> None:
    zones = [{"nodes": 2, "zone": "east"}, {"nodes": 2, "zone": "west"}]
    four = ClusterSpec.named("a800-80g:4x4", groups=zones, links={"zone": {"bandwidth": NIC / 4}})
    for order, zones in (((2, 3, 0, 1), "we"), ((0, 2, 1, 3), "ewew"), ((0, 1, 3, 2), "ew")):
        moved = four.in_order(order)
        assert "".join(group.zone[0] for group in moved.groups) == zones
        assert moved.nodes == sum(group.nodes for group in moved.groups) == 4


def test_transfers_share_the_spine_and_the_cards() -> None:
    """One that the spine limits leaves three quarters of the cards to others."""
    clock, ends = FluidClock(), []
    limited, free = clock.load(Resource.ACROSS, spine_load=4.0), clock.load(Resource.ACROSS)
    clock.start(limited, 4.0, "limited")
    clock.start(free, 3.0, "free")
    while clock.active:
        finished = clock.advance()
        ends += [clock.now] * len(finished)
    assert ends == pytest.approx([3.75, 4.75])
    assert (clock.busy[Resource.ACROSS], clock.busy[Resource.SPINE]) == pytest.approx((4.0, 4.0))
    clock = FluidClock()
    for _ in range(2):
        clock.start(clock.load(Resource.ACROSS, spine_load=2.0), 4.0, None)
    while clock.active:
        clock.advance()
    assert clock.now == pytest.approx(8.0)


def workload(plan: Plan) -> Workload:
    return Workload(parts(MODEL, plan.granularity), units(MODEL, plan), MODEL.seq)


@pytest.mark.parametrize("name", ["zero1", "zero3", "mics", "zeropp"])
def test_closed_form_sums_are_what_the_simulator_adds_up(name: str) -> None:
    chosen = Plan.preset(name, nodes=32, local=4, bucket_bytes=8 << 20)
    rates = NominalRates(cluster())
    step = simulate(chosen, workload(chosen), rates, micro_batches=2)
    infos = units(MODEL, chosen)
    total = closed_form(Pricer(rates, "bfloat16"), chosen, infos)
    assert total.spine == pytest.approx(step.busy[Resource.SPINE], rel=0.05, abs=1e-3)
    assert total.across == pytest.approx(step.busy[Resource.ACROSS], rel=0.05, abs=1e-3)
    assert step.seconds >= max(0.95 * max(total.inside, total.across, total.spine), *step.busy.values())


def test_engines_cross_the_spine_too() -> None:
    flat, thin = LibraryCollectives(cluster(oversubscription=None)), LibraryCollectives(cluster())
    near, far = Factor(local=4, nodes=4), Factor(local=1, nodes=4)
    assert thin.seconds(Kind.ALL_GATHER, 1 << 30, near) == flat.seconds(Kind.ALL_GATHER, 1 << 30, near)
    assert thin.seconds(Kind.ALL_REDUCE, 1 << 30, far, 8) > 3.5 * flat.seconds(Kind.ALL_REDUCE, 1 << 30, far, 8)


def case(**changes: Any) -> Case:
    fields = {
        "model": "llama-7b", "gpu": "a800-80g", "gpus": 256, "seq": 2048, "internode_gbps": 200.0, "nodes_per_leaf": 8,
        "spine_gbps": 50.0,
    }  # fmt: skip
    return Case.parse({**fields, "plan": "zero1", **changes}, "case")


@pytest.mark.parametrize("engine", ["thinwire", "amsp", "megatron"])
def test_a_case_knows_leaves_and_spine(engine: str) -> None:
    thin, wide = (answer(case(engine=engine, plan="mics", spine_gbps=gbps)).simulated for gbps in (10.0, 200.0))
    assert thin.seconds > wide.seconds
    assert thin.busy[Resource.SPINE] > 10 * wide.busy[Resource.SPINE] > 0
    with pytest.raises(SpecError, match="leaves is missing"):
        answer(case(nodes_per_leaf=None))


def test_stages_of_a_pipeline_send_across_the_spine() -> None:
    thin, wide = (answer(case(pp=4, spine_gbps=gbps, wire="none")).simulated.seconds for gbps in (1.0, 200.0))
    assert thin > wide


def test_a_plans_placement_is_priced() -> None:
    """A node's group of eight hosts below one leaf, and scattered over four."""
    group = {"params": {}, "grads": {}, "optimizer": {"local": 8, "nodes": 8}}
    nodes = [node for leaf in range(8) for node in range(leaf, 32, 8)]
    scattered = [8 * node + local for node in nodes for local in range(8)]
    together, apart = (answer(case(plan={**group, **more})) for more in ({}, {"placement": scattered}))
    assert apart.simulated.seconds > 1.5 * together.simulated.seconds
    split = [*range(1, 256), 0]
    with pytest.raises(SpecError, match="placement fills node 0 of the mesh from nodes \\[0, 1\\]: keep nodes whole"):
        answer(case(plan={**group, "placement": split}))
    assert json.dumps(apart.to_dict())


def test_a_hundred_thousand_accelerators_below_leaves() -> None:
    many = answer(case(gpus=100_000, nodes_per_leaf=20, spine_gbps=25.0, plan="zero3"))
    assert many.simulated.busy[Resource.SPINE] > many.simulated.busy[Resource.ACROSS]
