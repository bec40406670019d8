"""Direct sends and receives over gloo, arranged so that its threads do not disturb computation.

Three facts about gloo's TCP transport, all from profiles of ranks that share two cores:

- Every device has a thread that polls a hundred times a second, and every group makes its own device unless it is given
  one. All groups of thinwire share one device.
- While one thread writes to a connection, the device's thread cannot read from it and spins until the write is over.
  For megabytes in both directions, that is most of the time. So every pair of ranks has two connections, one for each
  direction.
- A small write wakes the thread of the peer's device at once. Where cores are scarce, that thread takes the core of the
  writer, which still holds the connection's lock, and the answer makes the writer's own device spin until the scheduler
  goes on with the writer. So a device's thread does not displace a thread that runs.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.collectives.links.connections import Connections
from thinwire.errors import UsageError

MAX_TAG = 1 << 31


def make_device(address: str = "") -> dist.ProcessGroupGloo.Device:
    """Make a device, which by default listens on the interface that ``GLOO_SOCKET_IFNAME`` names, or on that of this
    host's name."""
    interface, before = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0], _threads()
    if address:
        device = dist.ProcessGroupGloo.create_device(hostname=address)
    elif interface:
        device = dist.ProcessGroupGloo.create_device(interface=interface)
    else:
        device = dist.ProcessGroupGloo.create_default_device()
    for thread in _threads() - before:
        _displace_nothing(thread)
    return device


def address_of_interface(version: int = 4) -> str | None:
    """Address of the interface that ``GLOO_SOCKET_IFNAME`` names; ``None`` if it names none, or the loopback one.

    Args:
        version: Of the internet protocol, 4 or 6.

    Raises:
        UsageError: The interface has no such address, or does not exist.
    """
    import psutil  # only jobs with keys and elastic islands pay for it

    name = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    families = (socket.AF_INET, socket.AF_INET6)
    listed = [ip_address(a.address) for a in psutil.net_if_addrs().get(name, []) if a.family in families]
    if any(address.is_loopback for address in listed):
        return None
    # A link-local address of IPv6 is there beside the one that other hosts know.
    found = sorted((a for a in listed if a.version == version), key=lambda address: address.is_link_local)
    if name and not found:
        raise UsageError(f"GLOO_SOCKET_IFNAME = {name} is no interface of this host that has an IPv{version} address")
    return str(found[0]) if found else None


def _threads() -> set[int]:
    """The kernel's numbers of this process's threads; none are known where there is no ``/proc``."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.is_dir() else set()


def _displace_nothing(thread: int) -> None:
    """Let a thread of gloo run when a core is free or its turn comes, but take no core from a thread that runs. It is
    faster so, not needed: a container may forbid it."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


class GlooLinks(Connections):
    """Connections between some ranks for tensors of the host, two for each pair, which meet at a store that nothing
    else uses."""

    def __init__(
        self,
        store: dist.Store,
        index: int,
        size: int,
        device: dist.ProcessGroupGloo.Device,
        timeout: datetime.timedelta,
    ) -> None:
        backend: Any = dist.ProcessGroupGloo  # its stubs lack some of its methods
        options = backend._Options()
        options._devices = [device]
        options._timeout = timeout
        options._threads = 1  # they run collectives, which are not used here
        self.index, self._size = index, size
        self._upwards, self._downwards = (
            backend(dist.PrefixStore(direction, store), index, size, options) for direction in ("up", "down")
        )

    def abort(self) -> None:
        for link in (self._upwards, self._downwards):
            close_connections(link, self.index, self._size)

    def close(self) -> None:
        """Nothing to do: gloo closes idle connections once nothing refers to them."""

    def gather(self, pieces: Sequence[torch.Tensor]) -> None:
        self.exchange([pieces[self.index]] * self._size, pieces)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        if tensor.numel():
            self.post(tensor, target).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        if tensor.numel():
            self._expect(tensor, source).wait()

    def post(self, tensor: torch.Tensor, target: int) -> Any:
        """Start to send a contiguous CPU tensor to one rank; the caller keeps it until torch's work has ended."""
        link = self._upwards if target > self.index else self._downwards
        # The message's tag is its size: if two ranks disagreed about it, gloo would abort one of them.
        return link.send([tensor], target, tensor.nbytes % MAX_TAG)

    def _expect(self, tensor: torch.Tensor, source: int) -> Any:
        link = self._upwards if source < self.index else self._downwards
        return link.recv([tensor], source, tensor.nbytes % MAX_TAG)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        works = []
        for shift in range(1, self._size):
            source, target = (self.index - shift) % self._size, (self.index + shift) % self._size
            if incoming[source].numel():
                works.append(self._expect(incoming[source], source))
            if outgoing[target].numel():
                works.append(self.post(outgoing[target], target))
        for work in works:
            work.wait()


class StagedLinks(Connections):
    """Connections of the host for tensors of a device: what is sent is copied to the host, and the host waits.

    The host does not wait until a message to one member has been received, because that member may send one first.
    """

    def __init__(self, links: GlooLinks) -> None:
        self._links = links
        self._posted: list[tuple[Any, torch.Tensor]] = []  # messages on their way

    def abort(self) -> None:
        self._links.abort()

    def close(self) -> None:
        self._links.close()

    def gather(self, pieces: Sequence[torch.Tensor]) -> None:
        mine = self._links.index
        staged = [piece.cpu() if i == mine else torch.empty_like(piece, device="cpu") for i, piece in enumerate(pieces)]
        self._links.gather(staged)
        self._deliver(staged, pieces)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        received = [torch.empty_like(piece, device="cpu") for piece in incoming]
        self._links.exchange([piece.cpu() for piece in outgoing], received)
        self._deliver(received, incoming)

    def send(self, tensor: torch.Tensor, target: int) -> None:
        self._posted = [(work, sent) for work, sent in self._posted if not work.is_completed()]
        staged = tensor.cpu()
        self._posted.append((self._links.post(staged, target), staged))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        staged = torch.empty_like(tensor, device="cpu")
        self._links.receive(staged, source)
        tensor.copy_(staged)

    def _deliver(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        for i, (staged, piece) in enumerate(zip(received, pieces, strict=True)):
            if i != self._links.index:
                piece.copy_(staged)


def close_connections(group: Any, index: int, size: int) -> None:
    """Abort the pending operations of a gloo group.

    gloo closes the connections of a group when a wait times out, which is the only way that all releases of torch
    offer. So this waits a millisecond for a message that nobody sends.
    """
    with contextlib.suppress(RuntimeError):
        work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], (index + 1) % size, MAX_TAG - 1)
        work.wait(datetime.timedelta(milliseconds=1))
