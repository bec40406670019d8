"""What a subgroup needs of its transport: gathers and exchanges among all members, and messages between two."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch


class Connections(ABC):
    """Connections between the members of a subgroup, which are numbered in the order of their pieces.

    All tensors are contiguous and 1-D. On a device with streams, operations are queued on the current stream.
    """

    is_native: ClassVar[bool] = False
    """Whether tensors stay on their device, so that the host does not wait, and :meth:`sum_scatter` works."""

    @abstractmethod
    def gather(self, pieces: Sequence[torch.Tensor]) -> None:
        """Fill ``pieces[i]`` with the piece of member i; this rank's own is only read."""

    @abstractmethod
    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> None:
        """Send ``outgoing[i]`` to member i and fill ``incoming[i]`` from it. Own and empty pieces are skipped."""

    def sum_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """Fill ``out`` with this rank's part of the sum of the members' ``whole``, added in its dtype. Connections that
        are not native do not offer it: the caller exchanges pieces and adds them."""
        raise NotImplementedError

    @abstractmethod
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send a tensor to one member, which receives it; others take no part."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill a tensor with that of another member, which sends it."""

    @abstractmethod
    def abort(self) -> None:
        """Make every pending operation fail, here and on the other members."""

    @abstractmethod
    def close(self) -> None:
        """Release the connections, which are idle."""


def is_of_transport(error: RuntimeError) -> bool:
    """Whether an exchange has raised an error itself, and not a signal handler that ran meanwhile. That of torch's
    DataLoader, for one, raises a RuntimeError wherever the main thread is when a worker has died."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return str(innermost.f_globals.get("__name__")).startswith(("thinwire.", "torch.distributed."))
