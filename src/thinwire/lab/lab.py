"""A cluster on one machine that lives as long as a ``with`` block."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Final, Self

from thinwire.errors import UsageError
from thinwire.lab import network
from thinwire.lab.namespaces import Namespaces, Step
from thinwire.lab.spec import LabSpec, LinkShape

MASTER_PORT: Final = 29_500
"""Port on which rank 0 listens; always free, because nothing else runs in a host."""


@dataclass(frozen=True)
class Host:
    """One host of a lab, with a name that every host can resolve; ``on_cores`` hosts run on its cores, this one among
    them."""

    index: int
    name: str
    address: str
    spec: LabSpec
    on_cores: int
    _prefix: tuple[str, ...] = field(repr=False)

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command that runs ``argv`` inside this host.

        The process that it starts *becomes* ``argv``, so signals and exit statuses are ``argv``'s own. Working
        directory and environment are the caller's.
        """
        return [*self._prefix, *argv]

    def environment(self, master_port: int = MASTER_PORT) -> dict[str, str]:
        """Variables with which torchrun, gloo and NCCL find the cluster, whoever starts them in this host.

        A bare ``torchrun train.py`` takes its defaults from them. Ranks need :meth:`rank_environment`.
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
            # All hosts share this machine's memory: what a rank may use is less than its share of a host.
            "THINWIRE_LAB_HOSTS": str(spec.nodes),
            "THINWIRE_LAB_HOSTS_ON_CORES": str(self.on_cores),
        }

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Variables of one rank of a job, as torchrun would set them."""
        spec = self.spec
        return self.environment() | {
            "RANK": str(self.index * spec.ranks + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.index),
            "WORLD_SIZE": str(spec.nodes * spec.ranks),
            "LOCAL_WORLD_SIZE": str(spec.ranks),
            "GROUP_WORLD_SIZE": str(spec.nodes),
        }


def share_cores(cores: Sequence[int], nodes: int) -> list[Sequence[int]]:
    """Cores of each host: as many of its own for every host, as on different machines; all of them if there are fewer
    than hosts."""
    each = len(cores) // nodes
    return [cores[node * each : (node + 1) * each] or cores for node in range(nodes)]


