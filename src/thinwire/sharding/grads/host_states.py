"""What an update needs of the host: masters, optimizer states and gradients that live there, and their way through the
device.

The host's tensors are the only masters there are: whoever reads or writes them outside of an update, as checkpoints do,
reads and writes what the next update begins with. For an update, the optimizer's tensors point at a *slot*, memory of
the device that a batch of units at a time passes through. A ring of slots bounds that memory: while one batch is
updated, the next one comes up, and the states of the one before go down.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from thinwire.program import AHEAD, SLOTS, HostLane
from thinwire.sharding.grads.host_memory import (
    HostAccumulator,
    Ring,
    Slot,
    Staged,
    UpdateSteps,
    carved,
    load_of,
    master_of,
    room,
)
from thinwire.sharding.grads.unit_gradient import OwnedFragment, UnitGradient
from thinwire.sharding.lanes.lanes import Lanes, Ticket
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.param_group import Unit


@dataclass
class _Stored:
    """What lives on the host of one unit.

    Attributes:
        masters: Buffers whose masters have memory of their own.
        fragments: What this rank updates of the unit.
        tensors: The optimizer's tensors on the host; none before its first update.
        memory: Memory for them, of bytes, in which they lie end to end.
        gradients: Gradients that live on the host.
    """

    masters: list[FlatBuffer]
    fragments: list[OwnedFragment]
    tensors: list[torch.Tensor] = field(default_factory=list)
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))
    gradients: list[HostAccumulator] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Elements of the fragments."""
        return sum(owned.value.numel() for owned in self.fragments)

    @property
    def nbytes(self) -> int:
        """Bytes that the unit takes in a slot."""
        parts = [*map(master_of, self.masters), self.memory, *(gradient.memory for gradient in self.gradients)]
        return sum(room(part.nbytes) for part in parts)


