"""Updates on the host's processor: gradients go down, masters and optimizer states never leave the host, and new
masters come up, cast on the device.

A thread of the host updates one batch of units after another, while computation goes on. The computing thread takes up
the results of a batch where the forward first needs one of its units, and those of the next batch with them, so that
their copies and spreads are hidden as well. It gives the thread new work there, too.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from thinwire.collectives.job.threads import threads_of_updates
from thinwire.program import AHEAD, SLOTS, HostLane
from thinwire.sharding.grads.host_memory import HostAccumulator, Ring, Staged, UpdateSteps, carved, load_of, master_of
from thinwire.sharding.grads.unit_gradient import Accumulator, UnitGradient
from thinwire.sharding.lanes.lanes import Lanes, Ticket
from thinwire.sharding.params.param_group import Unit


@final
@dataclass(eq=False)
class _Batch(Ticket):
    """Units that are updated together, as a ticket of their results: who waits for them takes them up.

    Attributes:
        gradients: Their gradients that there were when the update was asked for.
        updated: Ticket of the update; ``None`` before their gradients go down.
    """

    updates: HostUpdates
    units: Sequence[int]
    gradients: Sequence[Accumulator]
    steps: UpdateSteps
    updated: Ticket | None = None

    def wait(self) -> None:
        self.updates.take(self)

    settle = wait

    def done(self) -> bool:
        return not self.updates.awaits(self)


class HostUpdates:
    """The updates of one model's share on the host. ``ranks`` are those of the node, among whom its cores are divided
    for updates; ``None``: torch's threads stay."""

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
        self._batches = deque[_Batch]()  # those whose results have not been taken up, in order

    def update(self, batches: Sequence[Sequence[int]], steps: UpdateSteps) -> None:
        """Update units, batch by batch in this order. If updates may not wait, all results are taken up before this
        returns."""
        self.settle()
        while self._coming_up:
            self._coming_up.pop(0).settle()
        self._make_room(batches)
        self._batches += [_Batch(self, units, self._of(units), steps) for units in batches]
        for batch in list(self._batches):
            for one in batch.gradients:
                if isinstance(one, HostAccumulator):
                    _ = one.kept  # which waits for it
            steps.begin(batch.units)
            steps.expect(batch.units, batch)
        for batch in list(self._batches)[: AHEAD + 1]:
            self._start(batch)
        if not steps.may_wait:
            self.settle()

    def awaits(self, batch: _Batch) -> bool:
        """Whether the results of a batch have not been taken up."""
        return batch in self._batches

    @torch.inference_mode(False)  # a forward without gradients may be the first that needs a value
    @torch.no_grad()
    def take(self, batch: _Batch) -> None:
        """Take up the results of the batches up to this one, and of some more, so that the way of their masters is
        hidden. The host waits for their updates."""
        last = self._batches.index(batch) + AHEAD if batch in self._batches else -1
        with temporarily_clear_interpreter_stack():  # a transform refuses writes to tensors from outside of it
            while self._batches and last >= 0:
                last -= 1
                self._take_first()

    @contextlib.contextmanager
    def visited(self, units: Sequence[int]) -> Iterator[None]:
        """Have the states of some units where they are updated: on the host, where they always are."""
        del units
        self.settle()
        yield

    def settle(self) -> None:
        """Block until the host has the results of all updates."""
        if self._batches:
            self.take(self._batches[-1])

    # -- one batch ---------------------------------------------------------------------------------------------

    def _take_first(self) -> None:
        """Take up the results of the first batch, and give the host its next work."""
        batch = self._batches[0]
        assert batch.updated is not None
        batch.updated.wait()
        self._batches.popleft()
        if len(self._batches) > AHEAD:
            self._start(self._batches[AHEAD])
        batch.steps.prepare(batch.units)
        self._bring_up(batch)

    def _start(self, batch: _Batch) -> None:
        """Let the gradients of a batch go down, and the host update it then."""
        of_device = [one for one in batch.gradients if not isinstance(one, HostAccumulator)]
        staged, after = Staged(), list[Ticket]()
        if of_device:
            places = carved(self._down.next().memory, [one.memory for one in of_device])
            staged.gradients += zip(of_device, places, strict=True)

            def go_down() -> None:
                for one, place in staged.gradients:
                    self._lanes.send(one.memory, place)

            load = load_of("gradients down", batch.units, self._names)
            after.append(self._lanes.submit(HostLane.DOWN, go_down, load=load))

        def act() -> None:
            with staged.shown(), threads_of_updates(self._ranks):
                batch.steps.act(batch.units)

        batch.updated = self._lanes.compute_on_host(act, after=after, load=load_of("update", batch.units, self._names))

    def _bring_up(self, batch: _Batch) -> None:
        """Let new masters come up, and give them to who needs them."""
        units, steps = batch.units, batch.steps
        buffers = [buffer for unit in units for buffer in self._masters[unit]]
        masters = [master_of(buffer) for buffer in buffers]
        slot = self._up.next()
        places = carved(slot.memory, masters)
        staged = Staged(copies=list(zip(masters, places, strict=True)), masters=list(zip(buffers, places, strict=True)))
        load = load_of("masters up", units, self._names)
        up = self._lanes.submit(HostLane.UP, staged.come_up, after=slot.users, load=load)
        self._coming_up.append(up)
        up.wait()
        with staged.shown():
            steps.write(units)
            slot.users = tuple(steps.then(units, None))

    def _of(self, units: Sequence[int]) -> list[Accumulator]:
        return [one for unit in units for one in self._gradients.get(unit, ()) if not one.empty]

    def _make_room(self, batches: Sequence[Sequence[int]]) -> None:
        masters = [[master_of(b).nbytes for unit in units for b in self._masters[unit]] for units in batches]
        gradients = [[one.memory.nbytes for one in self._of(units)] for units in batches]
        for ring, sizes in ((self._up, masters), (self._down, gradients)):
            ring.make_room(max(map(sum, sizes), default=0), self._lanes.settle)
