"""The mean of what bf16 shows of members' changes."""

from __future__ import annotations

import torch

from thinwire.codecs.delta import Delta
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import WireError
from thinwire.program import Kind
from thinwire.program.stages import Stage


def visible_mean(
    group: AxisGroup, start: torch.Tensor, change: torch.Tensor, out: torch.Tensor, lost: torch.Tensor
) -> Moves:
    """``out = mean over members of what bf16 shows of start - change``, bitwise equal on every member (PULSELoCo's
    gate, arXiv 2602.03839).

    1. Each member adds what it has not sent so far to its change, and rounds ``start`` and ``start - change`` to bf16.
    2. The :class:`~thinwire.codecs.delta.Delta` between the two is its message: nothing where the rounded value stays,
       and steps of bf16 where it moves. What the message does not say is kept for the next one.
    3. Every member sends its message to all others: ``(size - 1) * message`` bytes sent.
    4. Every member applies all messages to the rounded ``start``, its own included, in the order of the members.

    NaN and infinities are visible: they travel, and the mean is not finite.

    Args:
        group: The axis.
        start: Contiguous fp32, 1-D; equal on all members, and not written to until the moves have ended.
        change: Contiguous fp32 of the same size; used as scratch.
        out: Contiguous fp32 of the same size.
        lost: What this member has not sent so far, fp32 of the same size, which the caller keeps.
    """
    delta, device = Delta(), start.device
    limit = delta.max_wire_bytes(start.numel(), torch.bfloat16)
    stage = Stage.GATHER_ACROSS if group.nodes > 1 else Stage.GATHER_INSIDE

    def exchanged(mine: torch.Tensor) -> list[torch.Tensor]:
        """The messages of all members, by member. Deltas are made on the host, and travel from the group's device."""
        lengths = torch.full((group.size,), mine.numel(), dtype=torch.int64, device=device)
        group.hops[stage].gather(list(lengths.split(1)), Kind.ALL_GATHER)
        known = lengths.tolist()
        if not all(0 < length <= limit for length in known):
            raise WireError(f"islands announce messages of {known} bytes, and one has at most {limit}")
        messages = [allocate(length, torch.uint8, device) for length in known]
        messages[group.index].copy_(mine)
        group.hops[stage].gather(messages, Kind.ALL_GATHER)
        return [message.cpu() for message in messages]

    def body() -> None:
        old, new = start.bfloat16(), torch.sub(start, change.add_(lost)).bfloat16()
        before, total = old.cpu(), out.zero_()
        mine = delta.encode(before, new.cpu())
        lost.copy_(change.sub_(_moved(old, new)))
        for message in exchanged(mine):
            total.add_(_moved(old, delta.apply(before, message).to(device)))
        total.div_(group.size)

    # One move: nobody knows the lengths before, so the messages' memory has to be taken and given back on its stream.
    return Moves([Move(stage, body)])


def _moved(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How far values went down, in fp32. Equal infinities did not move."""
    return torch.where(old == new, 0.0, old.float() - new.float())
