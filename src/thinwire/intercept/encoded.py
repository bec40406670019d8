"""torch's collectives on encoded messages, built from thinwire's own collectives.

This module handles what torch's forms add: shapes, dtypes, lists and rank-major order. Everything runs under
``no_grad`` and on detached tensors, because a pipeline's receive buffers are leaves that require gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives import all_gather as gathering
from thinwire.collectives import all_reduce as reducing
from thinwire.collectives.group import Subgroup
from thinwire.collectives.links.streams import streams_of
from thinwire.collectives.memory import allocate
from thinwire.collectives.reduce_scatter import HopCodecs
from thinwire.collectives.reduce_scatter import reduce_scatter as scattering
from thinwire.errors import WireError
from thinwire.intercept.members import MembersAxis


def all_reduce(axis: MembersAxis, tensor: torch.Tensor, scale: float, codecs: HopCodecs, seed: int | None) -> None:
    """``tensor = scale * sum over members``, added in fp32 and bitwise equal on all members."""
    codec = codecs.across
    assert codec is not None
    values = flat(tensor)
    numel = values.numel()
    padded = -(-numel // axis.size) * axis.size
    vector = values
    if padded != numel:
        vector = allocate(padded, values.dtype, values.device)
        vector[:numel].copy_(values)
        vector[numel:].zero_()
    # A lossy codec encodes sums in fp32.
    rounds = not codec.spec.is_lossless and values.dtype != torch.float32
    result = allocate(padded, torch.float32, values.device) if rounds else vector
    reducing.all_reduce(axis, vector, result, scale=scale, codecs=codecs, seed=seed).perform()
    deliver(result[:numel], tensor)


def all_gather(
    axis: MembersAxis, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, codec: Codec, seed: int | None
) -> None:
    """Fill ``outputs``, one tensor of ``size`` times as many values or ``size`` tensors, with the members' tensors.
    This rank's own is decoded too, as the other ranks see it."""
    mine = flat(tensor)
    numel = mine.numel()
    in_place = len(outputs) == 1 and outputs[0].is_contiguous()
    whole = flat(outputs[0]) if in_place else allocate(axis.size * numel, mine.dtype, mine.device)
    gathered = allocate(whole.numel(), whole.dtype, whole.device) if axis.has_two_hops else whole
    place = gathered[axis.index * numel : (axis.index + 1) * numel]
    if place.data_ptr() != mine.data_ptr():
        place.copy_(mine)
    gathering.all_gather(axis, gathered, codec=codec, seed=seed).perform()
    if axis.has_two_hops:
        _by_rank(axis, whole).copy_(_by_place(axis, gathered).transpose(0, 1))
    if in_place:
        return
    pieces = [whole] if len(outputs) == 1 else whole.split(numel)
    for piece, output in zip(pieces, outputs, strict=True):
        deliver(piece, output)


def reduce_scatter(
    axis: MembersAxis,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    scale: float,
    codecs: HopCodecs,
    seed: int | None,
) -> None:
    """``output = scale * sum over members of their input for this rank``, added in fp32 and rounded once; ``inputs``
    are one tensor of ``size`` times as many values, or ``size`` tensors."""
    whole = flat(inputs[0]) if len(inputs) == 1 else torch.cat([flat(tensor) for tensor in inputs])
    result = flat(output) if output.is_contiguous() else allocate(output.numel(), output.dtype, output.device)
    if axis.has_two_hops:
        ordered = allocate(whole.numel(), whole.dtype, whole.device)
        _by_place(axis, ordered).copy_(_by_rank(axis, whole).transpose(0, 1))
        whole = ordered
    scattering(axis, whole, result, scale=scale, codecs=codecs, seed=seed).perform()
    deliver(result, output)


def _by_rank(axis: MembersAxis, whole: torch.Tensor) -> torch.Tensor:
    """A vector of pieces in the order of ranks, as ``(nodes, local, values)``."""
    return whole.view(axis.nodes, axis.local, -1)


def _by_place(axis: MembersAxis, whole: torch.Tensor) -> torch.Tensor:
    """A vector of pieces in the order of places, which two hops need, as ``(local, nodes, values)``."""
    return whole.view(axis.local, axis.nodes, -1)


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
    pieces = flat(tensor).split(sent.numels)
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
    target = flat(output) if in_place else torch.empty(output.numel(), dtype=output.dtype, device=output.device)
    for message, piece, codec in zip(room, target.split(received.numels), received.codecs, strict=True):
        if codec is not None:
            codec.decode(message, piece.numel(), piece.dtype, out=piece)
        else:
            piece.view(torch.uint8).copy_(message)
    if not in_place:
        deliver(target, output)
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


def decode(codec: Codec, message: torch.Tensor, tensor: torch.Tensor) -> None:
    target = ready(tensor).detach()
    result = target if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype, device=target.device)
    codec.decode(message, target.numel(), target.dtype, out=result)
    deliver(result, tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own, now or once it is :func:`ready`."""
    kind = type(tensor)
    return kind is torch.Tensor or kind is torch.nn.Parameter or hasattr(tensor, "trigger_wait")


def ready(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a tensor that a functional collective is still filling; other tensors are returned unchanged.

    torch unwraps such tensors when it dispatches an operation, but the methods of a process group are called before.
    """
    wait = None if type(tensor) is torch.Tensor else getattr(tensor, "trigger_wait", None)
    result: torch.Tensor = tensor if wait is None else wait()
    return result


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a contiguous vector, which shares the tensor's memory if that is contiguous."""
    return ready(tensor).detach().contiguous().view(-1)


def deliver(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the result to its tensor, unless it is already there."""
    target = ready(tensor).detach()
    if not target.is_contiguous() or result.data_ptr() != target.data_ptr():
        target.copy_(result.view(target.shape))


def arrived(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of a device with streams, once the caller's stream is ordered after functional collectives that fill
    them. Others are waited for on the thread that uses them."""
    if streams_of(tensors[0].device) is None:
        return tensors
    return [ready(tensor) for tensor in tensors]
