"""What a subgroup needs of its transport: gathers and exchanges among all members, and messages between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Connections(Protocol):
    """Connections between the members of a subgroup, which are numbered in the order of their pieces.

    All tensors are contiguous and 1-D. On a device with streams, operations are queued on the current stream.
    """

    @property
    def is_native(self) -> bool:
        """Whether tensors stay on their device, so that the host does not wait, and :meth:`sum_scatter` works."""

    def gather(self, pieces: Sequence[torch.Tensor]) -> None:
        """Fill ``pieces[i]`` with the piece of member i; this rank's own is only read."""

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to member i and fill ``incoming[i]`` from it. Own and empty pieces are skipped."""

    def sum_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill ``out`` with this rank's part of the sum of the members' ``whole``, added in its dtype."""

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send a tensor to one member, which receives it; others take no part."""

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with that of another member, which sends it."""

    def abort(self) -> None:
        """Make every pending operation fail, here and on the other members."""

    def close(self) -> None:
        """Release the connections, which are idle."""


class HostLinks(Connections, Protocol):
    """Connections for tensors of the host."""

    def post(self, tensor: torch.Tensor, target: int) -> Any:
        """Start to send a tensor to one member; returns torch's work. The caller keeps the tensor until its end."""


class StagedLinks:
    """Connections of the host for tensors of a device: what is sent is copied to the host, and the host waits.

    The host does not wait until a message to one member has been received, because that member may send one first.

    Args:
        links: Connections for tensors of the host.
        index: Index of this rank among the members.
    """

    is_native = False

    def __init__(self, links: HostLinks, index: int) -> None:
        self._links, self._index = links, index
        self._posted: list[tuple[Any, torch.Tensor]] = []  # messages on their way
        self.abort: Callable[[], None] = links.abort
        self.close: Callable[[], None] = links.close

    def gather(self, pieces: Sequence[torch.Tensor]) -> None:
        """See :meth:`Connections.gather`."""
        staged = [
            piece.cpu() if i == self._index else torch.empty_like(piece, device="cpu") for i, piece in enumerate(pieces)
        ]
        self._links.gather(staged)
        self._deliver(staged, pieces)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """See :meth:`Connections.exchange`."""
        received = [torch.empty_like(piece, device="cpu") for piece in incoming]
        self._links.exchange([piece.cpu() for piece in outgoing], received)
        self._deliver(received, incoming)

    def sum_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """Not offered: the caller exchanges pieces and adds them on the device."""
        raise NotImplementedError

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """See :meth:`Connections.send`."""
        self._posted = [(work, sent) for work, sent in self._posted if not work.is_completed()]
        staged = tensor.cpu()
        self._posted.append((self._links.post(staged, target), staged))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """See :meth:`Connections.receive`."""
        staged = torch.empty_like(tensor, device="cpu")
        self._links.receive(staged, source)
        tensor.copy_(staged)

    def _deliver(self, received: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
        for i, (staged, piece) in enumerate(zip(received, pieces, strict=True)):
            if i != self._index:
                piece.copy_(staged)
