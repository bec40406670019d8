"""All-gather of several vectors along one axis, in one message for each hop; also of vectors that are kept encoded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather, gather_hops
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import announced, codec_of, encode_shorter
from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Kind, Stage, padded
from thinwire.program.shares import ALIGNMENT_BYTES


@dataclass(frozen=True)
class Part:
    """One of the vectors of a joint gather. Parts without a seed can be made once, and so are the views of their bytes.

    Attributes:
        whole: The vector, contiguous, 1-D, of any dtype; with a codec, a floating-point one. Its length is a multiple
            of the members of the axis.
        own: This rank's piece, contiguous, 1-D, in the dtype of ``whole``.
        seed: Seed for a codec that rounds at random.
    """

    whole: torch.Tensor
    own: torch.Tensor
    seed: int | None = None

    @cached_property
    def own_bytes(self) -> torch.Tensor:
        """This rank's piece, uint8."""
        return self.own.view(torch.uint8)

    @cached_property
    def rows_of_bytes(self) -> torch.Tensor:
        """The vector with a row for each member, uint8."""
        return self.whole.view(torch.uint8).view(-1, self.own.nbytes)


@dataclass(frozen=True)
class StoredPart:
    """One of the vectors of a gather of what members keep encoded.

    Attributes:
        whole: The vector, contiguous, 1-D, floating-point.
        messages: The messages of this rank's pieces of it, which all have the same length, uint8, with a row for each;
            may lie on the host.
        keep: Where a copy of some of the messages goes, uint8, with a row for each.
        first: Number of the first of them among the messages of all members.
    """

    whole: torch.Tensor
    messages: torch.Tensor
    keep: torch.Tensor | None = None
    first: int = 0


def joint_gather(group: AxisGroup, parts: Sequence[Part], *, codec: Codec | None = None) -> Moves:
    """Gather every member's pieces of several vectors.

    What a member sends is one message with its pieces one after the other, which takes the hops of
    :func:`~thinwire.collectives.all_gather.all_gather`. Each piece is encoded by itself, so the values are those of as
    many single gathers.

    Args:
        group: The axis, of two or more members.
        parts: The vectors, the same on every member.
        codec: Codec of the pieces; ``None`` sends them unencoded.
    """
    if codec is None:
        return _exact(group, parts)
    if codec.spec.is_variable_length:
        return _of_variable_length(group, parts, codec)
    return _of_fixed_length(group, parts, codec)


