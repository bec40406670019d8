"""What lives on the host, and its way to the device and back.

Masters and optimizer states come up for the update, and go down again, a batch of units at a time, in the order in
which the next forward needs the units. Gradients go down as soon as a micro-batch is done with them, and come up for
the next one, which adds to them, and for the update."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.program.draft import Draft
from thinwire.program.mesh import Axis, Kind
from thinwire.program.step import BufferInfo, Call, Event, HostLane, Phase, UnitInfo
from thinwire.program.wire import ITEMSIZE, has_master
from thinwire.spec import Plan

AHEAD = 1
"""Batches whose states come up while those of another one are updated."""

SLOTS = AHEAD + 2
"""Batches whose states are on the device at once: on their way up, being updated, and on their way down."""

LEAVING = 2
"""Units whose gradients, or new parameters, are on their way to the host, while later ones are reduced, or updated."""

MOMENT_BYTES = 8
"""Bytes per element of AdamW's moments, which programs count. The runtime copies what its optimizer has."""

MASTER_BYTES = 4
"""Bytes per element of a master."""

_STEP = Event(Phase.STEP, -1, 0)


def state_bytes(plan: Plan, buffer: BufferInfo) -> int:
    """Bytes per element of the states of a trained buffer that live on the host: masters, if they have memory of their
    own, and moments."""
    return (MOMENT_BYTES + (MASTER_BYTES if has_master(plan, buffer) else 0)) if plan.residence.streams_states else 0


def gradient_bytes(plan: Plan) -> int:
    """Bytes per element of the gradients that live on the host."""
    return ITEMSIZE[plan.accumulate_dtype] if plan.residence.streams_gradients else 0


def add_update(plan: Plan, units: Sequence[UnitInfo], draft: Draft, batch: Sequence[int], before: list[int]) -> int:
    """Record the update of a batch of units, and the copies around it; its copy down joins those ``before``. Returns
    its index."""
    together = tuple(batch)
    share = draft.places[Axis.SHARD]
    owned = [(buffer.shares[share], buffer) for unit in batch for buffer in units[unit].buffers if buffer.trainable]
    numel = sum(numel for numel, _ in owned)
    room = before[-SLOTS:][:1] if len(before) >= SLOTS else ()
    if plan.residence.optimizer == "host-update":
        return _add_host_update(plan, draft, together, numel, before, tuple(room))
    states = sum(numel * state_bytes(plan, buffer) for numel, buffer in owned)
    coming = states + numel * gradient_bytes(plan)
    up = draft.record(Call(Kind.COPY, HostLane.UP, Axis.SHARD, together, size=coming), _STEP, tuple(room))
    update = draft.record(Call(Kind.UPDATE, HostLane.UPDATE, Axis.SHARD, together, size=numel), _STEP, (up,))
    last = update
    if states:
        last = draft.record(Call(Kind.COPY, HostLane.DOWN, Axis.SHARD, together, size=states), _STEP, (update,))
    before.append(last)
    return update


def _add_host_update(
    plan: Plan, draft: Draft, together: tuple[int, ...], numel: int, before: list[int], room: tuple[int, ...]
) -> int:
    """Record the update of a batch by the host's processor: its gradients go down, and its masters come up."""
    down: tuple[int, ...] = ()
    if not plan.residence.streams_gradients:
        size = numel * ITEMSIZE[plan.accumulate_dtype]
        read = tuple(up - 1 for up in before[-AHEAD - 1 :][:1]) if len(before) > AHEAD else ()  # the update of a batch
        down = (draft.record(Call(Kind.COPY, HostLane.DOWN, Axis.SHARD, together, size=size), _STEP, read),)
    call = Call(Kind.UPDATE, HostLane.UPDATE, Axis.SHARD, together, size=numel)
    update = draft.record(call, _STEP, down)
    call = Call(Kind.COPY, HostLane.UP, Axis.SHARD, together, size=numel * MASTER_BYTES)
    before.append(draft.record(call, _STEP, (update, *room)))
    return before[-1]


def add_return(units: Sequence[UnitInfo], draft: Draft, batch: Sequence[int], after: tuple[int, ...]) -> None:
    """Record the way of updated parameters to the host, where they live, ``after`` what gives them their new values;
    their next gather waits for it."""
    for unit in batch:
        size = sum(b.itemsize * sum(b.shares) for b in units[unit].buffers if b.trainable)
        down = draft.record(Call(Kind.COPY, HostLane.DOWN, Axis.PARAMS, (unit,), size=size), _STEP, after)
        draft.hold_back(unit, (down,))


def host_bytes(plan: Plan, units: Sequence[UnitInfo]) -> int:
    """Bytes of the host's memory that the rank with the most of them keeps."""
    total = 0
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        shard = buffer.numel // plan.params.ranks
        if plan.residence.streams_params:
            total += buffer.kept(plan.params.ranks, plan.params.ranks)
        if buffer.trainable:
            total += max(buffer.shares) * (state_bytes(plan, buffer) + gradient_bytes(plan))
            apart = plan.micro_batches > 1 and not plan.grads_like_optimizer
            total += shard * gradient_bytes(plan) * apart
    return total


class HostGradients:
    """Records the copies of gradients that live on the host."""

    def __init__(self, plan: Plan, units: Sequence[UnitInfo], draft: Draft) -> None:
        self._draft, self._units, self._share = draft, units, draft.places[Axis.SHARD]
        self._itemsize = gradient_bytes(plan)
        # Where G is not cut like OS, micro-batches accumulate in a shard of G, and the last one in the share of OS.
        self._apart = draft.extent(Axis.SHARD) > 1 and not plan.grads_like_optimizer
        self._down: list[int] = []
        self._up: dict[int, int] = {}

    def begin(self) -> None:
        """Begin the backward of a micro-batch."""
        self._up.clear()

    def fetch(self, unit: int, event: Event) -> None:
        """Let the gradient of earlier micro-batches come up, once in a micro-batch, because the backward of the unit
        begins."""
        if self._itemsize and event.micro_batch and unit not in self._up:
            size = self._size(unit, share=not self._apart)
            call = Call(Kind.COPY, HostLane.UP, Axis.SHARD, (unit,), size=size)
            self._up[unit] = self._draft.record(call, event)

    def need(self, unit: int, event: Event) -> None:
        """Let computation wait for the gradient of earlier micro-batches."""
        if unit in self._up:
            self._draft.wait(event, self._up[unit])

    def finish(self, units: Sequence[int], event: Event, after: Sequence[int], *, last: bool) -> None:
        """Let the gradients of units go down, which take part in no later reduction of the micro-batch than those that
        start at ``event``; ``after`` are its reductions so far."""
        operations = self._draft.operations
        for unit in units if self._itemsize else ():
            size = self._size(unit, share=last or not self._apart)
            ended = tuple(index for index in after if unit in operations[index].units)
            call = Call(Kind.COPY, HostLane.DOWN, Axis.SHARD, (unit,), size=size)
            self._down.append(self._draft.record(call, event, ended))
            if len(self._down) > LEAVING:
                self._draft.wait(event, self._down[-1 - LEAVING])

    def _size(self, unit: int, *, share: bool) -> int:
        trained = [buffer for buffer in self._units[unit].buffers if buffer.trainable]
        return self._itemsize * sum(b.shares[self._share] if share else sum(b.shares) for b in trained)
