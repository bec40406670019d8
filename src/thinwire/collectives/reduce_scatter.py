"""Reduce-scatter along an axis in two hops, added in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec, Sum, get
from thinwire.collectives.group import Subgroup
from thinwire.collectives.links.streams import streams_of
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import Messages, Residual
from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Span
from thinwire.program.stages import Stage


@dataclass(frozen=True, slots=True)
class HopCodecs:
    """Codecs of a reduction's two hops; ``None`` sends values unencoded."""

    inside: Codec | None = None
    across: Codec | None = None

    @property
    def recode(self) -> bool:
        """Whether both hops encode with fixed length, so that sums can be encoded as messages are decoded."""
        return not any(codec is None or codec.spec.is_variable_length for codec in (self.inside, self.across))


EXACT = HopCodecs()


def reduce_scatter(
    group: AxisGroup,
    whole: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float = 1.0,
    accumulate: bool = False,
    sizes: Sequence[int] | None = None,
    codecs: HopCodecs = EXACT,
    residual: Residual | None = None,
    seed: int | None = None,
) -> Moves:
    """``out (+)= scale * sum over members of their whole, at this rank's place``, always added in fp32.

    1. Inside the node, local rank ``l`` receives every neighbour's column ``l`` (all nodes' pieces) and adds them in
       fp32: ``(local - 1) / local`` of the vector sent.
    2. Across nodes, the sums travel in the dtype of ``whole`` and are added in fp32 again: ``(nodes - 1) / nodes`` of
       a column sent. So a byte crosses nodes once, however many ranks a node has.

    With a codec for a hop (qgZ, arXiv 2306.10209 section 3.3), a message of the first hop holds a column, and one of
    the second hop holds a piece. Received messages are decoded and added. A rank's own column and piece are not
    encoded. The sums between the hops are fp32 if the second hop has a lossy codec. If both hops have codecs of fixed
    length, messages of the first hop hold pieces too: those of one piece are decoded, added and encoded for the second
    hop in one pass, and the sum is never written to memory, unless error feedback needs it.

    Args:
        group: The axis.
        whole: Contiguous 1-D tensor in the wire dtype (fp32, bf16 or fp16), pieces in local-major order.
        out: Contiguous 1-D tensor of the size of this rank's piece, in fp32 or in the dtype of ``whole``, to which the
            fp32 sum is rounded once. May be this rank's place in ``whole``.
        scale: Factor on the sum; ``1 / group.size`` for a mean.
        accumulate: Add to ``out``, which must be fp32, instead of overwriting it.
        sizes: Number of elements of each member's piece; equal by default.
        codecs: Codecs of the two hops.
        residual: Error feedback of the elements of :func:`residual_span`: the loss of earlier messages of the last hop,
            which is added to the next ones.
        seed: Seed for codecs that round at random. It should differ from step to step and from rank to rank.

    Returns:
        The moves, at least one.
    """
    sizes = sizes or [whole.numel() // group.size] * group.size
    nodes, mine = group.nodes, group.local_index * group.nodes
    columns = [sum(sizes[i : i + nodes]) for i in range(0, len(sizes), nodes)]
    row = sizes[mine : mine + nodes]
    inside, across = group.hops[Stage.SCATTER_INSIDE], group.hops[Stage.SCATTER_ACROSS]
    last = _Merge(out, scale, accumulate=accumulate)
    if nodes == 1:
        return _hop(inside, whole, columns, last, codecs.inside, residual, seed)
    if group.local == 1:
        return _hop(across, whole, sizes, last, codecs.across, residual, seed)
    if codecs.recode:
        return _recoding_hops(group, whole, sizes, last, codecs, residual, seed)
    rounds = codecs.across is not None and not codecs.across.spec.is_lossless
    column = allocate(columns[group.local_index], torch.float32 if rounds else whole.dtype, whole.device)
    return Moves(
        [
            *_hop(inside, whole, columns, _Merge(column), codecs.inside, None, seed, (Stage.ENCODE, Stage.RECODE)),
            *_hop(across, column, row, last, codecs.across, residual, seed, (Stage.RECODE, Stage.DECODE)),
        ]
    )


def residual_span(group: AxisGroup, sizes: Sequence[int]) -> Span:
    """The elements of the vector in the error feedback of :func:`reduce_scatter`: those that its last hop sends."""
    if group.nodes == 1 or group.local == 1:
        return 0, sum(sizes)
    mine = group.local_index * group.nodes
    begin = sum(sizes[:mine])
    return begin, begin + sum(sizes[mine : mine + group.nodes])


@dataclass(frozen=True, slots=True)
class _Merge:
    """Destination of a hop's sum: ``out (+)= scale * sum``."""

    out: torch.Tensor
    scale: float = 1.0
    accumulate: bool = False


def _hop(
    subgroup: Subgroup,
    whole: torch.Tensor,
    sizes: Sequence[int],
    merge: _Merge,
    codec: Codec | None,
    residual: Residual | None,
    seed: int | None,
    stages: tuple[Stage, Stage] = (Stage.ENCODE, Stage.DECODE),
) -> Moves:
    if subgroup.size > 1 and codec is not None:
        return _encoded_hop(subgroup, whole, sizes, merge, codec, residual, seed, stages)

    def body() -> None:
        if subgroup.size == 1:
            _add_piece(whole, merge)
        else:
            _exact_hop(subgroup, whole, sizes, merge)

    return Moves([Move(subgroup.stage, body)])


def _exact_hop(subgroup: Subgroup, whole: torch.Tensor, sizes: Sequence[int], merge: _Merge) -> None:
    """One exchange and its fp32 addition."""
    out = merge.out
    if subgroup.native and len(set(sizes)) == 1 and whole.dtype == torch.float32:
        # NCCL adds in the dtype it sends: right for fp32 only.
        part = allocate(out.numel(), whole.dtype, whole.device)
        subgroup.sum_scatter(part, whole)
        _add_piece(part, merge)
        return
    outgoing = list(whole.split(list(sizes)))
    own = outgoing[subgroup.index]
    if streams_of(whole.device) is not None:
        rows = allocate(own.numel() * subgroup.size, whole.dtype, whole.device).view(subgroup.size, own.numel())
        subgroup.exchange(outgoing, list(rows))
        rows[subgroup.index].copy_(own)
        _add_rows(rows, merge)
        return
    others = allocate(own.numel() * (subgroup.size - 1), whole.dtype, whole.device).view(subgroup.size - 1, own.numel())
    subgroup.exchange(outgoing, [*others[: subgroup.index], own, *others[subgroup.index :]])
    _add_to_own(own, others, merge)


def _encoded_hop(
    subgroup: Subgroup,
    whole: torch.Tensor,
    sizes: Sequence[int],
    merge: _Merge,
    codec: Codec,
    residual: Residual | None,
    seed: int | None,
    stages: tuple[Stage, Stage],
) -> Moves:
    """Encode, exchange, decode and add, in three queues: the transfer of one collective hides the codec of another."""
    device = whole.device
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    own = whole[slice(*bounds.pop(subgroup.index))]
    encoded_dtype = whole.dtype if residual is None else torch.float32
    outgoing = Messages(codec, [stop - start for start, stop in bounds], encoded_dtype, device)
    incoming = Messages(codec, [own.numel()] * len(bounds), encoded_dtype, device)

    before, after = stages
    return Moves(
        [
            Move(before, lambda: outgoing.encode_slices(whole, bounds, seed, residual)),
            Move(subgroup.stage, lambda: outgoing.exchange(subgroup, incoming)),
            Move(after, lambda: _add_messages(incoming, merge, own)),
        ]
    )


def _recoding_hops(
    group: AxisGroup,
    whole: torch.Tensor,
    sizes: Sequence[int],
    merge: _Merge,
    codecs: HopCodecs,
    residual: Residual | None,
    seed: int | None,
) -> Moves:
    """Two hops with codecs. In between, the messages of each piece become one message of their sum."""
    first, second, device = codecs.inside, codecs.across, whole.device
    assert first is not None
    assert second is not None
    inside, across = group.hops[Stage.SCATTER_INSIDE], group.hops[Stage.SCATTER_ACROSS]
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    mine = group.local_index * group.nodes
    column = [bounds.pop(mine) for _ in range(group.nodes)]  # what remains goes to the neighbours
    row = [stop - start for start, stop in column]
    places = [(start - column[0][0], stop - column[0][0]) for start, stop in column]
    peers = [node for node in range(group.nodes) if node != across.index]
    neighbours = group.local - 1
    outgoing = Messages(first, [stop - start for start, stop in bounds], whole.dtype, device)
    incoming = Messages(first, row * neighbours, whole.dtype, device)
    sums = Messages(second, [row[node] for node in peers], torch.float32, device)
    received = Messages(second, [row[across.index]] * len(peers), torch.float32, device)
    own = allocate(row[across.index], torch.float32, device)

    def total_of(node: int) -> Sum:
        return incoming.sum_of(node, neighbours, whole[slice(*column[node])])

    def recode() -> None:
        first.decode_sum_into(total_of(across.index), own)
        if residual is None:
            rooms = [sums.room(index) for index in range(len(peers))]
            first.encode_sums([total_of(node) for node in peers], second, rooms, seed=seed)
            return
        summed = allocate(sum(row), torch.float32, device)
        for node in peers:
            first.decode_sum_into(total_of(node), summed[slice(*places[node])])
        sums.encode_slices(summed, [places[node] for node in peers], seed, residual)

    return Moves(
        [
            Move(Stage.ENCODE, lambda: outgoing.encode_slices(whole, bounds, seed)),
            Move(inside.stage, lambda: outgoing.exchange(inside, incoming)),
            Move(Stage.RECODE, recode),
            Move(across.stage, lambda: sums.exchange(across, received)),
            Move(Stage.DECODE, lambda: _add_messages(received, merge, own)),
        ]
    )


def _add_messages(messages: Messages, merge: _Merge, own: torch.Tensor) -> None:
    """``out (+)= scale * (own + messages)``."""
    if not merge.accumulate:
        messages.decode_sum(merge.out, merge.scale, own)
        return
    total = allocate(own.numel(), torch.float32, own.device)
    messages.decode_sum(total, 1.0, own)
    _add_piece(total, merge)


def _add_rows(rows: torch.Tensor, merge: _Merge) -> None:
    """``out (+)= scale * sum of the rows``, added in fp32, in at most three launches however many rows there are."""
    out, scale = merge.out, merge.scale
    if out.dtype == torch.float32 and not merge.accumulate:
        torch.sum(rows, 0, dtype=torch.float32, out=out)
        if scale != 1.0:
            out.mul_(scale)
        return
    total = torch.sum(rows, 0, dtype=torch.float32, out=allocate(out.numel(), torch.float32, out.device))
    _add_piece(total, merge)


def _add_piece(piece: torch.Tensor, merge: _Merge) -> None:
    """``out (+)= scale * piece``, computed in fp32 and rounded to the dtype of ``out`` once."""
    out, scale = merge.out, merge.scale
    if merge.accumulate:
        out.add_(piece, alpha=scale)
    elif scale == 1.0:
        out.copy_(piece)
    elif out.dtype == torch.float32:
        out.copy_(piece).mul_(scale)
    else:
        torch.mul(piece, scale, out=out)


def _add_to_own(own: torch.Tensor, others: torch.Tensor, merge: _Merge) -> None:
    """``out (+)= scale * (own + others)`` on the CPU, added in fp32 and rounded to the dtype of ``out`` once.

    Args:
        own: This rank's own piece, which may lie below ``out``.
        others: Pieces of the other members, one in each row.
        merge: The destination.
    """
    out, scale = merge.out, merge.scale
    if merge.accumulate:
        # In the order of _add_messages, so that lossless codecs change no bit.
        added = allocate(min(CHUNK, out.numel()), torch.float32, own.device)
        for start in range(0, out.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            of_part = added[: out[part].numel()]
            _add_to_own(own[part], others[:, part], _Merge(of_part))
            out[part].add_(of_part, alpha=scale)
    elif len(others) == 1 and scale == 1.0 and own.dtype == out.dtype:
        torch.add(own, others[0], out=out)  # of bf16 or fp16: in fp32, rounded once
    else:
        # Values are messages of the codec `none`, whose sums take one pass over memory.
        total = Sum(others.view(torch.uint8), own.numel(), own, scale, own.dtype)
        get("none").decode_sum_into(total, out)


CHUNK = 1 << 18
"""Elements that a CPU adds at a time: 1 MiB of fp32 stays in a core's cache from the first piece to the last."""
