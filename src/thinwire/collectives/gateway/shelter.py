"""Joins a job behind keys: the rank's gateway, its store, and gloo on the loopback interface."""

from __future__ import annotations

import datetime
import ipaddress
import os
import platform
import socket
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.collectives.gateway.addresses import inside_of
from thinwire.collectives.gateway.client import Gateway, GatewayRefusedError
from thinwire.collectives.gateway.keys import Keys
from thinwire.collectives.gateway.store import BACKEND, Door, ShelteredStore
from thinwire.collectives.links.gloo import address_of_interface, make_device
from thinwire.collectives.links.rendezvous import Rendezvous
from thinwire.errors import UsageError

__all__ = ["BACKEND", "Shelter"]


class Shelter:
    """A rank's place behind its gateway.

    Args:
        place: How the rank finds the others.
        keys: Keys of the job.
        timeout: How long ranks wait for each other.

    Attributes:
        store: The job's store.
        address: Loopback address of this rank, at which gloo has to listen.

    Raises:
        UsageError: Rank 0 cannot listen, does not answer, or has other keys.
    """

    def __init__(self, place: Rendezvous, keys: Keys, timeout: datetime.timedelta) -> None:
        self.address = inside_of(place.rank)
        self._place, self._timeout, self._where = place, timeout, place.where
        # torchrun's own store has its port, and is not used.
        self._port = place.port + 1 if place.at_launcher else place.port
        self._gateway = Gateway(keys, _job(place.world), place.world)
        try:
            inner, address, port = self._host() if place.rank == 0 else self._join()
        except BaseException:
            self._gateway.close()
            raise
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        door = Door(_this_host(), address, port)
        self.store = ShelteredStore(inner, self._gateway, place.rank, place.world, local_rank, door)
        _shelters.append(self)
        if not hasattr(dist.Backend, BACKEND.upper()):
            dist.Backend.register_backend(BACKEND, _make_backend, devices=["cpu", "cuda"])

    def close(self) -> None:
        """End the gateway. Groups are gone by then."""
        _shelters.remove(self)
        del self.store  # or the gateway would give its connections time to end
        self._gateway.close()

    def _host(self) -> tuple[dist.Store, str, int]:
        listener = socket.create_server(("127.0.0.1", 0), backlog=self._place.world)
        address = self._address_of_host()
        try:
            port = self._gateway.open(address, self._port, inside=self.address, store=listener.getsockname()[1])
        except OSError as error:
            listener.close()
            raise UsageError(
                f"rank 0's gateway cannot listen on {self._where} (address {address}, port {self._port}): "
                f"{error.strerror}; choose another port, or an address of this host, for all ranks"
            ) from error
        return self._place.host_at(listener, "127.0.0.1", self._timeout), address, port

    def _join(self) -> tuple[dist.Store, str, int]:
        place, patience = self._place, self._timeout.total_seconds()
        try:
            own = self._gateway.reach(place.host, self._port, patience)
        except GatewayRefusedError as error:
            raise UsageError(f"rank {place.rank} was not let in by rank 0 at {self._where}: {error}") from error
        except TimeoutError as error:
            raise UsageError(
                f"rank {place.rank} has not reached rank 0's gateway at {self._where}, port {self._port}, within "
                f"{patience:.0f} s ({error}); see whether rank 0 runs there with cluster.keys and a firewall leaves "
                "the port open"
            ) from error
        address = address_of_interface() or own
        inner = self._gateway.listen("127.0.0.1", place.host, self._port, 0)
        store = place.connect_at("127.0.0.1", inner, self._timeout)
        return store, address, self._gateway.open(address, 0, inside=self.address)

    def _address_of_host(self) -> str:
        """Where rank 0's gateway listens: one address, never all of them."""
        host = self._place.host
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            pass
        if (chosen := address_of_interface()) is not None:
            return chosen
        try:
            address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise UsageError(f"rank 0 cannot resolve {self._where} ({error}); give an address of this host") from error
        if ipaddress.ip_address(address).is_loopback and host != "localhost":
            raise UsageError(
                f"{self._where} is the loopback address {address} on this host, where no other host can reach it; give "
                "rank 0's IP address, or name its interface with GLOO_SOCKET_IFNAME"
            )
        return address


_shelters: list[Shelter] = []


def _make_backend(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> Any:
    """Make gloo's part of a process group; torch calls it for the backend :data:`BACKEND`."""
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._devices, options._timeout = [make_device(_shelters[-1].address)], timeout
    return backend(store, rank, size, options)


def _job(world: int) -> str:
    """Name of the job, so that a rank that reaches another job's gateway is told so."""
    launched = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
    return "\n".join([*launched, str(world)])


def _this_host() -> str:
    """Identity of this host, or of this container, whose loopback interface is its own."""
    parts = [platform.node()]
    for file in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(
                str(Path(file).readlink()) if file.endswith("net") else Path(file).read_text(encoding="utf-8").strip()
            )
        except OSError:
            continue
    return " ".join(parts)