def stored_gather(group: AxisGroup, parts: Sequence[StoredPart], *, codec: Codec) -> Moves:
    """Gather the messages of several vectors that members keep, as they are, and decode them.

    1. Each rank puts its messages, one after the other, into its row of a table; a single member only if they come
       from the host.
    2. The rows take the hops of :func:`~thinwire.collectives.all_gather.all_gather`.
    3. Every member decodes every message, including its own.

    Args:
        group: The axis.
        parts: The vectors, the same on every member.
        codec: Codec of the messages; of fixed length.

    Returns:
        The moves; the last one decodes.
    """
    device = parts[0].whole.device
    in_place = group.size == 1 and all(part.messages.device == device for part in parts)
    sizes = [0 if in_place else part.messages.numel() for part in parts]
    table, spans = _table(group, sizes, device)
    of_parts = [
        part.messages[None] if in_place else table[:, span].unflatten(1, part.messages.shape)
        for part, span in zip(parts, spans, strict=True)
    ]

    def place_own() -> None:
        for part, messages in zip(parts, of_parts, strict=True):
            messages[group.index].copy_(part.messages, non_blocking=True)

    def decode() -> None:
        for part, messages in zip(parts, of_parts, strict=True):
            members, each, _ = messages.shape
            values = part.whole.view(members, each, -1)
            # With one message a member, those of all members lie at equal distances.
            for wires, out in [(messages[:, 0], values[:, 0])] if each == 1 else zip(messages, values, strict=True):
                codec.decode_slices(wires, out)
            if part.keep is not None:
                kept = range(part.first, part.first + len(part.keep))
                part.keep.copy_(messages[kept.start // each : kept.stop // each].flatten(0, 1))

    arrive = Moves() if in_place else all_gather(group, table.view(-1)).after(place_own)
    return Moves([*arrive, Move(Stage.DECODE_GATHER, decode)])


def _exact(group: AxisGroup, parts: Sequence[Part]) -> Moves:
    """Bytes are gathered, so that parts may differ in dtype. All are packed in one call, and unpacked in another."""
    sizes = [part.own.nbytes for part in parts]
    table, _ = _table(group, sizes, parts[0].whole.device)

    def pack() -> None:
        torch.cat([part.own_bytes for part in parts], out=table[group.index])

    def unpack() -> None:
        torch._foreach_copy_([part.rows_of_bytes for part in parts], list(table.split(sizes, 1)))

    return all_gather(group, table.view(-1)).after(pack).then(unpack)


def _of_fixed_length(group: AxisGroup, parts: Sequence[Part], codec: Codec) -> Moves:
    table, spans = _table(group, [_slot(codec, part) for part in parts], parts[0].whole.device)

    def encode() -> None:
        for part, span in zip(parts, spans, strict=True):
            codec.encode(part.own, seed=part.seed, out=table[group.index, span])

    def decode() -> None:
        for part, span in zip(parts, spans, strict=True):
            codec.decode_slices(table[:, span], part.whole.view(group.size, -1), encoded=part.own.dtype)

    return all_gather(group, table.view(-1)).between(encode, decode)


def _of_variable_length(group: AxisGroup, parts: Sequence[Part], codec: Codec) -> Moves:
    """The lengths of all pieces are exchanged first. Pieces follow each other at aligned places, without gaps."""
    device, mine, columns = parts[0].whole.device, group.index, group.columns
    pieces = [(part.own.numel(), part.own.dtype) for part in parts]
    table, _ = _table(group, [_slot(codec, part) for part in parts], device)
    lengths = allocate(group.size * len(parts), torch.int64, device).view(group.size, -1)

    def encode() -> None:
        begin = 0
        for number, part in enumerate(parts):
            room = table[mine, begin : begin + _slot(codec, part)]
            message = encode_shorter(codec, part.own, part.seed, room)
            lengths[mine, number] = message.numel()
            begin += padded(message.numel(), ALIGNMENT_BYTES)

    def exchange(stage: Stage, of_members: Sequence[Sequence[int]]) -> None:
        """Exchange the rows of each member of a hop, which has as many as any other."""
        subgroup = group.hops[stage]
        subgroup.gather([lengths[rows[0] : rows[-1] + 1].view(-1) for rows in of_members], Kind.ALL_GATHER)
        for row in zip(*of_members, strict=True):
            known = [announced(codec, lengths[member], pieces) for member in row]
            sizes = [sum(padded(length, ALIGNMENT_BYTES) for length in of_member) for of_member in known]
            subgroup.gather([table[member, :size] for member, size in zip(row, sizes, strict=True)], Kind.ALL_GATHER)

    def decode() -> None:
        for member in range(group.size):
            begin = 0
            for part, length in zip(parts, announced(codec, lengths[member], pieces), strict=True):
                piece = part.whole.view(group.size, -1)[member]
                message = table[member, begin : begin + length]
                sent_by = codec_of(codec, message, piece.numel(), piece.dtype)
                sent_by.decode(message, piece.numel(), piece.dtype, out=piece)
                begin += padded(length, ALIGNMENT_BYTES)

    own = [[member] for member in columns[group.local_index]]
    hops = gather_hops(
        group, lambda: exchange(Stage.GATHER_ACROSS, own), lambda: exchange(Stage.GATHER_INSIDE, columns)
    )
    return hops.between(encode, decode)


def _slot(codec: Codec, part: Part) -> int:
    return codec.slot_bytes(part.own.numel(), part.own.dtype)


def _table(group: AxisGroup, sizes: Sequence[int], device: torch.device) -> tuple[torch.Tensor, list[slice]]:
    """Memory with a row of bytes for each member, and the places of pieces of these sizes in a row."""
    ends = list(itertools.accumulate(sizes, initial=0))
    table = allocate(group.size * ends[-1], torch.uint8, device).view(group.size, -1)
    return table, [slice(begin, end) for begin, end in itertools.pairwise(ends)]
