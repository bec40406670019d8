"""Encoded pieces in transit: a buffer with room for one message of each member of an axis."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from thinwire.codecs import Codec
from thinwire.collectives.group import Subgroup
from thinwire.collectives.memory import allocate
from thinwire.errors import WireError
from thinwire.program import Kind

__all__ = ["Messages", "Residual"]


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

    def split(self, sizes: Sequence[int]) -> list[Residual]:
        """The residual of each piece."""
        return [Residual(part, self.gain) for part in self.lost.split(list(sizes))]


class Messages:
    """A buffer with room for one message of each piece, one after the other.

    Messages of a codec of variable length take two exchanges: first their lengths, then their bytes.

    Args:
        codec: Codec of the messages.
        sizes: Number of values of each piece, known to both sides.
        dtype: Dtype of the values that are encoded.
        device: Device of the buffer.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.codec = codec
        self._sizes, self._dtype = sizes, dtype
        rooms = [codec.slot_bytes(size, dtype) for size in sizes]
        self._starts = [0, *itertools.accumulate(rooms)]
        self.buffer = allocate(self._starts[-1], torch.uint8, device)
        self._known = [codec.max_wire_bytes(size, dtype) for size in sizes]
        # Only variable lengths are sent, so others need not be copied to a device.
        lengths = self._known if codec.spec.is_variable_length else []
        self._lengths = allocate(len(lengths), torch.int64, device)
        self._lengths.copy_(torch.tensor(lengths, dtype=torch.int64))

    def encode(self, index: int, piece: torch.Tensor, seed: int | None, residual: Residual | None = None) -> None:
        """Encode a piece.

        Args:
            index: Index of the message.
            piece: Contiguous 1-D tensor in the dtype of the messages, or in any dtype if there is a residual.
            seed: Seed for the codec, if it needs one.
            residual: Error feedback of the size of ``piece``. It is added to the piece, and updated to the new loss.
        """
        if residual is None:
            message = self.codec.encode(piece, seed=seed, out=self._room(index))
        else:
            message = self.codec.encode_feedback(
                piece, residual.lost, gain=residual.gain, seed=seed, out=self._room(index)
            )
        if self.codec.spec.is_variable_length:
            self._known[index] = message.numel()
            self._lengths[index] = message.numel()

    def decode(self, index: int, out: torch.Tensor) -> None:
        """Decode a message into ``out``."""
        self.codec.decode(self.message(index), self._sizes[index], out.dtype, out=out)

    def decode_add(self, index: int, out: torch.Tensor) -> None:
        """Decode a message and add it to ``out``, which is fp32."""
        self.codec.decode_add(self.message(index), out, encoded=self._dtype)

    def decode_sum(self, out: torch.Tensor, scale: float) -> None:
        """Write ``scale`` times the sum of all messages, whose pieces have the same size, to ``out``, which is fp32."""
        if not self.codec.spec.is_variable_length:
            wires = self.buffer.view(len(self._sizes), -1)
            self.codec.decode_sum(wires, out.numel(), scale=scale, encoded=self._dtype, out=out)
            return
        out.zero_()
        for index in range(len(self._sizes)):
            self.decode_add(index, out)
        out.mul_(scale)

    def gather(self, subgroup: Subgroup, columns: Sequence[range], kind: Kind) -> None:
        """Fill the messages ``columns[i]`` with those of member i. This rank's own column is sent."""
        if not self.codec.spec.is_variable_length:
            subgroup.gather([self.buffer[self._starts[c.start] : self._starts[c.stop]] for c in columns], kind)
            return
        subgroup.gather([self._lengths[c.start : c.stop] for c in columns], kind)
        self._known = self._announced()
        for row in zip(*columns, strict=True):
            subgroup.gather([self.message(index) for index in row], kind)

    @property
    def lengths(self) -> torch.Tensor:
        """Lengths of the messages, int64, for codecs of variable length; empty for others."""
        return self._lengths

    def announce(self, index: int) -> None:
        """Take note of a length that has been received into :attr:`lengths`.

        Raises:
            WireError: No message can have that length.
        """
        self._known[index] = self._possible(index, int(self._lengths[index]))

    def message(self, index: int) -> torch.Tensor:
        """The bytes of a message; all of its room while its length is unknown."""
        return self._room(index)[: self._known[index]]

    def exchange(self, subgroup: Subgroup, incoming: Messages) -> None:
        """Send message i to member i and receive message i of ``incoming`` from it. This rank's own are not touched."""
        others = range(subgroup.size)
        if self.codec.spec.is_variable_length:
            subgroup.exchange(
                [self._lengths[i : i + 1] for i in others], [incoming._lengths[i : i + 1] for i in others]
            )
            incoming._known = incoming._announced()
        subgroup.exchange([self.message(i) for i in others], [incoming.message(i) for i in others])

    def _announced(self) -> list[int]:
        return [self._possible(index, length) for index, length in enumerate(self._lengths.tolist())]

    def _possible(self, index: int, length: int) -> int:
        """Check a received length, which a peer has chosen and which determines how much is read."""
        largest = self.codec.max_wire_bytes(self._sizes[index], self._dtype)
        if not 0 <= length <= largest:
            raise WireError(
                f"message {index} of {self.codec.spec} is announced with {length} bytes, where {self._sizes[index]} "
                f"values take at most {largest}: ranks disagree about what they send, or the message is corrupt"
            )
        return length

    def _room(self, index: int) -> torch.Tensor:
        return self.buffer[self._starts[index] : self._starts[index + 1]]
