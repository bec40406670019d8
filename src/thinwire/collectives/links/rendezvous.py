"""The rendezvous of a job's ranks: rank 0's store, which listens only at the given address.

Anybody who can reach the store can read and change what ranks tell each other. torch's own store listens on every
interface of the host; this one listens only at the address that it was given.

Under torchrun, the store is torchrun's. It survives restarts with everything that dead ranks have written to it,
including their addresses, which restarted ranks would read as if they were new. Each attempt therefore gets its own
part of the store.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from thinwire.collectives.links.patience import within_patience
from thinwire.errors import UsageError

_BACKLOG = 4096
"""Number of connections that may wait to be accepted, since all ranks connect at the same time."""


_ARRIVALS = "thinwire/arrivals"
"""Key in torchrun's store that counts the ranks of all attempts. Under this key and its number, each rank leaves a
random word."""

_ALIKE = (
    "see whether all hosts run the same command; if a host has come back to the job, start torchrun with "
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host"
)
"""Remedy where ranks look for each other in different stores: torchrun's agent remembers that of an earlier attempt
unless it becomes the first."""

_POLL = 0.02
"""Seconds between two checks for new arrivals."""


@dataclass(frozen=True)
class Rendezvous:
    """How a rank finds the others.

    Attributes:
        rank: Rank of this process.
        world: Number of ranks.
        host: Name or address of the store's host, which is rank 0's host.
        port: Port of the store.
        at_launcher: Whether torchrun hosts the store, in a process of its own, instead of rank 0.
        on_one_host: Whether all ranks are on this host.
    """

    rank: int
    world: int
    host: str
    port: int
    at_launcher: bool = False
    on_one_host: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Rendezvous:
        """Read the rendezvous from environment variables.

        Raises:
            UsageError: A variable is missing, not a number, or out of range.
        """
        try:
            rank, world, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            if not 0 <= rank < world:
                raise ValueError(f"RANK = {rank}, WORLD_SIZE = {world}: ranks are 0 to WORLD_SIZE - 1")
            if not (world > 1) <= port <= 65535:
                raise ValueError(f"MASTER_PORT = {port}: ports are 1 to 65535, or 0 for any free one if WORLD_SIZE = 1")
            return cls(
                rank,
                world,
                environment["MASTER_ADDR"],
                port,
                environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"],
            )
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"RANK is set, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do not all have a value that can be "
                f"used ({error}); start ranks with torchrun, thinwire train or srun, or set all four"
            ) from error

    @property
    def listens_at(self) -> str:
        """Address at which the store listens: the given one, or the loopback address for ``localhost``. Other names may
        resolve to another address on other hosts; for them this is empty, which means all addresses of the host."""
        if self.host == "localhost":
            return "127.0.0.1"
        try:
            return str(ipaddress.ip_address(self.host))
        except ValueError:
            return ""

    def store(self, timeout: datetime.timedelta) -> dist.Store:
        """Host the store, or connect to it; ``timeout`` is for this and for operations on the store. It has no entries
        of an earlier attempt.

        Raises:
            UsageError: The port is not available, or not all ranks connect in time.
        """
        if self.at_launcher:
            return self._part_of(self.connect_at(self.host, self.port, timeout), timeout)
        return self._host(timeout) if self.rank == 0 else self.connect_at(self.host, self.port, timeout)

    def connect_at(self, host: str, port: int, timeout: datetime.timedelta) -> dist.Store:
        """Connect to the store where this process reaches it; ``timeout`` is for this and for operations on the store.

        Raises:
            UsageError: Nobody answers in time.
        """
        # Another program may listen there and never answer, and torch would then wait without end.
        store = within_patience(
            lambda: dist.TCPStore(host, port, self.world, is_master=False, timeout=timeout),
            timeout.total_seconds() + 1.0,
        )
        if store is not None:
            return store
        server = "torchrun's store" if self.at_launcher else "rank 0"
        raise UsageError(
            f"rank {self.rank} has not reached {server} at {self.where} within {timeout.total_seconds():.0f} s: "
            f"nobody or another program answers there; see whether {server} runs there and a firewall leaves the "
            "port open"
        )

    def _part_of(self, store: dist.Store, timeout: datetime.timedelta) -> dist.Store:
        """The part of torchrun's store that belongs to this attempt.

        A key that all ranks know in advance cannot name it, because ranks of earlier attempts knew that key too.
        Instead, each rank leaves a random word, and rank 0 answers under that word. Rank 0 also answers ranks that have
        died, but nobody reads those answers.
        """
        part = self._open_part(store, timeout) if self.rank == 0 else self._find_part(store, timeout)
        return dist.PrefixStore(part, store)

    def _open_part(self, store: dist.Store, timeout: datetime.timedelta) -> str:
        part, counted = f"thinwire/{uuid.uuid4().hex}", 0
        unanswered: list[str] = []
        deadline = time.monotonic() + timeout.total_seconds()
        while (present := 1 + store.add(f"{part}/here", 0)) < self.world:
            if time.monotonic() > deadline:
                raise UsageError(
                    f"rank 0 has waited for the other ranks at {self.where}, torchrun's store, for "
                    f"{timeout.total_seconds():.0f} s: {present} of {self.world} came; {_ALIKE}"
                )
            counted, before = store.add(_ARRIVALS, 0), counted
            unanswered += [f"{_ARRIVALS}/{number + 1}" for number in range(before, counted)]
            for key in [key for key in unanswered if store.check([key])]:
                store.set(f"thinwire/{store.get(key).decode()}", part)
                unanswered.remove(key)
            time.sleep(_POLL)
        return part

    def _find_part(self, store: dist.Store, timeout: datetime.timedelta) -> str:
        word = uuid.uuid4().hex
        store.set(f"{_ARRIVALS}/{store.add(_ARRIVALS, 1)}", word)
        try:
            store.wait([f"thinwire/{word}"], timeout)
        except RuntimeError as error:
            raise UsageError(
                f"rank {self.rank} has reached torchrun's store at {self.where}, but rank 0 has not answered there "
                f"within {timeout.total_seconds():.0f} s; {_ALIKE}"
            ) from error
        part = store.get(f"thinwire/{word}").decode()
        store.add(f"{part}/here", 1)
        return part

    @property
    def where(self) -> str:
        """The two variables that say where the store is, for messages."""
        return f"MASTER_ADDR = {self.host}, MASTER_PORT = {self.port}"

    def _host(self, timeout: datetime.timedelta) -> dist.Store:
        try:
            listener = self._listener()
        except OSError as error:
            raise UsageError(
                f"rank 0 cannot listen on {self.where}: {os.strerror(error.errno or 0)}; choose another port, or an "
                "address of this host, for all ranks"
            ) from error
        return self.host_at(listener, self.host, timeout)

    def host_at(self, listener: socket.socket, host: str, timeout: datetime.timedelta) -> dist.Store:
        """Host the store on a socket, which it owns from then on, and wait until all ranks have connected to this host.

        Raises:
            UsageError: Not all ranks connect in time.
        """
        port = listener.getsockname()[1]
        try:
            return dist.TCPStore(
                host,
                port,
                self.world,
                is_master=True,
                timeout=timeout,
                master_listen_fd=listener.detach(),
            )
        except RuntimeError as error:
            raise UsageError(
                f"rank 0 has waited for the other ranks at {self.where} for {timeout.total_seconds():.0f} s: "
                f"{str(error).splitlines()[0]}; see whether all {self.world} ranks were started with this address"
            ) from error

    def _listener(self) -> socket.socket:
        at = self.listens_at
        both = not at and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in at else socket.AF_INET
        return socket.create_server((at, self.port), family=family, dualstack_ipv6=both, backlog=_BACKLOG)
