"""Placement: the order of hosts with the shortest simulated step, and files for launchers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.cost import NominalRates
from thinwire.errors import SpecError
from thinwire.plan import TrainingJob, candidate
from thinwire.plan.placement import hostfile, place, placed, rankfile, slurm_hostfile
from thinwire.plan.search import elsewhere
from thinwire.spec import ClusterSpec, Factor, Link, ModelSpec, Plan
from thinwire.spec.machines.topology import SwitchTree

MODEL = ModelSpec(name="small", layers=2, hidden=512, heads=8, vocab=4096, seq=512)


def plan(nodes: int, *, optimizer: int, params: int = 1) -> Plan:
    def factor(count: int) -> Factor:
        return Factor(local=2 if count > 1 else 1, nodes=count)

    return Plan(
        mesh=Factor(local=2, nodes=nodes), params=factor(params), grads=factor(params), optimizer=factor(optimizer)
    )


def job(nodes: int, *, spine: bool = True) -> TrainingJob:
    links = {"nic": {"bandwidth": "20gbit"}, **({"spine": {"bandwidth": "5gbit"}} if spine else {})}
    cluster = ClusterSpec.named(f"a800-80g:{nodes}x2", links=links, leaves=nodes)
    return TrainingJob(MODEL, cluster, nodes * 2 * MODEL.seq, MODEL.seq, rates=NominalRates(cluster))


@pytest.mark.parametrize("spine", [True, False])
def test_interleaved_hosts_are_put_together(spine: bool) -> None:
    hosts = {"a": "left", "b": "right", "c": "left", "d": "right"}
    asked, chosen = job(4, spine=spine), plan(4, optimizer=2)
    found, given = place(asked, chosen, hosts), placed(asked, chosen, list(hosts), hosts)
    assert found.order == ("a", "c", "b", "d")
    assert found.crossing < given.crossing
    assert (found.seconds < given.seconds) is spine


def test_an_order_is_priced_as_plans_are() -> None:
    """Placement minimises the simulated step on a cluster with those leaves."""
    hosts = {"a": "left", "b": "right", "c": "left", "d": "right"}
    asked, chosen = job(4), plan(4, optimizer=2)
    for order, leaves in (("abcd", [0, 1, 0, 1]), ("acbd", [0, 0, 1, 1])):
        there = elsewhere(asked, asked.cluster.with_(leaves=leaves))
        assert placed(asked, chosen, list(order), hosts).seconds == candidate(there, chosen).seconds


def test_unlike_nodes_move_with_their_hosts() -> None:
    """An order that suits the leaves is no better if it puts nodes of two zones into one group of ranks."""
    hosts = {"a": "left", "b": "right", "c": "left", "d": "right"}
    plain, chosen = job(4), plan(4, params=2, optimizer=2)
    zones = [{"nodes": 2, "zone": "east"}, {"nodes": 2, "zone": "west"}]
    slow = plain.cluster.links.with_(zone=Link(bandwidth=1e8))
    asked = elsewhere(plain, plain.cluster.with_(links=slow, groups=zones))
    assert place(asked, chosen, hosts).order == ("a", "b", "c", "d")
    moved = placed(asked, chosen, list("acbd"), hosts).seconds
    mixed = asked.cluster.with_(leaves=[0, 0, 1, 1], groups=[{"nodes": 1, "zone": zone} for zone in "abab"])
    assert moved == pytest.approx(candidate(elsewhere(asked, mixed), chosen).seconds)


def test_without_groups_across_nodes_leaves_stay_together() -> None:
    hosts = {"a": "left", "b": "right", "c": "left", "d": "right"}
    assert place(job(4), plan(4, optimizer=1), hosts).order == ("a", "c", "b", "d")


def test_as_many_groups_as_possible_have_a_leaf_of_their_own() -> None:
    hosts = dict(zip("abcdef", "xyxyxy", strict=True))
    order = place(job(6), plan(6, optimizer=2), hosts).order
    groups = [order[start : start + 2] for start in (0, 2, 4)]
    assert sum(hosts[one] != hosts[other] for one, other in groups) == 1, "three hosts of a leaf make one pair"


SIX = list(itertools.permutations(range(6)))


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_few_orders_are_better(data: st.DataObject) -> None:
    """Against forty orders of six hosts."""
    leaves = data.draw(st.lists(st.sampled_from("xyz"), min_size=6, max_size=6))
    hosts = {f"h{i}": leaf for i, leaf in enumerate(leaves)}
    asked, chosen = job(6), plan(6, optimizer=data.draw(st.sampled_from([2, 3])))
    placement = place(asked, chosen, hosts)
    assert sorted(placement.order) == sorted(hosts)
    others = data.draw(st.lists(st.sampled_from(SIX), min_size=40, max_size=40))
    best = min(placed(asked, chosen, [f"h{i}" for i in other], hosts).seconds for other in others)
    assert placement.seconds <= best * 1.0001


def test_inner_groups_are_kept_together_inside_blocks_that_cross() -> None:
    hosts = dict(zip("abcd", ("x", "y", "x", "y"), strict=True))
    assert place(job(4), plan(4, params=2, optimizer=4), hosts).order == ("a", "c", "b", "d")


def test_files_for_launchers(tmp_path: Path) -> None:
    order = ["n2", "n1"]
    assert hostfile(order) == "n2\nn1\n"
    assert slurm_hostfile(order, 2) == "n2\nn2\nn1\nn1\n"
    assert rankfile(order, 2).splitlines()[2] == "rank 2=n1 slot=0"
    listing = tmp_path / "hosts"
    listing.write_text("# scheduler's order\nn1 left\n\nn2 right  # far\n")
    assert SwitchTree.read(listing).leaf_of == {"n1": "left", "n2": "right"}


def test_bad_listings_are_refused(tmp_path: Path) -> None:
    listing = tmp_path / "hosts"
    listing.write_text("n1\nn2 left\nn2 left\n")
    with pytest.raises(SpecError, match=r"line 1: 'n1' should be(?s:.*)line 3: host 'n2' stands there twice"):
        SwitchTree.read(listing)
    with pytest.raises(SpecError, match="there are 1 hosts, and the cluster has 4 nodes"):
        place(job(4), plan(4, optimizer=2), {"a": "x"})
