"""All-reduce along an axis: reduce-scatter, then all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Moves
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs, reduce_scatter
from thinwire.collectives.topology import AxisGroup

__all__ = ["Feedback", "all_reduce"]


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a reduction's messages lost and the next ones make up for; fp32.

    Attributes:
        scatter: of the reduce-scatter's last hop
            (:func:`~thinwire.collectives.reduce_scatter.residual_numel` elements).
        gather: of this rank's piece of the sums.
    """

    scatter: torch.Tensor | None = None
    gather: torch.Tensor | None = None


def all_reduce(
    group: AxisGroup,
    vector: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    codecs: HopCodecs = EXACT,
    feedback: Feedback | None = None,
    seed: int | None = None,
) -> Moves:
    """``out (+)= scale * sum over members of vector``, equal to the bit on every member.

    1. Reduce-scatter in two hops (see :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`), added in fp32.
    2. The scaled sums, rounded to the wire dtype once, are gathered in two hops; with codecs, they are encoded from
       fp32 by that of the farther hop.

    Args:
        group: the axis.
        vector: contiguous 1-D tensor in wire dtype, ``numel`` a multiple of ``group.size``; used as scratch.
        out: contiguous 1-D fp32 tensor of at most that size (the rest of ``vector`` is padding).
        scale: factor on the sum; ``1 / group.size`` for a mean.
        accumulate: add to ``out`` instead of overwriting it.
        codecs: of the hops.
        feedback: what earlier messages lost, kept by the caller from step to step.
        seed: for codecs that round at random.

    Returns:
        The moves.
    """
    piece = vector.numel() // group.size
    own = slice(group.index * piece, (group.index + 1) * piece)
    codec = codecs.across if group.nodes > 1 else codecs.inside
    sums = vector if codec is None else allocate(vector.numel(), torch.float32, vector.device)

    def deliver() -> None:
        if accumulate:
            out.add_(sums[: out.numel()])
        else:
            out.copy_(sums[: out.numel()])

    feedback = feedback or Feedback()
    scattered = reduce_scatter(
        group, vector, sums[own], scale=scale, codecs=codecs, residual=feedback.scatter, seed=seed
    )
    gathered = all_gather(group, sums, codec=codec, residual=feedback.gather, seed=seed)
    return Moves([*scattered, *gathered]).then(deliver)
