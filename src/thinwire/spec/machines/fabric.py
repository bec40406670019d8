"""Bandwidth of groups of nodes in a network of leaf switches below a spine, while all similar groups send.

Nodes may be unlike, and in zones that a slower link joins. A group goes at its slowest member and link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from thinwire.spec.machines.cluster import ClusterSpec


@dataclass(frozen=True, slots=True)
class Route:
    """Network rates for each node of a group.

    Attributes:
        bandwidth: Bits per second of all NICs of the node together, in one direction.
        latency: Seconds of a round of messages, on average over the group's nodes.
        crossing: Share of the traffic of a leaf's nodes that leaves the leaf, at the leaf where it is largest.
        load: Busy time of the spine, or of the link between zones, over that of the NICs; above 1, it is the limit.
    """

    bandwidth: float
    latency: float
    crossing: float
    load: float


class Fabric:
    """A cluster's network between nodes.

    A group of ``nodes`` nodes with stride ``s`` holds every ``s``-th node of a block of ``nodes * s`` neighbours. The
    blocks follow each other through the cluster. In a ring, each member sends to the next, so only the last member
    below each leaf sends across the spine. In an exchange, each member sends a piece to every other one.

    Args:
        cluster: Links, the leaf above every node, and groups of unlike nodes.
        group: Number of the group of nodes whose routes are asked for; ``None``: the slowest route of all nodes.
    """

    def __init__(self, cluster: ClusterSpec, group: int | None = None) -> None:
        links, self._leaves = cluster.links, cluster.leaf_of_nodes
        self._cards = min(links.nic.bandwidth, links.leaf.bandwidth if links.leaf else links.nic.bandwidth)
        self._latency, self._leaf_latency = links.nic.latency, links.leaf.latency if links.leaf else 0.0
        self._spine, self._zone = links.spine, links.zone
        self._one_leaf = len(set(self._leaves)) == 1
        self._cached = cache(self._route)
        self._unlike = _UnlikeNodes(cluster, group) if cluster.groups else None

    def route(self, nodes: int, stride: int = 1, *, exchange: bool = False) -> Route:
        """The rates of a group while all similar groups send at the same time.

        Args:
            nodes: Number of nodes in the group.
            stride: Distance in nodes from one member to the next.
            exchange: Whether each member sends to every other one; otherwise to the next one in a ring.
        """
        return self._cached(nodes, stride, exchange)

    def _route(self, nodes: int, stride: int, exchange: bool) -> Route:
        crossing = 0.0 if self._one_leaf else crossing_share(self._leaves, nodes, stride, exchange=exchange)
        cards, latency, between = self._cards, self._latency, 0.0
        if self._unlike is not None:
            cards, latency, between = self._unlike.slowest(nodes, stride, exchange=exchange)
        latency, load = latency + self._leaf_latency, 0.0
        if self._spine is not None:
            load = crossing * cards / self._spine.bandwidth
            latency += crossing * self._spine.latency
        if between and self._zone is not None:
            latency += between * self._zone.latency
            load = max(load, between * cards / self._zone.bandwidth)
        return Route(cards / max(1.0, load), latency, crossing, load)


class _UnlikeNodes:
    """The slowest cards and the traffic between zones of the groups of ranks that some nodes are in."""

    def __init__(self, cluster: ClusterSpec, group: int | None) -> None:
        group_of, groups = cluster.group_of_nodes, cluster.groups
        zones = list(dict.fromkeys(known.zone for known in groups))
        nics = [known.nic or cluster.links.nic for known in groups]
        most = cluster.links.leaf.bandwidth if cluster.links.leaf else math.inf
        self._zones = [zones.index(groups[number].zone) for number in group_of]
        self._nics = [min(most, nics[number].bandwidth) for number in group_of]
        self._latencies = [nics[number].latency for number in group_of]
        self._asked = {node for node, number in enumerate(group_of) if group in (None, number)}

    def slowest(self, nodes: int, stride: int, *, exchange: bool) -> tuple[float, float, float]:
        """Bits per second of the slowest cards of a node, the largest latency of any, and the share of the traffic that
        leaves a zone; arguments as of :meth:`Fabric.route`."""
        size, slow, late, crosses = nodes * stride, [], [], False
        for start in range(0, len(self._nics), size):
            block = range(start, min(start + size, len(self._nics)))
            for column in range(min(stride, len(block))):
                members = block[column::stride]
                if self._asked.isdisjoint(members):
                    continue
                slow.append(min(self._nics[node] for node in members))
                late.append(max(self._latencies[node] for node in members))
                crosses |= len({self._zones[node] for node in members}) > 1
        share = crossing_share(self._zones, nodes, stride, exchange=exchange) if crosses else 0.0
        return min(slow), max(late), share


def crossing_share(leaves: Sequence[int], nodes: int, stride: int, *, exchange: bool) -> float:
    """The share of the traffic of a leaf's nodes that leaves it, at the leaf where it is largest, from the number of
    the leaf above each node. All groups of this shape send at the same time; see :meth:`Fabric.route`."""
    below = Counter(leaves)
    if len(below) == 1:
        return 0.0
    size, leaving = nodes * stride, dict.fromkeys(below, 0.0)
    for start in range(0, len(leaves), size):
        block = leaves[start : start + size]
        if block[0] == block[-1] and len(set(block)) == 1:
            continue
        if exchange:
            for column in range(min(stride, len(block))):
                _exchanged(block[column::stride], leaving)
        else:
            for leaf, next_leaf in zip(block, [*block[stride:], *block[:stride]], strict=True):
                if leaf != next_leaf:
                    leaving[leaf] += 1
    return max(leaving[leaf] / count for leaf, count in below.items())


def _exchanged(members: Sequence[int], leaving: dict[int, float]) -> None:
    """Add the traffic that leaves each leaf while each member of a group sends a piece to every other one."""
    for leaf, count in Counter(members).items():
        if count < len(members):
            leaving[leaf] += count * (len(members) - count) / (len(members) - 1)
