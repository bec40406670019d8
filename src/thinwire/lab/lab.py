"""A cluster on one machine, for as long as a ``with`` block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from thinwire.errors import UsageError
from thinwire.lab import network
from thinwire.lab.namespaces import Namespaces
from thinwire.lab.shaping import max_packet, shape_lines
from thinwire.lab.spec import LabSpec, LinkShape

MASTER_PORT: Final = 29_500
"""Where rank 0 listens; free in every host, which nobody else uses."""


@dataclass(frozen=True)
class LinkTraffic:
    """What crossed a host's link since the lab was built, as the kernel counted it, Ethernet headers included.

    Attributes:
        host: name of the host.
        sent_bytes: by the host into its link.
        received_bytes: by the host from its link.
        sent_packets: by the host; up to 64 KiB each, as the kernel hands them over.
        received_packets: by the host.
    """

    host: str
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


@dataclass(frozen=True)
class Host:
    """One host of a lab.

    Attributes:
        index: from 0.
        name: that it and the others resolve.
        address: of its link.
        spec: of the lab.
    """

    index: int
    name: str
    address: str
    spec: LabSpec
    _prefix: tuple[str, ...] = field(repr=False)

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command that runs ``argv`` inside this host.

        The process that it starts *becomes* ``argv``, so signals and exit statuses are ``argv``'s own. Working
        directory and environment are the caller's.

        Args:
            argv: program and arguments.

        Returns:
            Program and arguments.
        """
        return [*self._prefix, *argv]

    def environment(self, master_port: int = MASTER_PORT) -> dict[str, str]:
        """Variables with which torchrun, gloo and NCCL find the cluster, whoever starts them in this host.

        A bare ``torchrun train.py`` takes its defaults from them. Ranks need :meth:`rank_environment`.

        Args:
            master_port: of rank 0's store.

        Returns:
            Variables to set beside the caller's own.
        """
        master = network.address(0)
        spec = self.spec
        return {
            "GLOO_SOCKET_IFNAME": network.DEVICE,
            "NCCL_SOCKET_IFNAME": network.DEVICE,
            "TP_SOCKET_IFNAME": network.DEVICE,
            "MASTER_ADDR": master,
            "MASTER_PORT": str(master_port),
            "NNODES": str(spec.nodes),
            "NODE_RANK": str(self.index),
            "PET_NNODES": str(spec.nodes),
            "PET_NODE_RANK": str(self.index),
            "PET_NPROC_PER_NODE": str(spec.ranks),
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": str(master_port),
            "PET_LOCAL_ADDR": self.address,
        }

    def rank_environment(self, local_rank: int, master_port: int = MASTER_PORT) -> dict[str, str]:
        """Variables of one rank of a job, as torchrun would set them.

        Args:
            local_rank: index of the rank on this host.
            master_port: of rank 0's store.

        Returns:
            Variables to set beside the caller's own.
        """
        spec = self.spec
        return self.environment(master_port) | {
            "RANK": str(self.index * spec.ranks + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.index),
            "WORLD_SIZE": str(spec.nodes * spec.ranks),
            "LOCAL_WORLD_SIZE": str(spec.ranks),
            "GROUP_WORLD_SIZE": str(spec.nodes),
        }