@dataclass(frozen=True)
class LinkTraffic:
    """The traffic of a host's link since the lab was built, as counted by the kernel.

    Packets that the kernel hands over as one have their headers counted once: up to 0.7 % less than on a real cable,
    and than what the shaping counts.
    """

    host: str
    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int

    @classmethod
    def counted(cls, host: str, counts: Mapping[str, Mapping[str, int]]) -> Self:
        """The traffic of a host, from ``stats64`` of ``ip -json`` at the switch's end of its cable."""
        sent, received = counts["rx"], counts["tx"]
        return cls(host, sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    def since(self, start: LinkTraffic) -> LinkTraffic:
        """The traffic between two counts."""
        counts = (after - before for before, after in zip(astuple(start)[1:], astuple(self)[1:], strict=True))
        return LinkTraffic(self.host, *counts)


class Lab:
    """Hosts joined by links of chosen bandwidth, from ``with Lab(spec) as lab`` to the end of the block.

    Hosts see each other and nothing else: there is no way from them to the machine's own network. Whatever ends this
    process, SIGKILL included, ends the lab and what runs in it.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.hosts: tuple[Host, ...] = ()
        self._namespaces: Namespaces | None = None
        self._shapes: dict[int, LinkShape] = {}
        self._start: Mapping[str, LinkTraffic] = {}

    def __enter__(self) -> Self:
        """Build the cluster.

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs in the hosts and tear the cluster down; safe to call twice."""
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        self.hosts = ()

    @property
    def namespaces(self) -> Namespaces:
        """The namespaces of the hosts.

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
            bandwidth: Bandwidth in bits per second; None sets no limit.
            latency: Seconds that a packet takes from host to host.
            loss: Share of packets that get lost from host to host, from 0 to below 1.

        Raises:
            SpecError: a value is out of range.
            UsageError: the kernel lacks what it takes; names it. The links are not shaped then.
        """
        wanted = LinkShape(bandwidth, latency, loss)
        if self.spec.host_bandwidths is not None and bandwidth != self.spec.bandwidth:
            raise UsageError(f"bandwidth = {bandwidth}: the hosts of this lab have links of their own bandwidths")
        for node in range(self.spec.nodes):
            own = bandwidth if self.spec.host_bandwidths is None else self.spec.bandwidth_of(node)
            self._reshape(replace(wanted, bandwidth=own), node)

    def shape_link(self, node: int, bandwidth: float | None) -> None:
        """Change the bandwidth of one host's link, in both directions, while traffic flows; ``None`` sets no limit.

        Raises:
            SpecError: the bandwidth is out of range.
            UsageError: there is no such host, or the kernel lacks what it takes.
        """
        self._check_node(node)
        shape = self._shapes[node]
        self._reshape(LinkShape(bandwidth, shape.latency, shape.loss), node)

    def _reshape(self, wanted: LinkShape, node: int) -> None:
        try:
            self._apply(wanted, self._shapes.pop(node, LinkShape()), node)
            self._shapes[node] = wanted
        except UsageError as error:
            self._shapes.clear()
            self._unshape()
            values = f"bandwidth = {wanted.bandwidth}, latency = {wanted.latency}, loss = {wanted.loss}"
            raise UsageError(f"{values}: {error}") from error

    def _check_node(self, node: int) -> None:
        if not 0 <= node < self.spec.nodes:
            raise UsageError(f"node = {node}: valid are 0 to {self.spec.nodes - 1}")

    def link(self, node: int, *, up: bool) -> None:
        """Pull the cable of a host out of the switch, or put it back. The host's own ranks still reach each other.

        Raises:
            UsageError: there is no such host.
        """
        self._check_node(node)
        line = f"link set dev {network.host_name(node)} {'up' if up else 'down'}"
        self.namespaces.perform([Step("ip", [line])])

    def traffic(self) -> tuple[LinkTraffic, ...]:
        """The traffic of each host's link since the lab was built."""
        now = self._count()
        return tuple(now[name].since(self._start[name]) for name in now)

    def _build(self, names: Sequence[str]) -> None:
        spec, namespaces = self.spec, self.namespaces
        paths = [namespaces.network(node) for node in range(spec.nodes)]
        steps = [Step("ip", network.switch_lines(spec, paths))]
        steps += [Step("ip", network.host_lines(node), node) for node in range(spec.nodes)]
        if spec.leaf is not None:
            ends = [end for leaf in range(spec.num_leaves) for end in network.spine_ends(leaf)]
            spine = LinkShape(spec.spine_bandwidth)
            steps.append(Step("tc", [line for end in ends for line in network.shape_lines(end, spine)]))
        namespaces.perform(steps)
        cores = share_cores(sorted(os.sched_getaffinity(0)), spec.nodes)
        self.hosts = tuple(
            Host(
                node,
                name,
                network.address(node),
                spec,
                cores.count(cores[node]),
                tuple(namespaces.enter(node, cores[node])),
            )
            for node, name in enumerate(names)
        )
        self.shape(spec.bandwidth, spec.latency, spec.loss)
        self._start = self._count()

    def _apply(self, wanted: LinkShape, previous: LinkShape, node: int) -> None:
        """Shape what leaves a host and, at the switch's end of its cable, what comes to it.

        A packet from host to host leaves through two shaped ends; only the first delays, and the switch's end of the
        first cable loses.
        """
        packet = f"link set dev {network.DEVICE} gso_max_size {network.max_packet(wanted)}"
        host = network.shape_lines(network.DEVICE, wanted, replaces=previous)
        rate, previous_rate = LinkShape(wanted.bandwidth), LinkShape(previous.bandwidth)
        switch = network.host_name(node)
        steps = [Step("ip", [packet], node), Step("tc", host, node)]
        steps.append(Step("tc", network.shape_lines(switch, rate, replaces=previous_rate)))
        steps.append(Step("tc", network.loss_lines(switch, wanted.loss, replaces=previous.loss)))
        self.namespaces.perform(steps)

    def _unshape(self) -> None:
        """Take off whatever a shape that failed has left."""
        nodes = range(self.spec.nodes)
        steps = [Step("tc", [f"qdisc del dev {network.DEVICE} root"], node) for node in nodes]
        for node in nodes:
            steps += [Step("tc", [f"qdisc del dev {network.host_name(node)} {what}"]) for what in ("root", "clsact")]
        for step in steps:
            with contextlib.suppress(UsageError):  # nothing was left there
                self.namespaces.perform([step])

    def _count(self) -> dict[str, LinkTraffic]:
        """Counts by host, read at the switch's end of each cable: what goes in there has left the host."""
        links: list[dict[str, Any]] = self.namespaces.show(None, "-statistics", "link", "show")
        counts = {link["ifname"]: link["stats64"] for link in links}
        return {
            name: LinkTraffic.counted(name, counts[name]) for name in map(network.host_name, range(self.spec.nodes))
        }
