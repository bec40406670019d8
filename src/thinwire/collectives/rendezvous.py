"""Where the ranks of a job find each other: rank 0's store, which listens where it was told to and nowhere else.

Whoever reaches the store can read and change what ranks tell each other. torch's own listens on every interface of the
host; here an address is taken at its word.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from thinwire.errors import UsageError

__all__ = ["Rendezvous", "meets_at_launcher"]

_BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks come at once."""


def meets_at_launcher(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun hosts the store in a process of its own.

    Args:
        environment: variables of the process.
    """
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True)
class Rendezvous:
    """A rank on its way to the others.

    Attributes:
        rank: of this process.
        world: number of ranks.
        host: name or address of rank 0's host.
        port: where its store listens.
    """

    rank: int
    world: int
    host: str
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Rendezvous:
        """What the environment says.

        Args:
            environment: variables of the process.

        Raises:
            UsageError: a variable is missing, or no number.
        """
        try:
            return cls(
                int(environment["RANK"]),
                int(environment["WORLD_SIZE"]),
                environment["MASTER_ADDR"],
                int(environment["MASTER_PORT"]),
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"RANK is set, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not all have a value that can be "
                f"used ({error}); start ranks with torchrun, thinwire train or srun, or set all four"
            ) from error

    @property
    def listens_at(self) -> str:
        """The address that the store listens on: the one that was given, or the loopback's for ``localhost``. Any other
        name may mean another address to other hosts, so with a name it is empty, which is all of the host's."""
        if self.host == "localhost":
            return "127.0.0.1"
        try:
            return str(ipaddress.ip_address(self.host))
        except ValueError:
            return ""

    def store(self, timeout: datetime.timedelta) -> dist.Store:
        """Host the store, or connect to it.

        Args:
            timeout: how long ranks wait for each other, here and in what they do with the store.

        Raises:
            UsageError: the port cannot be had, or nobody answers there in time.
        """
        if self.rank == 0:
            return self._host(timeout)
        found: list[dist.Store | RuntimeError] = []

        def connect() -> None:
            try:
                found.append(dist.TCPStore(self.host, self.port, self.world, is_master=False, timeout=timeout))
            except RuntimeError as error:
                found.append(error)

        # Somebody else's program may listen there and never say a word: torch would wait for it without end.
        connecting = threading.Thread(target=connect, daemon=True)
        connecting.start()
        connecting.join(timeout.total_seconds() + 1.0)
        if found and isinstance(found[0], dist.Store):
            return found[0]
        raise UsageError(
            f"rank {self.rank} has not reached rank 0 at {self._where} within {timeout.total_seconds():.0f} s: nobody "
            "or another program answers there; see whether rank 0 runs on that host and a firewall leaves the port open"
        )

    @property
    def _where(self) -> str:
        return f"MASTER_ADDR = {self.host}, MASTER_PORT = {self.port}"

    def _host(self, timeout: datetime.timedelta) -> dist.Store:
        try:
            listener = self._listener()
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot listen on {self._where}: {os.strerror(error.errno or 0)}; choose another port, or an "
                "address of this host, for all ranks"
            ) from error
        try:
            return dist.TCPStore(
                self.host,
                self.port,
                self.world,
                is_master=True,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        except RuntimeError as error:
            raise UsageError(
                f"rank 0 has waited for the other ranks at {self._where} for {timeout.total_seconds():.0f} s: "
                f"{str(error).splitlines()[0]}; see whether all {self.world} ranks were started with this address"
            ) from error

    def _listener(self) -> socket.socket:
        if self.listens_at:
            family = socket.AF_INET6 if ":" in self.listens_at else socket.AF_INET
            return socket.create_server((self.listens_at, self.port), family=family, backlog=_BACKLOG)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
        return socket.create_server(("", self.port), backlog=_BACKLOG)