class Lab:
    """Hosts joined by links of chosen bandwidth, from ``with Lab(spec) as lab`` to the end of the block.

    Hosts see each other and nothing else: there is no way from them to the machine's own network. Whatever ends this
    process, SIGKILL included, ends the lab and what runs in it.

    Args:
        spec: what to build.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.hosts: tuple[Host, ...] = ()
        self._namespaces: Namespaces | None = None
        self._shape = LinkShape()
        self._start: Mapping[str, LinkTraffic] = {}

    def __enter__(self) -> Self:
        """Build the cluster.

        Returns:
            This lab.

        Raises:
            UsageError: the machine cannot hold it; says what is missing.
        """
        if self._namespaces is not None:
            raise UsageError("this lab is open already; make another Lab for a second one")
        names = [network.host_name(node) for node in range(self.spec.nodes)]
        self._namespaces = Namespaces(names, network.hosts_file(self.spec))
        try:
            self._build(names)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tear the cluster down."""
        self.close()

    def close(self) -> None:
        """End what runs in the hosts and tear the cluster down; safe to call twice."""
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        self.hosts = ()

    @property
    def namespaces(self) -> Namespaces:
        """Where the hosts are.

        Raises:
            UsageError: the lab is not open.
        """
        if self._namespaces is None:
            raise UsageError("this lab is not open: use it inside of `with Lab(spec) as lab:`")
        return self._namespaces

    def shape(self, bandwidth: float | None = None, latency: float | None = None, loss: float = 0.0) -> None:
        """Change every host's link, in both directions, while traffic flows. Spine links stay as they are.

        What waits in a link's queue at that moment is lost; TCP sends it again.

        Args:
            bandwidth: bits per second; None does not limit it.
            latency: seconds that a packet takes to cross a link.
            loss: share of packets lost, from 0 to below 1.

        Raises:
            SpecError: a value is out of range.
            UsageError: the kernel lacks what it takes; names it. The links are not shaped then.
        """
        previous, self._shape = self._shape, LinkShape()
        wanted = LinkShape(bandwidth, latency, loss)
        names = [network.host_name(node) for node in range(self.spec.nodes)]
        switch = [line for name in names for line in shape_lines(name, wanted, replaces=previous)]
        packet = f"link set dev {network.DEVICE} gso_max_size {max_packet(wanted)}"
        host = shape_lines(network.DEVICE, wanted, replaces=previous)
        try:
            self.namespaces.batch("tc", switch)
        except UsageError as error:
            raise UsageError(f"bandwidth = {bandwidth}, latency = {latency}, loss = {loss}: {error}") from error
        for node in range(self.spec.nodes):
            self.namespaces.batch("ip", [packet], node)
            self.namespaces.batch("tc", host, node)
        self._shape = wanted

    def link(self, node: int, *, up: bool) -> None:
        """Pull the cable of a host out of the switch, or put it back. The host's own ranks still reach each other.

        Args:
            node: index of the host.
            up: whether the link is to work.

        Raises:
            UsageError: there is no such host.
        """
        if not 0 <= node < self.spec.nodes:
            raise UsageError(f"node = {node}: valid are 0 to {self.spec.nodes - 1}")
        self.namespaces.batch("ip", [f"link set dev {network.host_name(node)} {'up' if up else 'down'}"])

    def traffic(self) -> tuple[LinkTraffic, ...]:
        """What crossed each host's link since the lab was built.

        Returns:
            One count for each host.
        """
        now = self._count()
        return tuple(_difference(now[name], self._start[name]) for name in now)

    def _build(self, names: Sequence[str]) -> None:
        spec, namespaces = self.spec, self.namespaces
        paths = [namespaces.network(node) for node in range(spec.nodes)]
        namespaces.batch("ip", network.switch_lines(spec, paths))
        for node in range(spec.nodes):
            namespaces.batch("ip", network.host_lines(node), node)
        self.hosts = tuple(
            Host(node, name, network.address(node), spec, tuple(namespaces.enter(node)))
            for node, name in enumerate(names)
        )
        self.shape(spec.bandwidth, spec.latency, spec.loss)
        if spec.leaf is not None:
            ends = [end for leaf in range(spec.num_leaves) for end in network.spine_ends(leaf)]
            spine = LinkShape(spec.spine_bandwidth)
            namespaces.batch("tc", [line for end in ends for line in shape_lines(end, spine)])
        self._start = self._count()

    def _count(self) -> dict[str, LinkTraffic]:
        """Counts by host, read at the switch's end of each cable: what goes in there has left the host."""
        links: list[dict[str, Any]] = self.namespaces.show(None, "-statistics", "link", "show")
        counts = {link["ifname"]: link["stats64"] for link in links}
        return {name: _traffic(name, counts[name]) for name in map(network.host_name, range(self.spec.nodes))}


def utilization(num_bytes: int, seconds: float, bandwidth: float | None) -> float:
    """How much of a link a transfer has used.

    Args:
        num_bytes: that crossed it in one direction.
        seconds: that it took.
        bandwidth: of the link in bits per second.

    Returns:
        Share of the bandwidth; not a number for a link without limit.
    """
    return 8 * num_bytes / seconds / bandwidth if bandwidth and seconds > 0 else math.nan


def _traffic(name: str, counted: Mapping[str, Mapping[str, int]]) -> LinkTraffic:
    received, sent = counted["rx"], counted["tx"]
    return LinkTraffic(name, received["bytes"], sent["bytes"], received["packets"], sent["packets"])


def _difference(now: LinkTraffic, start: LinkTraffic) -> LinkTraffic:
    return LinkTraffic(
        now.host,
        now.sent_bytes - start.sent_bytes,
        now.received_bytes - start.received_bytes,
        now.sent_packets - start.sent_packets,
        now.received_packets - start.received_packets,
    )
