"""One host of a lab: how to run a command in it, and the variables by which its ranks find the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from thinwire.lab import network
from thinwire.lab.spec import LabSpec

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
