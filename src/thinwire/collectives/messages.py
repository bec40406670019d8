"""Encoded pieces in transit: a buffer with room for one message of each member of an axis."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec, Sum, get
from thinwire.codecs.seeds import fold_seed, slice_seed
from thinwire.collectives.group import Subgroup
from thinwire.collectives.memory import allocate
from thinwire.errors import WireError
from thinwire.program import Kind


@dataclass(frozen=True, slots=True)
class Residual:
    """Error feedback: the loss of earlier messages, which later ones compensate. The caller keeps it between steps.

    Attributes:
        lost: Contiguous fp32 tensor with as many values as are encoded.
        gain: Fraction of the loss that the next message compensates; see
            :meth:`thinwire.codecs.Codec.encode_feedback`.
    """

    lost: torch.Tensor
    gain: float = 1.0


@functools.lru_cache(maxsize=4096)
def _layout(
    codec: Codec, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...], bool, bool]:
    """Where messages lie in a buffer, which every step would compute anew: the first byte of the room of each message
    and the end of the last; the bytes of each message, the most that they can be if they vary; whether they vary; and
    whether the messages are the rows of a matrix."""
    starts = itertools.accumulate((codec.slot_bytes(size, dtype) for size in sizes), initial=0)
    lengths, varies = tuple(codec.max_wire_bytes(size, dtype) for size in sizes), codec.spec.is_variable_length
    return tuple(starts), lengths, varies, len(set(sizes)) == 1 and not varies


class Messages:
    """A buffer with room for one message of each piece, one after the other.

    Pieces of one size have messages in the rows of a matrix, which a codec of fixed length encodes and decodes in one
    pass. Messages of a codec of variable length are made one by one, and take two exchanges: first their lengths, then
    their bytes. Those that a lossless one would not shorten are the values as they are.

    Args:
        codec: Codec of the messages.
        sizes: Number of values of each piece, known to both sides.
        dtype: Dtype of the values that are encoded.
        device: Device of the buffer.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.codec = codec
        self._sizes, self._dtype = sizes, dtype
        self._starts, lengths, self._varies, self._has_rows = _layout(codec, tuple(sizes), dtype)
        self._known: Sequence[int] = lengths
        self.buffer = allocate(self._starts[-1], torch.uint8, device)
        if self._varies:
            # Only variable lengths are sent, so others need not be copied to a device.
            self._lengths = allocate(len(self._known), torch.int64, device)
            self._lengths.copy_(torch.tensor(self._known, dtype=torch.int64, device="cpu"))

    # -- encoding and decoding ---------------------------------------------------------------------------------

    def encode(self, index: int, piece: torch.Tensor, seed: int | None, residual: Residual | None = None) -> None:
        """Encode a piece.

        Args:
            index: Index of the message.
            piece: Contiguous 1-D tensor in the dtype of the messages, or in any dtype if there is a residual.
            seed: Seed for the codec, if it needs one.
            residual: Error feedback of the size of ``piece``. It is added to the piece, and updated to the new loss.
        """
        if residual is None:
            message = encode_shorter(self.codec, piece, seed, self.room(index))
        else:
            message = self.codec.encode_feedback(
                piece, residual.lost, gain=residual.gain, seed=seed, out=self.room(index)
            )
        if self._varies:
            self._known = (*self._known[:index], message.numel(), *self._known[index + 1 :])
            self._lengths[index] = message.numel()

    def encode_slices(
        self,
        whole: torch.Tensor,
        bounds: Sequence[tuple[int, int]],
        seed: int | None,
        residual: Residual | None = None,
    ) -> None:
        """Encode a slice of a vector as each of the messages.

        Args:
            whole: Contiguous 1-D tensor in the dtype of the messages, or in any dtype if there is a residual.
            bounds: (start, stop) of each message's values.
            seed: Seed for the codec, if it needs one.
            residual: Error feedback of the size of ``whole``; see :meth:`encode`.
        """
        if self._has_rows:
            if residual is None:
                self.codec.encode_slices(whole, bounds, seed=seed, out=self.buffer)
            else:
                lost, gain = residual.lost, residual.gain
                self.codec.encode_slices_feedback(whole, bounds, lost, gain=gain, seed=seed, out=self.buffer)
            return
        for index, (start, stop) in enumerate(bounds):
            own = None if residual is None else Residual(residual.lost[start:stop], residual.gain)
            own_seed = None if seed is None else slice_seed(fold_seed(seed), index)
            self.encode(index, whole[start:stop], own_seed, own)

    def decode(self, index: int, out: torch.Tensor) -> None:
        self._codec(index).decode(self.message(index), self._sizes[index], out.dtype, out=out)

    def decode_side_by_side(self, whole: torch.Tensor, *, add: bool = False) -> None:
        """Decode all messages into a contiguous 1-D vector of all pieces, or add them to its values in fp32, rounded
        once."""
        if self._has_rows and (add or whole.dtype == self._dtype or not self.codec.spec.is_lossless):
            out = whole.view(len(self._sizes), self._sizes[0])
            self.codec.decode_slices(self._rows(), out, encoded=self._dtype, add=add)
            return
        for index, piece in enumerate(whole.split(list(self._sizes))):
            if not add:
                self.decode(index, piece)
                continue
            message = self.message(index).unsqueeze(0)
            self._codec(index).decode_sum_into(Sum(message, piece.numel(), piece, encoded=self._dtype), piece)

    def decode_sum(self, out: torch.Tensor, scale: float = 1.0, onto: torch.Tensor | None = None) -> None:
        """Write ``scale * (onto + all messages)`` to ``out``, added in fp32 and rounded once. The pieces have one size.

        Args:
            out: Contiguous 1-D fp32, bf16 or fp16 tensor; may be ``onto``.
            scale: Factor on the sum.
            onto: Contiguous 1-D tensor; ``None`` begins with the first message.
        """
        if self._has_rows:
            self.codec.decode_sum_into(Sum(self._rows(), out.numel(), onto, scale, self._dtype), out)
            return
        total = out if out.dtype == torch.float32 else allocate(out.numel(), torch.float32, out.device)
        if onto is None:
            total.fill_(-0.0)  # to which a message adds up to itself, zeros of either sign included
        elif onto is not total:
            total.copy_(onto)
        for index in range(len(self._sizes)):
            self._codec(index).decode_add(self.message(index), total, encoded=self._dtype)
        if scale != 1.0:
            total.mul_(scale)
        if total is not out:
            out.copy_(total)

    # -- exchanges ---------------------------------------------------------------------------------------------

    def gather(self, subgroup: Subgroup, columns: Sequence[range], kind: Kind) -> None:
        """Fill the messages ``columns[i]`` with those of member i. This rank's own column is sent."""
        if not self._varies:
            subgroup.gather([self.buffer[self._starts[c.start] : self._starts[c.stop]] for c in columns], kind)
            return
        subgroup.gather([self._lengths[c.start : c.stop] for c in columns], kind)
        self._known = self._announced()
        for row in zip(*columns, strict=True):
            subgroup.gather([self.message(index) for index in row], kind)

    def sum_of(self, index: int, members: int, onto: torch.Tensor) -> Sum:
        """The sum of the messages of one piece, of which every member has sent one, and of this rank's own values.

        Args:
            index: Number of the piece among those of a member.
            members: Number of members that have sent messages, all for the same pieces; their codec has fixed length.
            onto: This rank's values of the piece.
        """
        each = len(self._sizes) // members
        begin, room = self._starts[index], self._starts[index + 1] - self._starts[index]
        rows = self.buffer.as_strided((members, room), (self._starts[each], 1), self.buffer.storage_offset() + begin)
        return Sum(rows, self._sizes[index], onto, encoded=self._dtype)

    def exchange(self, subgroup: Subgroup, incoming: Messages) -> None:
        """Send messages to each other member, and receive as many from each, both in the order of the members: one, or
        several of a codec of fixed length."""
        numbers = range(subgroup.size - 1)
        each = len(self._sizes) // len(numbers)
        if self._varies:
            self._swap(subgroup, incoming, lambda messages: [messages._lengths[i : i + 1] for i in numbers])
            incoming._known = incoming._announced()
        if each > 1:
            self._swap(
                subgroup,
                incoming,
                lambda messages: [messages.buffer[a:b] for a, b in itertools.pairwise(messages._starts[::each])],
            )
        else:
            self._swap(subgroup, incoming, lambda messages: [messages.message(i) for i in numbers])

    def _swap(self, subgroup: Subgroup, incoming: Messages, parts: Callable[[Messages], list[torch.Tensor]]) -> None:
        """Send parts of these messages to the other members, and receive the like, in the order of the members."""
        subgroup.exchange(_with_own(parts(self), subgroup), _with_own(parts(incoming), subgroup))

    def send(self, subgroup: Subgroup, source: int, target: int) -> None:
        """Send the only message from one member to another, which receives it into its own."""
        if self._varies:
            subgroup.send(self._lengths, source, target)
            if subgroup.index == target:
                self._known = self._announced()
        subgroup.send(self.message(0), source, target)

    # -- inside ------------------------------------------------------------------------------------------------

    def message(self, index: int) -> torch.Tensor:
        """The bytes of a message; all of its room while its length is unknown."""
        return self.room(index)[: self._known[index]]

    def _announced(self) -> list[int]:
        """Lengths of the messages, as they have been received."""
        return announced(self.codec, self._lengths, [(size, self._dtype) for size in self._sizes])

    def _codec(self, index: int) -> Codec:
        return codec_of(self.codec, self.message(index), self._sizes[index], self._dtype)

    def _rows(self) -> torch.Tensor:
        return self.buffer.view(len(self._sizes), self._starts[1])

    def room(self, index: int) -> torch.Tensor:
        """The place of a message."""
        return self.buffer[self._starts[index] : self._starts[index + 1]]


