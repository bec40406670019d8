"""The machine: nodes, accelerators, memory, peaks and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Bandwidth, Bytes, Count, Depth, Problem, Spec, rule
from thinwire.spec.machines.accelerators import ACCELERATORS
from thinwire.spec.machines.nodes import (
    HOST_BANDWIDTH,
    HOST_LATENCY,
    MEMORY_BANDWIDTH,
    Failures,
    Link,
    Machines,
    NodeGroup,
    PeakFlops,
    machine_figures,
)
from thinwire.spec.machines.shorthand import expanded, in_proportion


class Links(Spec):
    """Links by class. Leave ``leaf`` and ``spine`` unset if the network does not slow down a node's NICs.

    A figure per node is the switch's bandwidth divided by the number of nodes below it. If the links from a leaf to the
    spine carry a quarter of what its nodes' NICs do, ``spine`` is a quarter of ``nic``.
    """

    inside: Link = Field(description="between two accelerators of a node, per accelerator")
    host: Link = Field(
        default=Link(bandwidth=HOST_BANDWIDTH, latency=HOST_LATENCY),
        description="between an accelerator and its host's memory, in each direction",
    )
    nic: Link = Field(description="from a node to the network, all NICs of the node together")
    leaf: Link | None = Field(default=None, description="through a leaf switch, per node")
    spine: Link | None = Field(default=None, description="from one leaf switch to another, per node")
    zone: Link | None = Field(default=None, description="from one zone to another, per node")


class ClusterSpec(Machines):
    """A cluster of equal nodes, or of several groups of nodes.

    ``accelerator`` fills in published figures, also the latency of a link whose bandwidth alone is stated. With
    ``[[groups]]``, figures of the cluster are defaults of its groups; ``nodes`` is their sum.
    """

    former_keys: ClassVar[Mapping[str, str]] = {"nodes_per_leaf": "leaves"}

    gpus_per_node: Count = Field(description="accelerators per node (R)")
    memory: Bytes = Field(description='memory of one accelerator, "80GiB" or bytes')
    peak_flops: PeakFlops = Field(
        description="peak FLOP/s of one accelerator by dtype, for example { bfloat16 = 312e12 }"
    )
    memory_bandwidth: Bandwidth = Field(
        default=MEMORY_BANDWIDTH, description='bits per second of one accelerator\'s memory, or text such as "2TB/s"'
    )
    links: Links = Field(description="bandwidth and latency by class of link")
    leaves: Count | tuple[Depth, ...] | None = Field(
        default=None, description="nodes below one leaf switch, in order, or the number of the leaf above each node"
    )
    failures: Failures | None = Field(default=None, description="how often nodes fail, and what that costs")
    groups: tuple[NodeGroup, ...] = Field(default=(), description="groups of unlike nodes, in the order of the nodes")

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fills in figures of accelerators, and those of the slowest group."""
        return expanded(data)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a TOML file; paths in it are relative to it."""
        cluster = super().load(path)

        def found(file: str | None) -> str | None:
            return None if file is None else str(Path(path).parent / file)

        groups = tuple(group.with_(kernels=found(group.kernels)) for group in cluster.groups)
        return cluster.with_(kernels=found(cluster.kernels), groups=groups)

    def _merged(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        merged = super()._merged(changes)
        if not self.groups or "groups" in changes:
            return merged
        return in_proportion({name: getattr(self, name) for name in type(self).model_fields}, changes, merged)

    @property
    def gpus(self) -> int:
        """Number of accelerators of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def compute_dtype(self) -> Literal["bfloat16", "float16"]:
        """The compute dtype of plans: float16 if there is a peak for that and none for bfloat16, as of a V100."""
        return "float16" if "float16" in self.peak_flops and "bfloat16" not in self.peak_flops else "bfloat16"

    @classmethod
    def preset(cls, name: str, *, nodes: int, gpus_per_node: int | None = None, **overrides: Any) -> Self:
        """A cluster of nodes with a published accelerator.

        Args:
            name: One of :meth:`preset_names`.
            nodes: Number of nodes.
            gpus_per_node: Accelerators per node; those of the usual machine by default.
            **overrides: Fields to change; a dictionary changes only the named keys of a nested table.

        Raises:
            SpecError: The name is unknown, or an override is invalid.
        """
        kind = ACCELERATORS.get(name)
        what = f"cluster {name!r}"
        if kind is None:
            raise SpecError(what, f"there is no accelerator {name!r}; valid are {', '.join(ACCELERATORS)}")
        count = kind.gpus_per_node if gpus_per_node is None else gpus_per_node
        figures = machine_figures(name) | {"name": f"{name}:{nodes}x{count}", "nodes": nodes, "gpus_per_node": count}
        links = {key: figures.pop(key) for key in ("inside", "nic", "host")}
        fields = {**figures, "links": links}
        return cls.parse(cls.parse(fields, what)._merged(overrides), what)

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        """The names that :meth:`preset` takes."""
        return tuple(ACCELERATORS)

    @classmethod
    def named(cls, text: str, **overrides: Any) -> Self:
        """A cluster as a command line names it: ``a800-80g:128x8`` (nodes x accelerators), or a TOML file.

        Args:
            text: Accelerator and size, or a path.
            **overrides: Fields to change, as in :meth:`preset`.

        Raises:
            SpecError: The text is neither, or an override is invalid.
        """
        name, colon, size = text.partition(":")
        if not colon and (text.endswith(".toml") or Path(text).is_file()):
            return cls.parse(cls.load(text)._merged(overrides), text)
        nodes, times, gpus = size.partition("x")
        if not (times and nodes.isdecimal() and gpus.isdecimal() and int(nodes) and int(gpus)):
            raise SpecError(
                f"cluster {text!r}",
                "it should be ACCELERATOR:NODESxGPUS, for example a800-80g:128x8, or a TOML file; accelerators "
                f"are {', '.join(ACCELERATORS)}",
            )
        return cls.preset(name, nodes=int(nodes), gpus_per_node=int(gpus), **overrides)

    @rule("groups", "gpus_per_node", "links", "peak_flops")
    def _groups_belong_together(self) -> Iterator[Problem]:
        """Groups have as many accelerators per node, because ranks form a grid; a dtype that all of them compute in;
        and ``links.zone`` if they are in several zones."""
        for number, group in enumerate(self.groups):
            if group.gpus_per_node not in (None, self.gpus_per_node):
                yield Problem(
                    f"groups.{number}.gpus_per_node",
                    f"= {group.gpus_per_node} differs from {self.gpus_per_node} of other nodes: ranks form a grid; "
                    "describe a larger node as several smaller ones",
                )
        zones = list(dict.fromkeys(group.zone for group in self.groups))
        if len(zones) > 1 and self.links.zone is None:
            names = ", ".join(map(repr, zones))
            yield Problem("links.zone", f"is missing: the groups are in the zones {names}, and nothing joins them")
        if self.groups and not self.peak_flops:
            dtypes = "; ".join(", ".join(group.peak_flops or {}) for group in self.groups)
            yield Problem("groups", f"have no dtype in common in peak_flops: {dtypes}")

    @rule("links", "leaves")
    def _a_spine_joins_leaves(self) -> Iterator[Problem]:
        """A spine link needs ``leaves``."""
        if self.links.spine is not None and self.leaves is None:
            yield Problem("leaves", "is missing: a spine link has no meaning without the size of a leaf")

    @rule("nodes", "leaves")
    def _every_node_is_below_one_leaf(self) -> Iterator[Problem]:
        """A list of ``leaves`` names one for every node."""
        if isinstance(self.leaves, tuple) and len(self.leaves) != self.nodes:
            yield Problem("leaves", f"names {len(self.leaves)} leaf switches, but there are {self.nodes} nodes")

    @property
    def leaf_of_nodes(self) -> tuple[int, ...]:
        """Number of the leaf switch above every node; a single leaf if none is set."""
        if isinstance(self.leaves, tuple):
            return self.leaves
        size = self.leaves or self.nodes
        return tuple(node // size for node in range(self.nodes))

    @cached_property
    def group_of_nodes(self) -> tuple[int, ...]:
        """Number of the group of every node; zeros without groups."""
        if not self.groups:
            return (0,) * self.nodes
        return tuple(number for number, group in enumerate(self.groups) for _ in range(group.nodes))

    def in_order(self, order: Sequence[int]) -> Self:
        """The same nodes in another order.

        Args:
            order: Number of the node at each position. An order of fewer nodes applies to the first ones, and repeats
                for all others.

        Raises:
            SpecError: ``order`` is not a permutation, or its length does not divide the number of nodes.
        """
        if self.leaves is None and not self.groups:
            return self
        size = len(order)
        if self.nodes % size or sorted(order) != list(range(size)):
            what = f"order = {list(order)}"
            raise SpecError(
                "cluster",
                f"{what} should name each of its nodes once, and its length should divide the {self.nodes} nodes",
            )
        nodes = [start + node for start in range(0, self.nodes, size) for node in order]
        leaf_of_nodes = self.leaf_of_nodes
        leaves = None if self.leaves is None else tuple(leaf_of_nodes[node] for node in nodes)
        # Neighbours that were of one group stay in one: a step is played once for each group.
        runs = groupby(self.group_of_nodes[node] for node in nodes) if self.groups else ()
        groups = tuple(self.groups[number].with_(nodes=len(list(run))) for number, run in runs)
        return self.with_(leaves=leaves, groups=groups)


def mean_peak(cluster: ClusterSpec, dtype: str) -> float:
    """Peak FLOP/s of one accelerator in a dtype, or in one that it has; of unlike nodes, the mean."""
    peaks = [(group.nodes, group.peak_flops or cluster.peak_flops) for group in cluster.groups]
    peaks = peaks or [(1, cluster.peak_flops)]
    sums = ((nodes, own.get(dtype) or own.get("float16") or max(own.values())) for nodes, own in peaks)
    return sum(nodes * peak for nodes, peak in sums) / sum(nodes for nodes, _ in peaks)


def seen_by(cluster: ClusterSpec, number: int) -> ClusterSpec:
    """A cluster of equal nodes like those of a group, by its number, without the network between nodes."""
    group = cluster.groups[number]
    keys = ("memory", "peak_flops", "memory_bandwidth", "kernels")
    figures = {key: getattr(group, key) for key in keys if getattr(group, key) is not None}
    links = {key: getattr(group, key) for key in ("inside", "nic") if getattr(group, key) is not None}
    own = {name: getattr(cluster, name) for name in ClusterSpec.model_fields}
    own |= {**figures, "name": group.label, "links": cluster.links.with_(**links), "groups": ()}
    return ClusterSpec.parse({**own, "accelerator": None, "spot": None, "failures": None}, group.label)


def first_nodes(cluster: ClusterSpec, nodes: int) -> ClusterSpec:
    """The same cluster with only its first nodes, or with more if all are equal.

    Raises:
        SpecError: Unlike nodes or named leaves are fewer.
    """
    if (cluster.groups or isinstance(cluster.leaves, tuple)) and nodes > cluster.nodes:
        raise SpecError("nodes", f"= {nodes}: the cluster describes {cluster.nodes} nodes one by one; describe as many")
    leaves = cluster.leaves[:nodes] if isinstance(cluster.leaves, tuple) else cluster.leaves
    name = cluster.name
    label = name if name is None else name.replace(f":{cluster.nodes}x", f":{nodes}x")
    if not cluster.groups:
        return cluster.with_(nodes=nodes, leaves=leaves, name=label)
    groups, left = [], nodes
    for group in cluster.groups:
        taken = min(left, group.nodes)
        left -= taken
        groups += [group.with_(nodes=taken)] if taken else []
    return cluster.with_(nodes=nodes, leaves=leaves, groups=tuple(groups), name=label)
