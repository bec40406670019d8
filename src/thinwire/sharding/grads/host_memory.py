"""Memory that batches of units pass through on their way between the host and the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch

from thinwire.sharding.lanes.lanes import Ticket

__all__ = ["Ring", "Slot", "carved", "room"]

_ALIGNED: Final = 256
"""Bytes at whose multiples what is copied as one begins."""


@dataclass
class Slot:
    """Memory that a batch of units passes through.

    Attributes:
        memory: Bytes.
        users: Tickets of what reads or writes it.
    """

    memory: torch.Tensor
    users: Sequence[Ticket] = ()


@final
class Ring:
    """Slots that batches use in turn.

    Args:
        count: Number of slots.
        allocate: Makes memory of so many bytes.
    """

    def __init__(self, count: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._slots = deque(Slot(allocate(0)) for _ in range(count))

    def next(self) -> Slot:
        """The slot that was used longest ago."""
        self._slots.rotate(-1)
        return self._slots[-1]

    def make_room(self, nbytes: int, settle: Callable[[], None]) -> None:
        """Make the slots large enough for any batch.

        Args:
            nbytes: Bytes of the largest batch.
            settle: Waits until nothing uses the old slots.
        """
        if self._slots[0].memory.nbytes < nbytes:
            settle()
            for slot in self._slots:
                slot.memory, slot.users = self._allocate(nbytes), ()


def carved(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Places for tensors in a memory of bytes, each of its dtype and shape, one after another."""
    places, at = [], 0
    for tensor in tensors:
        places.append(memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += tensor.nbytes
    return places


def room(nbytes: int) -> int:
    """Bytes that something of so many bytes takes in a slot."""
    return -(-nbytes // _ALIGNED) * _ALIGNED
