"""Reductions in chunks: while one chunk crosses nodes, the next is exchanged inside the node, and another is encoded.

A collective's moves need each other, so a reduction of one large vector uses the network inside the node, the network
across nodes and the codec one after another. Cut into chunks, it uses all three at the same time. Each chunk is a
reduction of its own, of a part of every member's piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.codecs.seeds import fold_seed, slice_seed
from thinwire.collectives.all_reduce import Feedback, all_reduce, feedback_numels
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import Residual
from thinwire.collectives.moves import Chunks
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs, reduce_scatter, residual_numel
from thinwire.collectives.topology import AxisGroup
from thinwire.program import chunk_sizes

__all__ = ["Summing", "all_reduce_chunks", "reduce_scatter_chunks"]


@dataclass(frozen=True, slots=True)
class Summing:
    """How a reduction adds; see :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`.

    Attributes:
        scale: Factor on the sum.
        accumulate: Whether the sum is added to the output, instead of overwriting it.
        codecs: Codecs of the hops.
        seed: Seed for codecs that round at random.
    """

    scale: float = 1.0
    accumulate: bool = False
    codecs: HopCodecs = EXACT
    seed: int | None = None

    def of_chunk(self, number: int, chunks: int) -> dict[str, Any]:
        """Arguments of one chunk's collective."""
        seed = self.seed
        if seed is not None and chunks > 1:
            seed = slice_seed(fold_seed(seed), number)
        return {"scale": self.scale, "accumulate": self.accumulate, "codecs": self.codecs, "seed": seed}


def reduce_scatter_chunks(
    group: AxisGroup,
    whole: torch.Tensor,
    out: torch.Tensor,
    sizes: Sequence[int],
    chunks: int,
    summing: Summing,
    residual: Residual | None = None,
) -> Chunks:
    """A reduce-scatter in chunks; see :func:`~thinwire.collectives.reduce_scatter.reduce_scatter`.

    Args:
        group: The axis.
        whole: See ``reduce_scatter``. With several chunks, the parts of its pieces are copied.
        out: See ``reduce_scatter``.
        sizes: Number of elements of each member's piece.
        chunks: Number of chunks; fewer if the pieces are small.
        summing: How the reduction adds.
        residual: Error feedback of ``residual_numel(group, sizes)`` elements, which follow each other chunk by chunk.
    """
    cut = chunk_sizes(sizes, chunks)
    moves = []
    begins, lost_at = [0] * len(sizes), 0
    for number, parts in enumerate(cut):
        mine = begins[group.index]
        part_of_whole, fill = (whole, None) if len(cut) == 1 else _taken(whole, sizes, begins, parts)
        numel = residual_numel(group, parts)
        chunk = reduce_scatter(
            group,
            part_of_whole,
            out[mine : mine + parts[group.index]],
            sizes=list(parts),
            residual=_part(residual, lost_at, numel),
            **summing.of_chunk(number, len(cut)),
        )
        moves.append(chunk if fill is None else chunk.after(fill))
        begins = [begin + part for begin, part in zip(begins, parts, strict=True)]
        lost_at += numel
    return Chunks(moves)


def all_reduce_chunks(
    group: AxisGroup,
    vector: torch.Tensor,
    out: torch.Tensor,
    chunks: int,
    summing: Summing,
    feedback: Feedback | None = None,
) -> Chunks:
    """An all-reduce in chunks of its vector; see :func:`~thinwire.collectives.all_reduce.all_reduce`.

    Args:
        group: The axis.
        vector: See ``all_reduce``.
        out: See ``all_reduce``.
        chunks: Number of chunks; fewer if the vector is small.
        summing: How the reduction adds.
        feedback: Error feedback of ``feedback_numels(group, vector.numel())`` elements, which follow each other chunk
            by chunk.
    """
    cut = chunk_sizes([vector.numel() // group.size] * group.size, chunks)
    feedback = feedback or Feedback()
    moves = []
    begin = scatter_at = gather_at = 0
    for number, parts in enumerate(cut):
        end = begin + sum(parts)
        scattered, gathered = feedback_numels(group, end - begin)
        moves.append(
            all_reduce(
                group,
                vector[begin:end],
                out[begin:end],
                feedback=Feedback(
                    _part(feedback.scatter, scatter_at, scattered), _part(feedback.gather, gather_at, gathered)
                ),
                **summing.of_chunk(number, len(cut)),
            )
        )
        begin, scatter_at, gather_at = end, scatter_at + scattered, gather_at + gathered
    return Chunks(moves)


def _taken(
    whole: torch.Tensor, sizes: Sequence[int], begins: Sequence[int], parts: Sequence[int]
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Parts of a vector's pieces side by side: their memory, and the function that fills it."""
    vector = allocate(sum(parts), whole.dtype, whole.device)

    def fill_rows() -> None:
        rows = whole.view(len(sizes), -1)
        vector.view(len(sizes), -1).copy_(rows[:, begins[0] : begins[0] + parts[0]])

    def fill_parts() -> None:
        starts = itertools.accumulate(sizes, initial=0)
        to = 0
        for start, begin, part in zip(starts, begins, parts, strict=False):
            vector[to : to + part].copy_(whole[start + begin : start + begin + part])
            to += part

    return vector, fill_rows if len(set(sizes)) == 1 else fill_parts


def _part(residual: Residual | None, start: int, numel: int) -> Residual | None:
    return None if residual is None or not numel else Residual(residual.lost[start : start + numel], residual.gain)
