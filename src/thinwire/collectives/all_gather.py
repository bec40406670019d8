"""All-gather along an axis, each byte entering a node once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from thinwire.collectives.moves import Move, Moves, Stage
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Kind

__all__ = ["all_gather"]


def all_gather(
    group: AxisGroup, whole: torch.Tensor, sizes: Sequence[int] | None = None, kind: Kind = Kind.ALL_GATHER
) -> Moves:
    """Gather every member's piece into ``whole``, in place.

    1. Across nodes, each rank gathers the pieces of its peers: ``(nodes - 1) * own`` bytes sent.
    2. Inside the node, each rank gathers the columns of its neighbours: ``(local - 1) * column`` bytes sent.

    Args:
        group: the axis.
        whole: contiguous 1-D tensor, any dtype; when the first move begins, this rank's piece is at its place
            (local-major order).
        sizes: elements of every member's piece; equal by default.
        kind: ``ALL_GATHER``, or ``BROADCAST`` when each piece is the owner's to give (unequal pieces).

    Returns:
        The moves; none where the axis has one member.
    """
    if group.size == 1:
        return Moves()
    sizes = sizes or [whole.numel() // group.size] * group.size
    column = group.columns(list(whole.split(list(sizes))))[group.local_index]
    starts = [sum(sizes[: i * group.nodes]) for i in range(group.local + 1)]
    columns = [whole[a:b] for a, b in pairwise(starts)]

    def across() -> None:
        group.at(Stage.GATHER_ACROSS).gather(column, kind)

    def inside() -> None:
        group.at(Stage.GATHER_INSIDE).gather(columns, kind)

    moves = [
        (group.nodes, Move(Stage.GATHER_ACROSS, across, (whole,))),
        (group.local, Move(Stage.GATHER_INSIDE, inside, (whole,))),
    ]
    return Moves(move for ranks, move in moves if ranks > 1)
