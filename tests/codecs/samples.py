"""Values and messages for tests of codecs."""

from __future__ import annotations

import ctypes
import mmap
import struct

import torch
from torch import Tensor

from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES, encodable_dtypes

__all__ = [
    *("DTYPES", "EVERY", "LOSSLESS", "POISON", "VARIABLE", "before_a_wall", "dtypes_of", "mixture", "same"),
    *("widest_dtype", "with_word"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
"""Dtypes of tensors, the widest first."""
POISON = 0xA5
"""Fill of memory that must stay as it is, a byte."""


def dtypes_of(name: str) -> list[torch.dtype]:
    """The dtypes that a codec encodes, the widest first."""
    return [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in encodable_dtypes(CodecSpec(name))]


def widest_dtype(name: str) -> torch.dtype:
    """The widest dtype that a codec encodes."""
    return dtypes_of(name)[0]


EVERY = [text for family in FAMILIES.values() for text in family.examples]
"""Texts of the built-in codecs."""
VARIABLE = [text for text in EVERY if CodecSpec(text).is_variable_length]
"""Built-in codecs of variable length, all of them lossless."""
LOSSLESS = [(text, dtype) for text in VARIABLE for dtype in dtypes_of(text)]
"""Those codecs, each with every dtype that it encodes."""


def mixture(numel: int, dtype: torch.dtype, *, poisoned: bool) -> Tensor:
    """Values of every kind in turn, as many kinds as fit."""
    generator = torch.Generator().manual_seed(numel)
    length = -(-numel // (11 if poisoned else 9))
    limits = torch.finfo(dtype)
    normal = torch.randn(9, length, generator=generator).clamp(-4, 4)
    parts = [
        normal[0],
        normal[1] / (torch.rand(length, generator=generator) + 1e-3),
        normal[2] * (torch.rand(length, generator=generator) < 0.1),
        normal[3] * (limits.max / 4),
        torch.where(normal[4] > 0, 2.5, -2.5),
        normal[5] * (limits.tiny * 4),
        normal[6] * (limits.tiny / 16),
        torch.full((length,), -3.7),
        -torch.zeros(length),
    ]
    values = torch.cat([part.to(dtype) for part in parts])
    if poisoned:
        few = normal[7].to(dtype)
        few[length // 2 : length // 2 + 1] = torch.inf
        any_bits = torch.randint(0, 256, (length * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        values = torch.cat((values, few, any_bits.view(dtype)))
    return values[:numel].clone()


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, except that every NaN is one."""
    integer = torch.int32 if want.dtype == torch.float32 else torch.int16
    return (
        got.dtype == want.dtype
        and torch.equal(got.isnan(), want.isnan())
        and torch.equal(got.view(integer)[~got.isnan()], want.view(integer)[~want.isnan()])
    )


def before_a_wall(wire: Tensor) -> Tensor:
    """A copy at the end of readable memory: a read beyond its last byte ends the process."""
    page = mmap.PAGESIZE
    room = -(-max(wire.numel(), 1) // page) * page
    pages = mmap.mmap(-1, room + page)
    libc = ctypes.CDLL(None, use_errno=True)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(pages, room))
    assert libc.mprotect(ctypes.c_void_p(wall), page, 0) == 0
    return torch.frombuffer(pages, dtype=torch.uint8, count=room)[room - wire.numel() :].copy_(wire)


def with_word(wire: Tensor, index: int, value: int) -> Tensor:
    """A copy of a message with another value in one word of 32 bits."""
    changed = wire.clone()
    changed[4 * index : 4 * index + 4] = torch.tensor(list(struct.pack("<I", value)), dtype=torch.uint8)
    return changed
