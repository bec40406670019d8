"""Placement: groups of nodes stay below one leaf where they can, and launchers can read the order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.errors import SpecError
from thinwire.plan.placement import crossings, hostfile, place, rankfile, read_hosts, slurm_hostfile
from thinwire.spec import Factor, Plan


def plan(nodes: int, *, optimizer: int, params: int = 1) -> Plan:
    def factor(count: int) -> Factor:
        return Factor(local=2 if count > 1 else 1, nodes=count)

    return Plan(
        mesh=Factor(local=2, nodes=nodes), params=factor(params), grads=factor(params), optimizer=factor(optimizer)
    )


def test_interleaved_hosts_are_put_together() -> None:
    hosts = {"a": "left", "b": "right", "c": "left", "d": "right"}
    chosen = plan(4, optimizer=2)
    assert crossings(chosen, list(hosts), hosts) == 2
    assert place(chosen, hosts) == ["a", "c", "b", "d"]
    assert crossings(chosen, place(chosen, hosts), hosts) == 0


def test_without_groups_across_nodes_leaves_stay_together() -> None:
    hosts = {"a": "left", "b": "right", "c": "left", "d": "right"}
    assert place(plan(4, optimizer=1), hosts) == ["a", "c", "b", "d"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_order_crosses_less(data: st.DataObject) -> None:
    """Against every order of six hosts."""
    leaves = data.draw(st.lists(st.sampled_from("xyz"), min_size=6, max_size=6))
    hosts = {f"h{i}": leaf for i, leaf in enumerate(leaves)}
    size = data.draw(st.sampled_from([2, 3]))
    chosen = plan(6, optimizer=size)
    order = place(chosen, hosts)
    assert sorted(order) == sorted(hosts)
    best = min(crossings(chosen, other, hosts) for other in itertools.permutations(hosts))
    assert crossings(chosen, order, hosts) == best


def test_inner_groups_are_kept_together_inside_blocks_that_cross() -> None:
    hosts = dict(zip("abcd", ("x", "y", "x", "y"), strict=True))
    chosen = plan(4, params=2, optimizer=4)
    assert place(chosen, hosts) == ["a", "c", "b", "d"]


def test_files_for_launchers(tmp_path: Path) -> None:
    order = ["n2", "n1"]
    assert hostfile(order) == "n2\nn1\n"
    assert slurm_hostfile(order, 2) == "n2\nn2\nn1\nn1\n"
    assert rankfile(order, 2).splitlines()[2] == "rank 2=n1 slot=0"
    listing = tmp_path / "hosts"
    listing.write_text("# scheduler's order\nn1 left\n\nn2 right  # far\n")
    assert read_hosts(listing) == {"n1": "left", "n2": "right"}


def test_bad_listings_are_refused(tmp_path: Path) -> None:
    listing = tmp_path / "hosts"
    listing.write_text("n1\nn2 left\nn2 left\n")
    with pytest.raises(SpecError, match=r"line 1: 'n1' should be(?s:.*)line 3: host 'n2' stands there twice"):
        read_hosts(listing)
    with pytest.raises(SpecError, match="there are 1 hosts, and the mesh 2x4 has 4 nodes"):
        place(plan(4, optimizer=2), {"a": "x"})
