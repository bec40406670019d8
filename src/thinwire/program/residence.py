"""The update of states that live on the host. They come up to the device, are updated there, and go down again, a batch
of units at a time, in the order in which the next forward needs the units."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.program.draft import Call, Draft
from thinwire.program.mesh import Axis, Kind
from thinwire.program.step import BufferInfo, Event, HostLane, Phase, UnitInfo
from thinwire.program.wire import has_master
from thinwire.spec import Plan

__all__ = ["AHEAD", "MOMENT_BYTES", "SLOTS", "add_update", "state_bytes"]

AHEAD = 1
"""Batches whose states come up while those of another one are updated."""

SLOTS = AHEAD + 2
"""Batches whose states are on the device at once: on their way up, being updated, and on their way down."""

MOMENT_BYTES = 8
"""Bytes per element of AdamW's moments, which programs count. The runtime copies what its optimizer has."""

_STEP = Event(Phase.STEP, -1, 0)


def state_bytes(plan: Plan, buffer: BufferInfo) -> int:
    """Bytes per element of the states of a trained buffer that live on the host: masters, if they have memory of their
    own, and moments."""
    return MOMENT_BYTES + (4 if has_master(plan, buffer) else 0)


def add_update(plan: Plan, units: Sequence[UnitInfo], draft: Draft, batch: Sequence[int], before: list[int]) -> int:
    """Record the update of a batch of units, and the copies around it.

    Args:
        plan: The plan.
        units: Units of the model.
        draft: The program so far.
        batch: Units that are updated together.
        before: Copies down of earlier batches, oldest first; that of this one is added.

    Returns:
        Index of the update.
    """
    together = tuple(batch)
    share = draft.places[Axis.SHARD]
    owned = [(buffer.shares[share], buffer) for unit in batch for buffer in units[unit].buffers if buffer.trainable]
    nbytes = sum(numel * state_bytes(plan, buffer) for numel, buffer in owned)
    numel = sum(numel for numel, _ in owned)
    room = before[-SLOTS:][:1] if len(before) >= SLOTS else ()
    up = draft.add_own(Call(Kind.COPY, HostLane.UP, Axis.SHARD, together, size=nbytes), _STEP, tuple(room))
    update = draft.add_own(Call(Kind.UPDATE, HostLane.UPDATE, Axis.SHARD, together, size=numel), _STEP, (up,))
    before.append(draft.add_own(Call(Kind.COPY, HostLane.DOWN, Axis.SHARD, together, size=nbytes), _STEP, (update,)))
    return update
