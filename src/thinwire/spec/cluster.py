"""The machine: nodes, accelerators, memory, peaks and links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from thinwire.spec.base import Bandwidth, Bytes, Count, Positive, Problem, Seconds, Spec, rule


class Link(Spec):
    """One class of link, in one direction: transfer time of n bytes is ``latency + 8 n / bandwidth``."""

    toml_inline: ClassVar[bool] = True

    bandwidth: Bandwidth = Field(description='bits per second, or text such as "200gbit" or "25GB/s"')
    latency: Seconds = Field(default=0.0, description='seconds, or text such as "5us"')


class Links(Spec):
    """Links by class. Leaf and spine are unset where the network does not slow a node's NICs down."""

    inside: Link = Field(description="between two accelerators of a node, per accelerator")
    nic: Link = Field(description="from a node to the network, all NICs of the node together")
    leaf: Link | None = Field(default=None, description="through a leaf switch, per node")
    spine: Link | None = Field(default=None, description="from one leaf switch to another, per node")


class ClusterSpec(Spec):
    """A cluster of equal nodes."""

    name: str | None = Field(default=None, description="label")
    nodes: Count = Field(description="nodes (N)")
    gpus_per_node: Count = Field(description="accelerators of a node (R)")
    memory: Bytes = Field(description='memory of one accelerator, "80GiB" or bytes')
    peak_flops: Annotated[dict[str, Positive], Field(min_length=1)] = Field(
        description="peak FLOP/s of one accelerator by dtype, for example { bfloat16 = 312e12 }"
    )
    links: Links = Field(description="bandwidth and latency by class of link")
    nodes_per_leaf: Count | None = Field(default=None, description="nodes below one leaf switch")
    price_per_gpu_hour: Positive | None = Field(default=None, description="price of one accelerator for an hour")

    @property
    def gpus(self) -> int:
        """Accelerators of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @rule("links", "nodes_per_leaf")
    def _a_spine_joins_leaves(self) -> Iterator[Problem]:
        """A spine link needs ``nodes_per_leaf``."""
        if self.links.spine is not None and self.nodes_per_leaf is None:
            yield Problem("nodes_per_leaf", "is missing: a spine link says nothing without the size of a leaf")
