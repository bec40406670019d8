"""Unlike nodes of one cluster, the market that rents them, and how often they fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from thinwire.spec.base import LARGEST, Bandwidth, Bytes, Count, Positive, Problem, Seconds, Spec, rule
from thinwire.spec.machines.accelerators import ACCELERATORS

INSIDE_LATENCY: Final = 3e-6
"""Latency in seconds between two accelerators of a node: typical of NVLink under NCCL."""

NIC_LATENCY: Final = 10e-6
"""Latency in seconds between two nodes: typical of RDMA under NCCL."""

MEMORY_BANDWIDTH: Final = 8e12
"""Bits per second of an accelerator's memory where none is given."""

HOST_BANDWIDTH: Final = 19 * 8e9
"""Bits per second between an accelerator and its host's memory where none is given: an eighth of the memory of two
sockets with eight channels of DDR4, in each direction."""

HOST_LATENCY: Final = 10e-6
"""Latency in seconds of a copy between an accelerator and its host's memory."""

PeakFlops = Annotated[
    dict[str, Annotated[float, Field(strict=True, ge=1, le=LARGEST, allow_inf_nan=False)]], Field(min_length=1)
]
"""FLOP/s by dtype, at least 1, so that all seconds are finite."""

Rate = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
"""Events per hour."""

LongSeconds = Annotated[Seconds, Field(gt=0)]
"""A duration above 0."""


class Link(Spec):
    """One class of link, in one direction. A transfer of n bytes takes ``latency + 8 n / bandwidth``."""

    toml_inline: ClassVar[bool] = True

    bandwidth: Bandwidth = Field(description='bits per second, or text such as "200gbit" or "25GB/s"')
    latency: Seconds = Field(default=0.0, description='seconds, or text such as "5us"')


class Spot(Spec):
    """Nodes that cost less and may be taken away."""

    toml_inline: ClassVar[bool] = True

    discount: Annotated[float, Field(strict=True, gt=0, lt=1)] = Field(
        description="share of the price that is saved, between 0 and 1"
    )
    interruptions_per_hour: Rate = Field(description="how often one node is taken away, on average in an hour")
    replacement: Seconds = Field(
        default=0.0, description='until another node takes its place: seconds, or text such as "3min"'
    )


class Failures(Spec):
    """How often nodes fail, and what a failure costs. All nodes of a synchronous job stop with one of them."""

    mtbf: LongSeconds | None = Field(
        default=None, description='mean time between failures of one node, such as "2000h"; unset: nodes never fail'
    )
    restart: Seconds = Field(default=300.0, description="from a failure to the first new step, load included")
    checkpoint: LongSeconds = Field(default=30.0, description="for which a checkpoint holds training up")
    interval: LongSeconds | None = Field(default=None, description="checkpoint interval; unset: optimal")


class Machines(Spec):
    """What a cluster says of its nodes, and a group of the cluster of its own ones. What a group leaves out, it takes
    from its accelerator, then from the cluster."""

    name: str | None = Field(default=None, description="label")
    accelerator: str | None = Field(default=None, description="name of the accelerator, for its published figures")
    nodes: Count = Field(description="number of nodes (N)")
    gpus_per_node: Count | None = Field(default=None, description="accelerators per node (R): all nodes have as many")
    memory: Bytes | None = Field(default=None, description='memory of one accelerator, "80GiB" or bytes')
    peak_flops: PeakFlops | None = Field(
        default=None, description="peak FLOP/s of one accelerator by dtype, for example { bfloat16 = 312e12 }"
    )
    memory_bandwidth: Bandwidth | None = Field(
        default=None, description='bits per second of one accelerator\'s memory, or text such as "2TB/s"'
    )
    price_per_gpu_hour: Positive | None = Field(
        default=None, description="price of one accelerator for an hour; of a cluster of groups, the mean"
    )
    spot: Spot | None = Field(default=None, description="discount of nodes that may be taken away")
    kernels: str | None = Field(default=None, description="file with times of kernels, as `thinwire kernels` writes it")

    @rule("accelerator")
    def _the_accelerator_is_known(self) -> Iterator[Problem]:
        """``accelerator`` is one of the [names below](#accelerators)."""
        if self.accelerator is not None and self.accelerator not in ACCELERATORS:
            yield Problem("accelerator", f"= {self.accelerator!r} is unknown; valid are {', '.join(ACCELERATORS)}")


class NodeGroup(Machines):
    """Nodes of one kind. What a group leaves out, it takes from its accelerator, then from the cluster."""

    inside: Link | None = Field(default=None, description="as `links.inside` of the cluster")
    nic: Link | None = Field(default=None, description="as `links.nic` of the cluster")
    zone: str = Field(default="", description="name of the zone; `links.zone` joins zones")

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fills in what links leave out, as the accelerator's latency beside a bandwidth of one's own."""
        return links_over(machine_figures(data.get("accelerator")), data)

    @property
    def label(self) -> str:
        """What tables call the group."""
        return self.name or self.accelerator or "nodes"


def machine_figures(name: object) -> dict[str, Any]:
    """Published figures of an accelerator in its usual machine, by key of a cluster or of its links; nothing for an
    unknown name."""
    kind = ACCELERATORS.get(name) if isinstance(name, str) else None
    if kind is None:
        return {}
    return {
        "gpus_per_node": kind.gpus_per_node,
        "memory": kind.memory,
        "peak_flops": kind.peak_flops,
        "memory_bandwidth": kind.memory_bandwidth,
        "inside": Link(bandwidth=kind.inside, latency=INSIDE_LATENCY),
        "nic": Link(bandwidth=kind.nic, latency=NIC_LATENCY),
        "host": Link(bandwidth=kind.host, latency=HOST_LATENCY),
    }


def links_over(published: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, where links have as published what they do not state."""
    filled = dict(given)
    for key, link in published.items():
        if isinstance(link, Link) and isinstance(given.get(key), Mapping):
            filled[key] = {**dict(link), **given[key]}
    return filled