class HostStates:
    """The masters, optimizer states and gradients of one model's share that live on the host.

    The optimizer, over all fragments that this rank updates, is expected to keep ``state_bytes`` for each element;
    ``None`` if its states live on the device. Their memory is locked in its place now, as a whole: to lock a part takes
    as long, and in the middle of a step it stops other ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fragments: Sequence[OwnedFragment],
        units: Sequence[Unit],
        gradients: Mapping[int, Sequence[UnitGradient]],
        lanes: Lanes,
        device: torch.device,
        state_bytes: int | None,
    ) -> None:
        self._optimizer, self._lanes, self._device = optimizer, lanes, device
        self._has_states = state_bytes is not None
        self._stored: dict[int, _Stored] = {}
        for unit in units:
            masters = [buffer for buffer in unit.buffers if self._has_states and buffer.master is not None]
            self._stored[unit.index] = _Stored(masters, [])
        for owned in fragments:
            self._stored[owned.unit].fragments.append(owned)
        for index, parts in gradients.items():
            self._stored[index].gradients = [p.owned for p in parts if isinstance(p.owned, HostAccumulator)]
        expected = [(state_bytes or 0) * stored.numel for stored in self._stored.values()]
        memory = lanes.host_memory(sum(expected))
        for stored, part in zip(self._stored.values(), memory.split(expected), strict=True):
            stored.memory = part
        self._names = {unit.index: unit.name for unit in units}
        self._ring = Ring(SLOTS, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device))
        self._going_down = list[Ticket]()  # results of the last update

    def update(self, batches: Sequence[Sequence[int]], steps: UpdateSteps) -> None:
        """Update units, batch by batch in this order. On a device with streams, computation goes on meanwhile."""
        for ticket in self._going_down:
            ticket.wait()
        self._going_down.clear()
        self._ring.make_room(max(map(self._size, batches), default=0), self._lanes.settle)
        coming = deque[tuple[Slot, Staged, Ticket]]()
        for number, units in enumerate(batches):
            for batch in batches[number + len(coming) : number + AHEAD + 1]:
                coming.append(self._begin(batch))
            slot, staged, up = coming.popleft()
            steps.begin(units)
            steps.prepare(units)

            def perform(units: Sequence[int] = units) -> None:
                steps.act(units)
                steps.write(units)

            with staged.shown():
                updated = self._perform(perform, units, up)
                slot.users = steps.then(units, updated)
                self._take_new(units, staged)
            if not staged.copies:
                continue
            after = () if updated is None else (updated,)
            load = load_of("states down", units, self._names)
            down = self._lanes.submit(HostLane.DOWN, functools.partial(self._go_down, staged), after=after, load=load)
            self._going_down.append(down)
            slot.users = (*slot.users, down)

    @contextlib.contextmanager
    def visited(self, units: Sequence[int]) -> Iterator[None]:
        """Have the states of some units on the device inside the block, and back on the host after it."""
        self.settle()
        staged = self._staged(units, torch.empty(self._size(units), dtype=torch.uint8, device=self._device))
        staged.come_up()
        with staged.shown():
            yield
            self._take_new(units, staged)
        self._go_down(staged)
        self._lanes.settle()

    def settle(self) -> None:
        """Block until the host has the results of all updates."""
        self._lanes.settle(HostLane.DOWN)

    # -- one batch ---------------------------------------------------------------------------------------------

    def _begin(self, units: Sequence[int]) -> tuple[Slot, Staged, Ticket]:
        """Let the states of a batch come up."""
        slot = self._ring.next()
        staged = self._staged(units, slot.memory)
        up = self._lanes.submit(
            HostLane.UP, staged.come_up, after=slot.users, load=load_of("states up", units, self._names)
        )
        return slot, staged, up

    def _perform(self, act: Callable[[], None], units: Sequence[int], up: Ticket) -> Ticket | None:
        if self._lanes.home.exists and self._has_states:  # others may be read on the device right after the step
            return self._lanes.submit(HostLane.UPDATE, act, after=(up,), load=load_of("update", units, self._names))
        up.wait()
        act()
        return None

    def _go_down(self, staged: Staged) -> None:
        for host, device in staged.copies:
            self._lanes.send(device, host)

    # -- places ------------------------------------------------------------------------------------------------

    def _size(self, units: Sequence[int]) -> int:
        return sum(self._stored[unit].nbytes for unit in units)

    def _staged(self, units: Sequence[int], memory: torch.Tensor) -> Staged:
        staged, at = Staged(), 0
        for stored in (self._stored[unit] for unit in units):
            on_device = {}
            for buffer in stored.masters:
                master = master_of(buffer)
                place = memory[at : at + master.nbytes].view(master.dtype)
                at += room(master.nbytes)
                staged.copies.append((master, place))
                staged.masters.append((buffer, place))
                on_device[id(buffer.layout)] = place
            for owned in stored.fragments:
                master_place = on_device.get(id(owned.source.layout))
                if master_place is not None:  # else the P shard, on the device, holds the masters
                    place = master_place[owned.begin : owned.begin + owned.value.numel()].view(owned.value.shape)
                    staged.pointed.append((owned.value, owned.value.detach(), place))
            for gradient in stored.gradients:
                nbytes = gradient.memory.nbytes
                staged.gradients.append((gradient, memory[at : at + nbytes].view(gradient.memory.dtype)))
                at += room(nbytes)
            states = memory[at : at + stored.memory.nbytes]
            at += room(stored.memory.nbytes)
            if stored.tensors:
                staged.copies.append((stored.memory, states))
                places = carved(states, stored.tensors)
                staged.pointed += zip(stored.tensors, [t.detach() for t in stored.tensors], places, strict=True)
        return staged

    def _take_new(self, units: Sequence[int], staged: Staged) -> None:
        """Give optimizer states that the update has made a place on the host: those of the fragments' size. Others are
        small, and stay where they are."""
        for stored in (self._stored[unit] for unit in units) if self._has_states else ():
            present = [tensor for owned in stored.fragments for tensor in self._states_of(owned)]
            if set(map(id, present)) == set(map(id, stored.tensors)):
                continue
            self._lanes.settle()  # they have values now
            present.sort(key=lambda tensor: -tensor.itemsize)  # so that each begins at a multiple of its own
            nbytes, memory = sum(tensor.nbytes for tensor in present), stored.memory
            if memory.nbytes != nbytes:
                memory = self._lanes.host_memory(nbytes)
            values = [tensor.to("cpu", copy=True) for tensor in present]  # some may lie in that memory
            self._lanes.settle()  # that of others belongs to another stream, and ends with them
            places = carved(memory, present)
            for value, place in zip(values, places, strict=True):
                place.copy_(value)
            known = {id(tensor) for tensor in (*present, *stored.tensors)}
            staged.copies = [pair for pair in staged.copies if pair[0] is not stored.memory]
            staged.pointed = [one for one in staged.pointed if id(one[0]) not in known]
            staged.pointed += [(tensor, place, place) for tensor, place in zip(present, places, strict=True)]
            stored.tensors, stored.memory = present, memory

    def _states_of(self, owned: OwnedFragment) -> Iterator[torch.Tensor]:
        for value in self._optimizer.state.get(owned.value, {}).values():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == owned.value.numel():
                yield value
