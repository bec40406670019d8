"""Buffers that gradients accumulate in, on the device or on the host.

A buffer that lives on the host visits the device while a backward adds to it: its values come up before the first
addition, and go down once its unit takes part in no later reduction of the micro-batch. Its memory on the device is
allocated for the visit only, so that a rank's gradients are on the device a few units at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import final

import torch

from thinwire.program import HostLane
from thinwire.sharding.lanes.lanes import Lanes, Load, Ticket


class Accumulator:
    """A buffer that keeps track of whether it is empty.

    Args:
        memory: 1-D tensor; its content is undefined while the accumulator is ``empty``.

    Attributes:
        memory: Where the values live between backwards.
        values: The values on the device, for whoever adds to them inside of a backward.
        kept: The values where they live, for whoever reads or writes them outside of a backward.
        shown: A copy of the values that the optimizer reads; ``None`` if it reads ``memory``.
        device: Device on which gradients are added.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = self.values = self.kept = memory
        self.device = memory.device
        self.shown: torch.Tensor | None = None
        self.empty = True

    def come_up(self) -> None:
        """Let values that live on the host come up, if there are any."""

    def claim(self) -> bool:
        """Announce a write; returns whether to add to the content (``True``) or to overwrite it (``False``)."""
        accumulate, self.empty = not self.empty, False
        return accumulate


class _Visit(enum.Enum):
    """Where the values of a buffer of the host are."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    LEAVING = "leaving"


@final
class HostAccumulator(Accumulator):
    """A buffer of the host.

    Args:
        memory: 1-D tensor of the host.
        device: Device of the model.
        lanes: Lanes of the model.
        load: Description of the data, for timelines.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device, lanes: Lanes, load: Load) -> None:
        self.memory, self.device = memory, device
        self.shown, self.empty = None, True
        self._lanes, self._load = lanes, load
        self._visiting = torch.empty(memory.numel(), dtype=memory.dtype, device=device)
        self._storage, self._nbytes = self._visiting.untyped_storage(), memory.nbytes
        self._storage.resize_(0)
        self._visit, self._tickets = _Visit.AWAY, list[Ticket]()

    @property
    def values(self) -> torch.Tensor:  # type: ignore[override]
        if self._visit is _Visit.AWAY:
            self._begin_visit()
        if self._visit is not _Visit.HERE:
            self._await_tickets()
            self._visit = _Visit.HERE
        return self._visiting

    @property
    def kept(self) -> torch.Tensor:  # type: ignore[override]
        self.go_down(())
        self.leave()
        self._lanes.settle(HostLane.DOWN)
        return self.memory

    def claim(self) -> bool:
        _ = self.values  # they come up as long as there are any
        return super().claim()

    @property
    def visits(self) -> bool:
        """Whether the buffer has memory on the device."""
        return self._visit is not _Visit.AWAY

    def come_up(self) -> None:
        if self._visit is _Visit.AWAY and not self.empty:
            self._begin_visit()

    def _begin_visit(self) -> None:
        self._storage.resize_(self._nbytes)
        self._visit = _Visit.COMING
        if not self.empty:
            self._tickets.append(self._lanes.submit(HostLane.UP, self._copy_up, load=self._load))

    def go_down(self, after: Sequence[Ticket]) -> None:
        """Let the values go down, if they are on the device.

        Args:
            after: Tickets of the reductions that read or write them.
        """
        if self._visit not in (_Visit.COMING, _Visit.HERE):
            return
        after = [*self._tickets, *after]
        if self._visit is _Visit.HERE and not self.empty:
            after = [self._lanes.submit(HostLane.DOWN, self._copy_down, after=after, load=self._load)]
        self._visit, self._tickets = _Visit.LEAVING, list(after)

    def leave(self) -> None:
        """Let computation wait until the values have gone down, and free their memory on the device."""
        if self._visit is _Visit.LEAVING:
            self._await_tickets()
            self._storage.resize_(0)
            self._visit = _Visit.AWAY

    def _await_tickets(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        self._tickets.clear()

    def _copy_up(self) -> None:
        self._visiting.copy_(self.memory, non_blocking=True)

    def _copy_down(self) -> None:
        self._lanes.send(self._visiting, self.memory)