def announced(codec: Codec, lengths: torch.Tensor, pieces: Sequence[tuple[int, torch.dtype]]) -> list[int]:
    """Lengths of messages with so many values of a dtype each. A peer has chosen them, and they determine how much is
    read.

    Raises:
        WireError: No message can be as long.
    """
    known: list[int] = lengths.tolist()
    for index, ((size, dtype), length) in enumerate(zip(pieces, known, strict=True)):
        largest = codec.max_wire_bytes(size, dtype)
        if not 0 <= length <= largest:
            raise WireError(
                f"message {index} of {codec.spec} is announced with {length} bytes, where {size} values take "
                f"at most {largest}: ranks disagree about what they send, or the message is corrupt"
            )
    return known


def encode_shorter(codec: Codec, piece: torch.Tensor, seed: int | None, room: torch.Tensor) -> torch.Tensor:
    """Encode a piece into ``room``; where a lossless codec of variable length would not shorten it, as it is."""
    message = codec.encode(piece, seed=seed, out=room)
    if codec.spec.is_lossless and codec.spec.is_variable_length and message.numel() >= piece.nbytes:
        return _plain(room.device).encode(piece, out=room)
    return message


def codec_of(codec: Codec, message: torch.Tensor, numel: int, dtype: torch.dtype) -> Codec:
    """The codec that decodes a message of :func:`encode_shorter`, which its length tells."""
    sends_plain = codec.spec.is_lossless and codec.spec.is_variable_length
    return _plain(message.device) if sends_plain and message.numel() == numel * dtype.itemsize else codec


def _plain(device: torch.device) -> Codec:
    return get("none", device=device)


def _with_own(pieces: Sequence[torch.Tensor], subgroup: Subgroup) -> list[torch.Tensor]:
    """Pieces of the other members, with an empty one at this rank's own place."""
    return [*pieces[: subgroup.index], pieces[0][:0], *pieces[subgroup.index :]]
