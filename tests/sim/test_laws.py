"""Laws that relate two predictions, for any machine: what must not matter does not."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.cost import LibraryCollectives
from thinwire.program import Kind
from thinwire.spec import ClusterSpec, Fabric, Factor

BANDWIDTHS = st.floats(1e8, 1e13)
SEVERAL = st.integers(2, 4)


def cluster(links: dict[str, float], **fields: Any) -> ClusterSpec:
    """Four nodes of an accelerator."""
    bandwidths = {"inside": 1e12, "nic": 1e11, **links}
    tables = {name: {"bandwidth": bandwidth, "latency": 1e-6} for name, bandwidth in bandwidths.items()}
    return ClusterSpec.named("a800-80g:4x2", links=tables, **fields)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)), BANDWIDTHS, BANDWIDTHS, st.sampled_from([(2, 1), (2, 2), (4, 1)]), st.booleans())
def test_zones_are_like_leaves_below_a_spine_in_any_order(
    order: list[int], nic: float, between: float, group: tuple[int, int], exchange: bool
) -> None:
    zones = [{"nodes": 2, "zone": "east"}, {"nodes": 2, "zone": "west"}]
    machines = (cluster({"nic": nic, "zone": between}, groups=zones), cluster({"nic": nic, "spine": between}, leaves=2))
    one, other = (Fabric(machine.in_order(order)).route(*group, exchange=exchange) for machine in machines)
    assert (one.bandwidth, one.latency, one.load) == (other.bandwidth, other.latency, other.load)


@settings(max_examples=20, deadline=None)
@given(BANDWIDTHS, BANDWIDTHS, BANDWIDTHS, SEVERAL, st.sampled_from(list(Kind)))
def test_links_that_a_call_does_not_use_do_not_matter(
    nic: float, one: float, other: float, count: int, kind: Kind
) -> None:
    for name, mesh in (("inside", Factor(nodes=count)), ("nic", Factor(local=2))):
        machines = (cluster({"nic": nic, "inside": nic, name: bandwidth}) for bandwidth in (one, other))
        seconds = [LibraryCollectives(machine).seconds(kind, 1e9, mesh) for machine in machines]
        assert seconds[0] == seconds[1]


@settings(max_examples=20, deadline=None)
@given(st.floats(0, 1e-2), st.floats(0, 1e-2))
def test_a_group_has_the_latency_of_its_own_cards(near: float, far: float) -> None:
    groups = [{"nodes": 2, "nic": {"bandwidth": 1e11, "latency": latency}} for latency in (near, far)]
    machine = ClusterSpec.named("a800-80g:4x2", groups=groups)
    assert [Fabric(machine, group).route(2).latency for group in (0, 1)] == [near, far]
    assert Fabric(machine).route(2).latency == Fabric(machine, 0).route(4).latency == max(near, far)
