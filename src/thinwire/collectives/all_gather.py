"""All-gather along an axis, each byte entering a node once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from thinwire.collectives.topology import AxisGroup
from thinwire.program import Kind

__all__ = ["all_gather"]


def all_gather(
    group: AxisGroup, whole: torch.Tensor, sizes: Sequence[int] | None = None, kind: Kind = Kind.ALL_GATHER
) -> None:
    """Gather every member's piece into ``whole``, in place.

    1. Across nodes, each rank gathers the pieces of its peers: ``(nodes - 1) * own`` bytes sent.
    2. Inside the node, each rank gathers the columns of its neighbours: ``(local - 1) * column`` bytes sent.

    Args:
        group: the axis.
        whole: contiguous 1-D tensor, any dtype; this rank's piece is already at its place (local-major order).
        sizes: elements of every member's piece; equal by default.
        kind: ``ALL_GATHER``, or ``BROADCAST`` when each piece is the owner's to give (unequal pieces).
    """
    if group.size == 1:
        return
    sizes = sizes or [whole.numel() // group.size] * group.size
    columns = group.columns(list(whole.split(list(sizes))))
    local = group.inside.index
    group.across.gather(columns[local], kind)
    starts = [sum(sizes[: i * group.across.size]) for i in range(group.inside.size + 1)]
    group.inside.gather([whole[a:b] for a, b in pairwise(starts)], kind)
