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

__all__ = ["visible_mean"]


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

    Returns:
        The moves.
    """
    delta, device = Delta(), start.device
    limit = delta.max_wire_bytes(start.numel(), torch.bfloat16)
    # Lengths and messages travel from the device of the group; deltas are made on the host.
    lengths = torch.zeros(group.size, dtype=torch.int64, device=device)
    messages: list[torch.Tensor] = []
    stage = Stage.GATHER_ACROSS if group.nodes > 1 else Stage.GATHER_INSIDE

    def encode() -> None:
        change.add_(lost)
        old, new = start.bfloat16(), torch.sub(start, change).bfloat16()
        message = delta.encode(old.cpu(), new.cpu())
        lost.copy_(change.sub_(_moved(old, new)))
        messages.append(message.to(device))
        lengths[group.index] = message.numel()

    def transfer() -> None:
        subgroup = group.at(stage)
        subgroup.gather(list(lengths.split(1)), Kind.ALL_GATHER)
        known = lengths.tolist()
        if not all(0 < length <= limit for length in known):
            raise WireError(f"an island announces messages of {known} bytes; they have at most {limit} here")
        own = messages.pop()
        messages.extend(allocate(length, torch.uint8, device) for length in known)
        messages[group.index] = own
        subgroup.gather(messages, Kind.ALL_GATHER)

    def add() -> None:
        old = start.bfloat16()
        before, out_of_all = old.cpu(), out.zero_()
        for message in messages:
            out_of_all.add_(_moved(old, delta.apply(before, message.cpu()).to(device)))
        out_of_all.div_(group.size)
        messages.clear()

    return Moves([Move(Stage.ENCODE_GATHER, encode), Move(stage, transfer), Move(Stage.DECODE_GATHER, add)])


def _moved(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """How far values went down, in fp32. Equal infinities did not move."""
    return torch.where(old == new, 0.0, old.float() - new.float())
