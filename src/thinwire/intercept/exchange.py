"""All-to-alls of which every piece is encoded by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives.group import Subgroup
from thinwire.errors import WireError
from thinwire.intercept import encoded


@dataclass(frozen=True)
class RankPieces:
    """The pieces that a rank sends to all ranks, or receives from them, each with a codec or none."""

    numels: tuple[int, ...]
    codecs: tuple[Codec | None, ...]
    dtype: torch.dtype

    @property
    def most_bytes(self) -> list[int]:
        """Upper bound of each message's bytes, which all messages of fixed length have."""
        return [
            numel * self.dtype.itemsize if codec is None else codec.max_wire_bytes(numel, self.dtype)
            for numel, codec in zip(self.numels, self.codecs, strict=True)
        ]

    @property
    def vary(self) -> bool:
        """Whether the length of a message depends on its values."""
        return any(codec is not None and codec.spec.is_variable_length for codec in self.codecs)


def numels(tensor: torch.Tensor, rows: Sequence[int] | None, ranks: int) -> tuple[int, ...]:
    """Number of values of each rank's piece of a tensor: of its rows along the first dimension; without ``rows``,
    pieces are equal."""
    if not rows:
        return (tensor.numel() // ranks,) * ranks
    of_a_row = math.prod(tensor.shape[1:])
    return tuple(count * of_a_row for count in rows)


def all_to_all(
    members: Subgroup,
    output: torch.Tensor,
    tensor: torch.Tensor,
    received: RankPieces,
    sent: RankPieces,
    seed: Callable[[Codec], int | None],
) -> list[int]:
    """Send every rank its piece of a tensor, each encoded, and decode theirs into ``output``. What a rank keeps is
    copied. Returns the bytes of the message to each rank.

    Raises:
        WireError: A message is damaged.
    """
    mine = members.index
    pieces = encoded.flat(tensor).split(sent.numels)
    messages = [
        piece.view(torch.uint8) if codec is None else codec.encode(piece, seed=seed(codec))
        for piece, codec in zip(pieces, sent.codecs, strict=True)
    ]
    lengths = [message.numel() for message in messages]
    vary = received.vary or sent.vary
    expected = _lengths(members, lengths, received, tensor.device) if vary else received.most_bytes
    room = [torch.empty(length, dtype=torch.uint8, device=tensor.device) for length in expected]
    members.exchange(messages, room)
    room[mine] = messages[mine]
    in_place = output.is_contiguous()
    target = encoded.flat(output) if in_place else torch.empty(output.numel(), dtype=output.dtype, device=output.device)
    for message, piece, codec in zip(room, target.split(received.numels), received.codecs, strict=True):
        if codec is not None:
            codec.decode(message, piece.numel(), piece.dtype, out=piece)
        else:
            piece.view(torch.uint8).copy_(message)
    if not in_place:
        encoded.deliver(target, output)
    return lengths


def _lengths(members: Subgroup, lengths: Sequence[int], received: RankPieces, device: torch.device) -> list[int]:
    """Exchange the lengths of messages; returns those of the messages to this rank, for which the host waits."""
    mine = torch.tensor(lengths, device=device)
    theirs = mine.clone()
    members.exchange(list(mine.split(1)), list(theirs.split(1)))
    expected: list[int] = theirs.tolist()
    for length, most, codec in zip(expected, received.most_bytes, received.codecs, strict=True):
        if not 0 <= length <= most or (codec is None and length != most):
            raise WireError(f"an all-to-all's message has {length} bytes, and at most {most} were expected")
    return expected
