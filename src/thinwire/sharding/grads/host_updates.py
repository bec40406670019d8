"""Updates on the host's processor: gradients go down, masters and optimizer states never leave the host, and new
masters come up, cast on the device.

The processor updates one batch of units while the gradients of the next one go down and the masters of the one before
come up. The host waits for its own work, so that an update has ended when the optimizer's step returns.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from thinwire.collectives.job.threads import threads_of_updates
from thinwire.program import AHEAD, SLOTS, HostLane
from thinwire.sharding.grads.accumulators import Accumulator, HostAccumulator
from thinwire.sharding.grads.host_memory import Ring, carved, load_of, master_of
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.sharding.lanes.lanes import Lanes, Ticket
from thinwire.sharding.params.param_group import Unit

__all__ = ["HostUpdates"]


class HostUpdates:
    """The updates of one model's share on the host.

    Args:
        units: Units of the model.
        gradients: Gradients by unit.
        lanes: Lanes of the model.
        device: Device of the model.
        ranks: Ranks of the node, among whom its cores are divided for updates; ``None``: torch's threads stay.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        gradients: Mapping[int, Sequence[UnitGradient]],
        lanes: Lanes,
        device: torch.device,
        ranks: int | None,
    ) -> None:
        self._lanes, self._ranks = lanes, ranks
        self._names = {unit.index: unit.name for unit in units}
        self._masters = {unit.index: [buffer for buffer in unit.buffers if buffer.master is not None] for unit in units}
        self._gradients = {index: [part.owned for part in parts] for index, parts in gradients.items()}
        self._up = Ring(SLOTS, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device))
        self._down = Ring(AHEAD + 1, lanes.host_memory)
        self._coming_up = list[Ticket]()  # masters of the last update

    def update(
        self,
        batches: Sequence[Sequence[int]],
        prepare: Callable[[Sequence[int]], None],
        act: Callable[[Sequence[int]], None],
        write: Callable[[Sequence[int]], None],
        then: Callable[[Sequence[int], Ticket | None], Sequence[Ticket]],
    ) -> None:
        """Update units, batch by batch.

        Args:
            batches: Numbers of the units, in the order of the update.
            prepare: Called with a batch before it is written.
            act: Updates a batch.
            write: Casts the new masters of a batch, which are on the device, into its P shards.
            then: Called with a batch that was written; returns the tickets of what reads its masters.
        """
        for ticket in self._coming_up:
            ticket.settle()
        self._coming_up.clear()
        self._make_room(batches)
        going = deque[tuple[list[tuple[Accumulator, torch.Tensor]], Ticket | None]]()
        for number, units in enumerate(batches):
            for batch in batches[number + len(going) : number + AHEAD + 1]:
                going.append(self._take_down(batch))
            taken, down = going.popleft()
            if down is not None:
                down.settle()
            with _shown(taken), threads_of_updates(self._ranks):
                act(units)
            prepare(units)
            self._bring_up(units, write, then)

    @contextlib.contextmanager
    def visited(self, units: Sequence[int]) -> Iterator[None]:
        """Have the states of some units where they are updated: on the host, where they always are."""
        del units
        yield

    def settle(self) -> None:
        """Block until the host has the results of all updates, which it has when a step returns."""

    # -- one batch ---------------------------------------------------------------------------------------------

    def _take_down(self, units: Sequence[int]) -> tuple[list[tuple[Accumulator, torch.Tensor]], Ticket | None]:
        """Let the gradients of a batch go down; those of the host are there."""
        of_device = [one for one in self._of(units) if not isinstance(one, HostAccumulator)]
        for one in self._of(units):
            if isinstance(one, HostAccumulator):
                _ = one.kept  # which waits for it
        if not of_device:
            return [], None
        slot = self._down.next()
        pairs = list(zip(of_device, carved(slot.memory, [one.memory for one in of_device]), strict=True))

        def go_down() -> None:
            for one, place in pairs:
                self._lanes.send(one.memory, place)

        return pairs, self._lanes.submit(HostLane.DOWN, go_down, load=load_of("gradients down", units, self._names))

    def _bring_up(
        self,
        units: Sequence[int],
        write: Callable[[Sequence[int]], None],
        then: Callable[[Sequence[int], Ticket | None], Sequence[Ticket]],
    ) -> None:
        """Let new masters come up, and give them to who needs them."""
        buffers = [buffer for unit in units for buffer in self._masters[unit]]
        slot = self._up.next()
        places = carved(slot.memory, [master_of(buffer) for buffer in buffers])

        def come_up() -> None:
            for buffer, place in zip(buffers, places, strict=True):
                place.copy_(master_of(buffer), non_blocking=True)

        up = self._lanes.submit(HostLane.UP, come_up, after=slot.users, load=load_of("masters up", units, self._names))
        self._coming_up.append(up)
        up.wait()
        for buffer, place in zip(buffers, places, strict=True):
            buffer.staged = place
        try:
            write(units)
            slot.users = tuple(then(units, None))
        finally:
            for buffer in buffers:
                buffer.staged = None

    def _of(self, units: Sequence[int]) -> list[Accumulator]:
        return [one for unit in units for one in self._gradients.get(unit, ()) if not one.empty]

    def _make_room(self, batches: Sequence[Sequence[int]]) -> None:
        masters = [[master_of(b).nbytes for unit in units for b in self._masters[unit]] for units in batches]
        gradients = [[one.memory.nbytes for one in self._of(units)] for units in batches]
        for ring, sizes in ((self._up, masters), (self._down, gradients)):
            ring.make_room(max(map(sum, sizes), default=0), self._lanes.settle)


@contextlib.contextmanager
def _shown(taken: Sequence[tuple[Accumulator, torch.Tensor]]) -> Iterator[None]:
    """Let the optimizer read gradients on the host."""
    for one, place in taken:
        one.shown = place
    try:
        yield
    finally:
        for one, _ in taken:
            one.shown = None
