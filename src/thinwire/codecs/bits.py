"""Words, bytes and bits as torch tensors, and the header of messages of variable length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.errors import WireError


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as 1-D uint8."""
    return x.contiguous().view(-1).view(torch.uint8)


def words_of(data: Tensor) -> Tensor:
    """Bytes (a multiple of 4 of them, any alignment) as int32."""
    return data.clone().view(torch.int32)


def whole_words(data: Tensor) -> Tensor:
    """Bytes, and zeros up to a multiple of 4 of them."""
    return torch.nn.functional.pad(data, (0, -data.numel() % 4))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Integers (N) as a little-endian stream of the lowest ``bits`` of each; 1-D uint8. The last byte is completed with
    zeros."""
    group, nbytes, word = _group(bits)
    device = numbers.device
    padded = torch.nn.functional.pad(numbers.to(word) & ((1 << bits) - 1), (0, -numbers.numel() % group))
    words = (padded.view(-1, group) << _multiples(bits, group, word, device)).sum(1, dtype=word)
    data = (words[:, None] >> _multiples(8, nbytes, word, device)) & 0xFF
    return data.view(-1)[: -(-numbers.numel() * bits // 8)].to(torch.uint8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """What :func:`pack` packed, as integers that are not negative, and zeros of padding behind it."""
    group, nbytes, word = _group(bits)
    padded = torch.nn.functional.pad(data.to(word), (0, -data.numel() % nbytes)).view(-1, nbytes)
    words = (padded << _multiples(8, nbytes, word, data.device)).sum(1, dtype=word)
    return ((words[:, None] >> _multiples(bits, group, word, data.device)) & ((1 << bits) - 1)).view(-1)


def _group(bits: int) -> tuple[int, int, torch.dtype]:
    """The least number of integers that fill whole bytes, the number of these bytes, and a dtype that holds them."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common, torch.int32 if 8 * bits // common < 32 else torch.int64


def _multiples(step: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=dtype, device=device) * step


def check_header(codec: str, magics: tuple[int, ...], magic: int, words: int, there: int) -> None:
    """Check the first two words of a message of variable length, of which ``there`` bytes are there.

    Raises:
        WireError: The message is not of this codec, or is truncated.
    """
    if magic not in magics:
        raise WireError(f"{codec}: a message starts with {magics[0]:#010x}, this one with {magic:#010x}")
    if words < 2 or 4 * words > there:
        raise WireError(f"{codec}: the message says it has {4 * words} bytes and {there} are there")


def read_header(wire: Tensor, codec: str, magics: tuple[int, ...]) -> tuple[int, int]:
    """Magic number and size in bytes of a message of variable length.

    Raises:
        WireError: The message is not of this codec, or is truncated.
    """
    if wire.numel() < 8:
        raise WireError(f"{codec}: a message starts with 8 bytes, this one has {wire.numel()}; it is truncated")
    magic, words = (int(word) & 0xFFFFFFFF for word in words_of(wire[:8]))
    check_header(codec, magics, magic, words, wire.numel())
    return magic, 4 * words


def store(values: Tensor, out: Tensor, *, add: bool) -> None:
    """Write values to ``out``, rounded to its dtype, or add them to it."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)
