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
    "LOSSLESS", "POISON", "VARIABLE", "before_a_wall", "dtype_for", "mixture", "of_every_family",
    "of_every_fixed_family", "same", "with_word",
]  # fmt: skip

VARIABLE = [family.examples[0] for family in FAMILIES.values() if family.variable_length]
"""The codecs of variable length, which are the lossless ones but for ``none``."""
LOSSLESS = [
    *((name, getattr(torch, dtype)) for name in VARIABLE for dtype in encodable_dtypes(CodecSpec(name))),
    ("mpc:3", torch.float32),
]
"""The same, with every dtype they take, and ``mpc`` of records."""
POISON = 0xA5
"""What memory is filled with that must stay as it is."""


def of_every_family(names: list[str]) -> list[str]:
    """Names of codecs, and an example of each family that none of them is of."""
    families = {CodecSpec(name).family for name in names}
    return [*names, *(family.examples[0] for name, family in FAMILIES.items() if name not in families)]


def of_every_fixed_family(names: list[str]) -> list[str]:
    """The same, of codecs of fixed length only."""
    return [name for name in of_every_family(names) if not CodecSpec(name).is_variable_length]


def dtype_for(name: str) -> torch.dtype:
    """fp32, unless the codec does not take it."""
    valid = encodable_dtypes(CodecSpec(name))
    return torch.float32 if "float32" in valid else getattr(torch, valid[0])


def mixture(numel: int, dtype: torch.dtype, *, poisoned: bool) -> Tensor:
    """Values of every kind one after the other, as far as there is room."""
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
    """A copy after whose last byte memory ends: what reads on does not live."""
    page = mmap.PAGESIZE
    room = -(-max(wire.numel(), 1) // page) * page
    pages = mmap.mmap(-1, room + page)
    libc = ctypes.CDLL(None, use_errno=True)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(pages, room))
    assert libc.mprotect(ctypes.c_void_p(wall), page, 0) == 0
    return torch.frombuffer(pages, dtype=torch.uint8, count=room)[room - wire.numel() :].copy_(wire)


def with_word(wire: Tensor, index: int, value: int) -> Tensor:
    """A message of which one word is another."""
    changed = wire.clone()
    changed[4 * index : 4 * index + 4] = torch.tensor(list(struct.pack("<I", value)), dtype=torch.uint8)
    return changed
