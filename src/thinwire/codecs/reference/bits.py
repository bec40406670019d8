"""Words, bytes and bits as torch tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.errors import WireError


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 1-D uint8."""
    return x.contiguous().view(-1).view(torch.uint8)


def words_of(data: Tensor) -> Tensor:
    """Bytes (a multiple of 4 of them, any alignment) as int32."""
    return data.clone().view(torch.int32)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack a 1-D tensor of 0 and 1 into bytes: bit i of the stream is bit i % 8 of byte i // 8. The last byte is
    completed with zeros."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpack_bits(data: Tensor) -> Tensor:
    """The bits of 1-D uint8 as uint8, eight per byte."""
    return ((data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1).view(-1)


def read_header(wire: Tensor, codec: str, magics: tuple[int, ...]) -> tuple[int, int]:
    """Magic number and size in bytes of a message of variable length.

    Raises:
        WireError: The message is not of this codec, or is truncated.
    """
    if wire.numel() < 8:
        raise WireError(f"{codec}: a message starts with 8 bytes, this one has {wire.numel()}; it is truncated")
    magic, words = (int(word) & 0xFFFFFFFF for word in words_of(wire[:8]))
    if magic not in magics:
        raise WireError(f"{codec}: a message starts with {magics[0]:#010x}, this one with {magic:#010x}")
    if words < 2 or 4 * words > wire.numel():
        raise WireError(f"{codec}: the message says it has {4 * words} bytes and {wire.numel()} are there")
    return magic, 4 * words


def store(values: Tensor, out: Tensor, *, add: bool) -> None:
    """Write values to ``out``, rounded to its dtype, or add them to it."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)
