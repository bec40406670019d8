"""What lives on the host and visits the device: gradients, and batches of units on their way to an update and back.

A gradient of the host visits the device while a backward adds to it: its values come up before the first addition, and
go down once its unit takes part in no later reduction of the micro-batch. Its memory on the device is allocated for the
visit only, so that a rank's gradients are on the device a few units at a time.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, final

import torch

from thinwire.program import Axis, HostLane
from thinwire.sharding.grads.unit_gradient import Accumulator
from thinwire.sharding.lanes.lanes import Lanes, Load, Ticket
from thinwire.sharding.params.flat_buffer import FlatBuffer

_ALIGNED: Final = 256
"""Bytes at whose multiples what is copied as one begins."""


class _Visit(enum.Enum):
    """Where the values of a buffer of the host are."""

    AWAY = "away"
    COMING = "coming"
    HERE = "here"
    LEAVING = "leaving"


@final
class HostAccumulator(Accumulator):
    """A buffer of the host, 1-D, whose values visit the device."""

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
        """Let the values go down, if they are on the device, once the reductions have ended that use them."""
        if self._visit not in (_Visit.COMING, _Visit.HERE):
            return
        after = [*self._tickets, *after]
        if self._visit is _Visit.HERE and not self.empty:
            down = functools.partial(self._lanes.send, self._visiting, self.memory)
            after = [self._lanes.submit(HostLane.DOWN, down, after=after, load=self._load)]
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


@dataclass
class Slot:
    """Memory of bytes that a batch of units passes through, and tickets of what reads or writes it."""

    memory: torch.Tensor
    users: Sequence[Ticket] = ()


@final
class Ring:
    """Slots that batches use in turn; ``allocate`` makes memory of so many bytes."""

    def __init__(self, count: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._slots = deque(Slot(allocate(0)) for _ in range(count))

    def next(self) -> Slot:
        """The slot that was used longest ago."""
        self._slots.rotate(-1)
        return self._slots[-1]

    def make_room(self, nbytes: int, settle: Callable[[], None]) -> None:
        """Make the slots large enough for the largest batch; ``settle`` waits until nothing uses the old ones."""
        if self._slots[0].memory.nbytes < nbytes:
            settle()
            for slot in self._slots:
                slot.memory, slot.users = self._allocate(nbytes), ()


@dataclass
class Staged:
    """A batch of units in a slot: pairs of tensors where they live and in the slot. Slots of updates on the host are on
    the host, and what they hold does not come up.

    Attributes:
        copies: What comes up from the host, and may go down again.
        gradients: Gradients, with where the optimizer reads them.
        masters: Buffers with their masters on the device.
        pointed: Tensors that point at the device during the update, with their places on the host and there.
    """

    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    gradients: list[tuple[Accumulator, torch.Tensor]] = field(default_factory=list)
    masters: list[tuple[FlatBuffer, torch.Tensor]] = field(default_factory=list)
    pointed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def come_up(self) -> None:
        """Copy everything from the host, inside of a body."""
        for host, device in (*self.copies, *((gradient.memory, place) for gradient, place in self.gradients)):
            device.copy_(host, non_blocking=True)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let the optimizer, and what casts masters, find everything in the slot."""
        for tensor, _, device in self.pointed:
            tensor.data = device
        for buffer, master in self.masters:
            buffer.staged = master
        for gradient, place in self.gradients:
            gradient.shown = place
        try:
            yield
        finally:
            for gradient, _ in self.gradients:
                gradient.shown = None
            for tensor, host, _ in self.pointed:
                tensor.data = host
            for buffer, _ in self.masters:
                buffer.staged = None


class UpdateSteps(Protocol):
    """The steps of the update of a batch of units, in order. ``units`` are their numbers.

    Attributes:
        may_wait: Whether an update may end after the optimizer's step.
    """

    may_wait: bool

    def begin(self, units: Sequence[int]) -> None:
        """Invalidate what belongs to the old values."""

    def expect(self, units: Sequence[int], updated: Ticket) -> None:
        """Let whoever needs new values wait for their ticket first, which takes them up, and whoever writes gradients
        wait for the update that reads them."""

    def prepare(self, units: Sequence[int]) -> None:
        """Have memory for new values, on the thread that computes."""

    def act(self, units: Sequence[int]) -> None:
        """Update the masters, on any thread or stream."""

    def write(self, units: Sequence[int]) -> None:
        """Cast the new masters, which are on the device, into P shards, on any stream."""

    def then(self, units: Sequence[int], updated: Ticket | None) -> Sequence[Ticket]:
        """Begin to spread new values. ``updated`` is the ticket of the update; ``None`` if it has ended. Returns the
        tickets of what reads the masters."""


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


def load_of(what: str, units: Sequence[int], names: Mapping[int, str]) -> Load:
    """The description of a batch's data, for timelines; ``names`` are those of units, by number."""
    return Load(f"{what} {', '.join(names[unit] for unit in units)}", Axis.SHARD, tuple(units))


def master_of(buffer: FlatBuffer) -> torch.Tensor:
    """The masters of a buffer, which have memory of their own."""
    assert buffer.master is not None
    return buffer.master
