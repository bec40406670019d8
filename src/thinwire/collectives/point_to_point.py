"""A tensor from one member of a subgroup to another, as pipeline stages pass activations on."""

from __future__ import annotations

import torch

from thinwire.codecs import Codec
from thinwire.collectives.group import Subgroup
from thinwire.collectives.messages import Messages
from thinwire.collectives.moves import Move, Moves
from thinwire.program import Kind
from thinwire.program.stages import Stage

__all__ = ["point_to_point"]


def point_to_point(
    subgroup: Subgroup,
    tensor: torch.Tensor,
    source: int,
    target: int,
    *,
    codec: Codec | None = None,
    seed: int | None = None,
) -> Moves:
    """``tensor`` of ``target`` becomes that of ``source``; other members need not call it.

    1. The source encodes.
    2. It sends one message to the target: its bytes, or those of the tensor; a codec of variable length sends the
       message's length first, 8 bytes more.
    3. The target decodes into ``tensor``. The source keeps its own values.

    Args:
        subgroup: of one stage; both members are in it.
        tensor: contiguous 1-D, of one size and dtype on both members; with a codec, a floating one.
        source: index of the member that sends.
        target: index of the member that receives, another one.
        codec: of the message; ``None`` sends values as they are.
        seed: for a codec that rounds at random.

    Returns:
        The moves.
    """
    me = subgroup.index
    peer = target if me == source else source
    if codec is None:
        return Moves([Move(subgroup.stage, lambda: _send(subgroup, tensor, source, target))])
    sizes = [tensor.numel() if i == peer else 0 for i in range(subgroup.size)]
    messages = Messages(codec, sizes, tensor.dtype, tensor.device)

    def encode() -> None:
        messages.encode(target, tensor, seed)

    def transfer() -> None:
        if codec.spec.is_variable_length:
            _send(subgroup, messages.lengths[peer : peer + 1], source, target)
            if me == target:
                messages.announce(source)
        _send(subgroup, messages.message(peer), source, target)

    def decode() -> None:
        messages.decode(source, tensor)

    moves = [Move(subgroup.stage, transfer)]
    if me == source:
        moves = [Move(Stage.ENCODE, encode), *moves]
    if me == target:
        moves = [*moves, Move(Stage.DECODE, decode)]
    return Moves(moves)


def _send(subgroup: Subgroup, tensor: torch.Tensor, source: int, target: int) -> None:
    """The source sends ``tensor``, the target fills its own."""
    nothing = tensor[:0]
    outgoing = [tensor if subgroup.index == source and i == target else nothing for i in range(subgroup.size)]
    incoming = [tensor if subgroup.index == target and i == source else nothing for i in range(subgroup.size)]
    subgroup.exchange(outgoing, incoming, Kind.SEND)
