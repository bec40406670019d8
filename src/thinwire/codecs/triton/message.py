# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Messages of variable length: offsets of their parts, and their headers."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.bits import check_header, store
from thinwire.codecs.codec import Codec
from thinwire.codecs.triton.launch import ceil_div, check_device, room_for
from thinwire.errors import WireError

TOO_MANY = 1 << 40
"""Added by kernels to a count of parts that contradicts the rest of the message. No message has so many parts, and sums
of such counts stay below 2^63."""


class VariableCodec(Codec):
    """Encodes with variable length. The host waits for the size of each message, except for slices."""

    backend: ClassVar[str] = "triton"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        check_device(x)
        room = room_for(wire, self.max_wire_bytes(x.numel(), x.dtype))
        size = self._size(x, int(self._write(x, room)))
        if room.data_ptr() != wire.data_ptr():
            wire[:size].copy_(room[:size])
        return size

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        check_device(x)
        if wires.data_ptr() % 16:
            super()._encode_slices(x, bounds, wires, seed)
            return
        # The sizes are not needed, so the host does not wait for them.
        for row, (start, stop) in enumerate(bounds):
            if stop > start:
                self._write(x[start:stop], wires[row])

    @abstractmethod
    def _write(self, x: Tensor, room: Tensor) -> Tensor:
        """Write the message of ``x`` to the start of ``room``; return, on the device, the number of those parts whose
        number depends on the values."""

    @abstractmethod
    def _size(self, x: Tensor, found: int) -> int:
        """Size in bytes of a message with this number of such parts."""


@contextlib.contextmanager
def room_for_values(out: Tensor, encoded: torch.dtype, *, add: bool) -> Iterator[Tensor]:
    """Words to which the values of a message are written: those of ``out``, or others if it has another dtype or odd
    bytes or is added to, which it then takes the values from."""
    nbytes = out.numel() * encoded.itemsize
    if not add and out.dtype == encoded and nbytes % 4 == 0 and out.data_ptr() % 4 == 0:
        yield out.view(torch.int32)
        return
    room = torch.empty(ceil_div(nbytes, 4), dtype=torch.int32, device=out.device)
    yield room
    store(room.view(torch.uint8)[:nbytes].view(encoded), out, add=add)


def offsets_of(counts: Tensor) -> Tensor:
    """Exclusive prefix sums of the counts, followed by their sum; int64."""
    offsets = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def header_of(wire: Tensor, codec: str, magics: tuple[int, ...], offsets: Tensor | None) -> tuple[int, int, int]:
    """Copy the magic number and the size in bytes of a message, and the last of ``offsets``, to the host at once.

    Raises:
        WireError: The message is not of this codec, or is truncated.
    """
    if wire.numel() < 8:
        raise WireError(f"{codec}: a message starts with 8 bytes, this one has {wire.numel()}; it is truncated")
    parts = [wire[:8].clone().view(torch.int32).long()]
    if offsets is not None:
        parts.append(offsets[-1:])
    magic, words, *rest = torch.cat(parts).tolist()
    magic, words = magic & 0xFFFFFFFF, words & 0xFFFFFFFF
    check_header(codec, magics, magic, words, wire.numel())
    return magic, 4 * words, rest[0] if rest else 0


def words_of(x: Tensor) -> Tensor:
    """The memory of a tensor as words, copied if its size or its address is not a multiple of a word."""
    data = x.view(torch.uint8)
    if data.numel() % 4 or data.data_ptr() % 4:
        padded = data.new_zeros(ceil_div(data.numel(), 4) * 4)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int32)


# ------------------------------------------------------------------------------------------------------ device


@triton.jit
def num_ones(x):
    """Number of set bits of a 32-bit word."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)
