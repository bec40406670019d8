"""What groups of nodes get of a network of leaf switches below a spine, all groups alike at work at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.spec.cluster import ClusterSpec

__all__ = ["Fabric", "Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """What every node of a group gets.

    Attributes:
        bandwidth: bits per second of all NICs of the node together, in one direction.
        latency: seconds of a round of messages, on average over the group's nodes.
        crossing: share of what the nodes below a leaf send that leaves it, at the leaf where most does.
        load: how many times longer the spine is busy than the NICs; above 1 it is the spine that limits.
    """

    bandwidth: float
    latency: float
    crossing: float
    load: float


class Fabric:
    """A cluster's network between nodes.

    A group of ``nodes`` nodes with stride ``s`` holds every ``s``-th node of a block of ``nodes * s`` neighbours; the
    blocks follow each other through the cluster. Rings join each member to the next, so that of the members below one
    leaf only the last sends across the spine; in an exchange each sends a piece to every other.

    Args:
        cluster: links, and the leaf above every node.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        links, self._leaves = cluster.links, cluster.leaf_of_nodes
        self._below = Counter(self._leaves)
        self._cards = min(links.nic.bandwidth, links.leaf.bandwidth if links.leaf else links.nic.bandwidth)
        self._latency = links.nic.latency + (links.leaf.latency if links.leaf else 0.0)
        self._spine = links.spine
        self._routes: dict[tuple[int, int, bool], Route] = {}

    def route(self, nodes: int, stride: int = 1, *, exchange: bool = False) -> Route:
        """What a group gets while all groups like it do the same.

        Args:
            nodes: of the group.
            stride: nodes from one member to the next.
            exchange: whether each member sends to every other one; else to the next of a ring.
        """
        key = nodes, stride, exchange
        found = self._routes.get(key)
        if found is None:
            found = self._routes[key] = self._route(*key)
        return found

    def _route(self, nodes: int, stride: int, exchange: bool) -> Route:
        crossing = self._crossing(nodes, stride, exchange) if len(self._below) > 1 else 0.0
        if self._spine is None:
            return Route(self._cards, self._latency, crossing, 0.0)
        load = crossing * self._cards / self._spine.bandwidth
        latency = self._latency + crossing * self._spine.latency
        return Route(self._cards / max(1.0, load), latency, crossing, load)

    def _crossing(self, nodes: int, stride: int, exchange: bool) -> float:
        size, leaving = nodes * stride, dict.fromkeys(self._below, 0.0)
        for start in range(0, len(self._leaves), size):
            block = self._leaves[start : start + size]
            if block[0] == block[-1] and len(set(block)) == 1:
                continue
            if exchange:
                for column in range(min(stride, len(block))):
                    _exchanged(block[column::stride], leaving)
            else:
                for leaf, next_leaf in zip(block, block[stride:] + block[:stride], strict=True):
                    if leaf != next_leaf:
                        leaving[leaf] += 1
        return max(leaving[leaf] / count for leaf, count in self._below.items())


def _exchanged(members: Sequence[int], leaving: dict[int, float]) -> None:
    """Add what leaves each leaf while the members of a group send a piece to every other one."""
    for leaf, here in Counter(members).items():
        if here < len(members):
            leaving[leaf] += here * (len(members) - here) / (len(members) - 1)
