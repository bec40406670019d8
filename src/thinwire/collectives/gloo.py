"""Direct sends and receives over gloo, arranged so that its threads get in nobody's way.

Two facts about gloo's TCP transport, both seen in a profile of four ranks on two cores:

- Every device has a thread that polls a hundred times a second, and every group makes a device of its own unless it is
  given one. All our groups share one device.
- While one thread writes to a connection, the device's thread cannot read from it and spins until the write is over,
  which for megabytes in both directions is most of the time. So every pair of ranks has two connections, one for each
  direction.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["GlooLinks", "close_connections", "make_device"]

MAX_TAG = 1 << 31


def make_device() -> dist.ProcessGroupGloo.Device:
    """A device on the interface that ``GLOO_SOCKET_IFNAME`` names, or on the one of this host's name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_default_device()


class GlooLinks:
    """Connections between some ranks, two for each pair.

    Args:
        store: where they find each other; used by no one else.
        index: this rank among them.
        size: how many they are.
        device: shared by all links of the process.
        timeout: of every send and receive.
    """

    def __init__(
        self,
        store: dist.Store,
        index: int,
        size: int,
        device: dist.ProcessGroupGloo.Device,
        timeout: datetime.timedelta,
    ) -> None:
        backend: Any = dist.ProcessGroupGloo  # whose stubs leave out what we need
        options = backend._Options()
        options._devices = [device]
        options._timeout = timeout
        options._threads = 1  # run collectives, which we have none of
        self._index, self._size = index, size
        self._upwards, self._downwards = (
            backend(dist.PrefixStore(direction, store), index, size, options) for direction in ("up", "down")
        )

    def close(self) -> None:
        """End every exchange that is under way, on this rank and with it on the others."""
        for link in (self._upwards, self._downwards):
            close_connections(link, self._index, self._size)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to rank ``i`` and fill ``incoming[i]`` from it; own pieces and empty ones stay put.

        Args:
            outgoing: contiguous CPU tensors.
            incoming: contiguous CPU tensors, of the sizes that are sent.

        Raises:
            RuntimeError: gloo's own, after the timeout or when a peer is gone.
        """
        works = []
        for shift in range(1, self._size):
            source, target = (self._index - shift) % self._size, (self._index + shift) % self._size
            # The size is the message's tag: of two ranks that disagree about it, gloo would abort one.
            if incoming[source].numel():
                link = self._upwards if source < self._index else self._downwards
                works.append(link.recv([incoming[source]], source, _tag(incoming[source])))
            if outgoing[target].numel():
                link = self._upwards if target > self._index else self._downwards
                works.append(link.send([outgoing[target]], target, _tag(outgoing[target])))
        for work in works:
            work.wait()


def close_connections(group: Any, index: int, size: int) -> None:
    """End what a gloo group has under way.

    gloo closes a group's connections when one of its waits runs out of time, and has no other way that all releases of
    torch offer: wait a millisecond for a message that nobody sends.

    Args:
        group: a process group on gloo, or torch's wrapper of one.
        index: this rank among its members.
        size: how many they are.
    """
    with contextlib.suppress(RuntimeError):
        work = group.recv([torch.empty(1, dtype=torch.uint8)], (index + 1) % size, MAX_TAG - 1)
        work.wait(datetime.timedelta(milliseconds=1))


def _tag(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size() % MAX_TAG
