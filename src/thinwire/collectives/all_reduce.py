"""All-reduce along an axis: reduce-scatter, then all-gather."""

from __future__ import annotations

import torch

from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.moves import Moves
from thinwire.collectives.reduce_scatter import reduce_scatter
from thinwire.collectives.topology import AxisGroup

__all__ = ["all_reduce"]


def all_reduce(
    group: AxisGroup, vector: torch.Tensor, out: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
) -> Moves:
    """``out (+)= scale * sum over members of vector``, equal to the bit on every member.

    1. Reduce-scatter in two hops (see :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`), added in fp32.
    2. The scaled sums, rounded to the wire dtype once, are gathered in two hops.

    Args:
        group: the axis.
        vector: contiguous 1-D tensor in wire dtype, ``numel`` a multiple of ``group.size``; used as scratch.
        out: contiguous 1-D fp32 tensor of at most that size (the rest of ``vector`` is padding).
        scale: factor on the sum; ``1 / group.size`` for a mean.
        accumulate: add to ``out`` instead of overwriting it.

    Returns:
        The moves.
    """
    piece = vector.numel() // group.size
    own = slice(group.index * piece, (group.index + 1) * piece)

    def deliver() -> None:
        if accumulate:
            out.add_(vector[: out.numel()])
        else:
            out.copy_(vector[: out.numel()])

    scattered = reduce_scatter(group, vector, vector[own], scale=scale)
    return Moves([*scattered, *all_gather(group, vector)]).then(deliver)
