"""Sends a tensor from one member of a subgroup to another, as pipeline stages send activations."""

from __future__ import annotations

import torch

from thinwire.codecs import Codec
from thinwire.collectives.group import Subgroup
from thinwire.collectives.messages import Messages
from thinwire.collectives.moves import Move, Moves
from thinwire.program.stages import Stage


def point_to_point(
    subgroup: Subgroup,
    tensor: torch.Tensor,
    source: int,
    target: int,
    *,
    codec: Codec | None = None,
    seed: int | None = None,
) -> Moves:
    """``tensor`` of ``target`` becomes that of ``source``. Other members need not call this.

    1. The source encodes.
    2. The source sends the message, or without a codec the tensor, to the target. A codec of variable length first
       sends the length of the message, another 8 bytes.
    3. The target decodes into ``tensor``. The source keeps its values.

    Args:
        subgroup: Subgroup of one stage that contains both members.
        tensor: Contiguous 1-D tensor of the same size and dtype on both members; with a codec, a floating-point one.
        source: Index of the sending member.
        target: Index of the receiving member, which must be another one.
        codec: Codec of the message; ``None`` sends values unencoded.
        seed: Seed for a codec that rounds at random.
    """
    if codec is None:
        return Moves([Move(subgroup.stage, lambda: subgroup.send(tensor, source, target))])
    messages = Messages(codec, [tensor.numel()], tensor.dtype, tensor.device)
    moves = [Move(subgroup.stage, lambda: messages.send(subgroup, source, target))]
    if subgroup.index == source:
        moves = [Move(Stage.ENCODE, lambda: messages.encode(0, tensor, seed)), *moves]
    if subgroup.index == target:
        moves = [*moves, Move(Stage.DECODE, lambda: messages.decode(0, tensor))]
    return Moves(moves)
