"""Reduce-scatter along an axis in two hops, added in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from thinwire.collectives.group import Subgroup
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Move, Moves, Stage
from thinwire.collectives.topology import AxisGroup

__all__ = ["reduce_scatter"]


def reduce_scatter(
    group: AxisGroup,
    whole: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    sizes: Sequence[int] | None = None,
) -> Moves:
    """``out (+)= scale * sum over members of their whole, at this rank's place``; always added in fp32.

    1. Inside the node, local rank ``l`` receives every neighbour's column ``l`` (all nodes' pieces) and adds them in
       fp32: ``(local - 1) / local`` of the vector sent.
    2. Across nodes, the sums travel in the dtype of ``whole`` and are added in fp32 again: ``(nodes - 1) / nodes`` of
       a column sent. So a byte crosses nodes once, however many ranks a node has.

    Args:
        group: the axis.
        whole: contiguous 1-D tensor in wire dtype (fp32, bf16 or fp16), pieces in local-major order.
        out: contiguous 1-D tensor of the size of this rank's piece: fp32, or the dtype of ``whole``, in which case
            the fp32 sum is rounded once. May be this rank's place in ``whole``.
        scale: factor on the sum; ``1 / group.size`` for a mean.
        accumulate: add to ``out``, which is fp32, instead of overwriting it.
        sizes: elements of every member's piece; equal by default.

    Returns:
        The moves; at least one.
    """
    sizes = sizes or [whole.numel() // group.size] * group.size
    nodes, mine = group.nodes, group.local_index * group.nodes
    columns = [sum(sizes[i : i + nodes]) for i in range(0, len(sizes), nodes)]
    inside, across = group.at(Stage.SCATTER_INSIDE), group.at(Stage.SCATTER_ACROSS)
    if nodes == 1:
        return Moves([_move(inside, whole, columns, out, scale, accumulate=accumulate)])
    if group.local == 1:
        return Moves([_move(across, whole, sizes, out, scale, accumulate=accumulate)])
    column = allocate(columns[group.local_index], whole.dtype, whole.device)
    return Moves(
        [
            _move(inside, whole, columns, column, 1.0, accumulate=False),
            _move(across, column, sizes[mine : mine + nodes], out, scale, accumulate=accumulate),
        ]
    )


def _move(
    subgroup: Subgroup, whole: torch.Tensor, sizes: Sequence[int], out: torch.Tensor, scale: float, *, accumulate: bool
) -> Move:
    def body() -> None:
        if subgroup.size == 1:
            _merge([whole], out, scale, accumulate=accumulate)
        else:
            _hop(subgroup, whole, sizes, out, scale, accumulate=accumulate)

    return Move(subgroup.stage, body, held=(whole, out))


def _hop(
    subgroup: Subgroup, whole: torch.Tensor, sizes: Sequence[int], out: torch.Tensor, scale: float, *, accumulate: bool
) -> None:
    """One exchange and its fp32 addition."""
    if subgroup.native and len(set(sizes)) == 1 and whole.dtype == torch.float32:
        # NCCL adds in the dtype it sends: right for fp32 only.
        part = allocate(out.numel(), whole.dtype, whole.device)
        subgroup.sum_scatter(part, whole)
        _merge([part], out, scale, accumulate=accumulate)
        return
    outgoing = list(whole.split(list(sizes)))
    own = outgoing[subgroup.index]
    received = allocate(own.numel() * subgroup.size, whole.dtype, whole.device)
    incoming = list(received.split(own.numel())) if own.numel() else [own] * subgroup.size
    subgroup.exchange(outgoing, incoming)
    others = [piece for i, piece in enumerate(incoming) if i != subgroup.index]
    # Own piece first: `out` may lie on top of it.
    _merge([own, *others], out, scale, accumulate=accumulate)


def _merge(pieces: Sequence[torch.Tensor], out: torch.Tensor, scale: float, *, accumulate: bool) -> None:
    """``out (+)= scale * sum(pieces)``, added in fp32 and rounded to the dtype of ``out`` once."""
    if out.dtype == torch.float32:
        for start in range(0, out.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            _add_up([piece[part] for piece in pieces], out[part], scale, accumulate=accumulate)
        return
    assert not accumulate
    if len(pieces) == 2 and _is_power_of_two(scale):
        # torch adds two bf16 tensors in fp32 and rounds once; scaling by a power of two does not round.
        torch.add(pieces[0], pieces[1], out=out)
        if scale != 1.0:
            out.mul_(scale)
        return
    total = allocate(min(CHUNK, out.numel()), torch.float32, out.device)
    for start in range(0, out.numel(), CHUNK):
        part = slice(start, start + CHUNK)
        target = out[part]
        _add_up([piece[part] for piece in pieces], total[: target.numel()], scale, accumulate=False)
        target.copy_(total[: target.numel()])


CHUNK = 1 << 18
"""Elements added at a time: 1 MiB of fp32 stays in a core's cache from the first piece to the last."""


def _add_up(pieces: Sequence[torch.Tensor], total: torch.Tensor, scale: float, *, accumulate: bool) -> None:
    if accumulate:
        for piece in pieces:
            total.add_(piece, alpha=scale)
        return
    total.copy_(pieces[0])
    for piece in pieces[1:]:
        total.add_(piece)
    if scale != 1.0:
        total.mul_(scale)


def _is_power_of_two(value: float) -> bool:
    return value > 0 and math.frexp(value)[0] == 0.5
