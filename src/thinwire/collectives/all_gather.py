"""All-gather along an axis, each byte entering a node once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from thinwire.codecs import Codec
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import Messages, Residual
from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Kind
from thinwire.program.stages import Stage


def all_gather(
    group: AxisGroup,
    whole: torch.Tensor,
    sizes: Sequence[int] | None = None,
    kind: Kind = Kind.ALL_GATHER,
    *,
    codec: Codec | None = None,
    residual: Residual | None = None,
    update: torch.Tensor | None = None,
    seed: int | None = None,
) -> Moves:
    """Gather every member's piece into ``whole``, in place.

    1. Across nodes, each rank gathers the pieces of its peers: ``(nodes - 1) * own`` bytes sent.
    2. Inside the node, each rank gathers the columns of its neighbours: ``(local - 1) * column`` bytes sent.

    With a codec (qwZ, arXiv 2306.10209 section 3.1), each piece is encoded once, and its message takes both hops
    unchanged. Every member decodes every message, including its own, so that all end with the same values.

    Args:
        group: The axis.
        whole: Contiguous 1-D tensor of any dtype; with a codec, a floating-point one. When the first move begins, this
            rank's piece must be at its place, in local-major order.
        sizes: Number of elements of each member's piece; equal by default.
        kind: ``ALL_GATHER``, or ``BROADCAST`` for unequal pieces, each sent by its owner.
        codec: Codec of the pieces; ``None`` sends them unencoded.
        residual: Error feedback of the size of this rank's piece; see
            :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`.
        update: Contiguous fp32 tensor of the size of this rank's piece, with the new values of the piece. All members
            hold the same ``whole``. Only the difference is encoded, and every member adds it to the piece. Losses of
            the codec and of rounding to the dtype of ``whole`` become part of the next difference.
        seed: Seed for a codec that rounds at random. It should differ from step to step and from rank to rank.

    Returns:
        The moves; none if the axis has one member.
    """
    if group.size == 1:
        return Moves()
    sizes = sizes or [whole.numel() // group.size] * group.size
    if codec is None:
        starts = [0, *itertools.accumulate(sizes)]
        row = [whole[starts[i] : starts[i + 1]] for i in group.columns[group.local_index]]
        wholes = [whole[starts[column.start] : starts[column.stop]] for column in group.columns]
        return gather_hops(
            group,
            lambda: group.hops[Stage.GATHER_ACROSS].gather(row, kind),
            lambda: group.hops[Stage.GATHER_INSIDE].gather(wholes, kind),
        )
    own = whole.split(list(sizes))[group.index]
    in_fp32 = residual is not None or update is not None
    messages = Messages(codec, sizes, torch.float32 if in_fp32 else whole.dtype, whole.device)
    peers = [range(i, i + 1) for i in group.columns[group.local_index]]

    def encode() -> None:
        piece = own
        if update is not None:
            piece = torch.sub(update, own, out=allocate(own.numel(), torch.float32, whole.device))
        messages.encode(group.index, piece, seed, residual)

    hops = gather_hops(
        group,
        lambda: messages.gather(group.hops[Stage.GATHER_ACROSS], peers, kind),
        lambda: messages.gather(group.hops[Stage.GATHER_INSIDE], group.columns, kind),
    )
    return hops.between(encode, lambda: messages.decode_side_by_side(whole, add=update is not None))


def gather_hops(group: AxisGroup, across: Callable[[], None], inside: Callable[[], None]) -> Moves:
    """The moves of an all-gather across nodes and inside the node, without hops over a single rank."""
    moves = [
        (group.nodes, Move(Stage.GATHER_ACROSS, across)),
        (group.local, Move(Stage.GATHER_INSIDE, inside)),
    ]
    return Moves(move for ranks, move in moves if ranks > 1)


def gather_rows(group: AxisGroup, row: torch.Tensor) -> torch.Tensor:
    """All-gather a row of each rank.

    Args:
        group: The ranks.
        row: This rank's row, ``[k]``, on the host or on the group's device. All rows have one size and dtype.

    Returns:
        The rows, ``[ranks, k]``, in the order of the group.
    """
    if group.size == 1:
        return row.reshape(1, -1)
    table = allocate(group.size * row.numel(), row.dtype, row.device)
    rows = table.view(group.size, -1)
    rows[group.index].copy_(row)
    all_gather(group, table).perform()
    return rows
