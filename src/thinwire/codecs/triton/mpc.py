# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""MPC. A program handles one chunk, which is read twice: the first pass counts words, and the second pass, after a
prefix sum of the counts, writes them.

Shapes: a chunk of 1024 words as a tile of G = 32 groups and C = 32 columns.
"""

from __future__ import annotations

from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.reference.mpc import CHUNK, magic_of
from thinwire.codecs.triton.launch import aligned, ceil_div, check_device, launch, power_of_two
from thinwire.codecs.triton.message import (
    TOO_MANY,
    VariableCodec,
    header_of,
    num_ones,
    offsets_of,
    room_for_values,
    words_of,
)
from thinwire.errors import WireError


@final
class TritonMpc(VariableCodec):
    """Lossless for any words; variable length."""

    def _size(self, x: Tensor, found: int) -> int:
        num_words = ceil_div(x.numel() * x.itemsize, 4)
        return 8 + 4 * ceil_div(num_words, 32) + 4 * found

    def _write(self, x: Tensor, room: Tensor) -> Tensor:
        """Write the message to the start of ``room``; return the number of words that are kept, on the device."""
        words, message = words_of(x), room.view(torch.int32)
        num_words, num_chunks = words.numel(), ceil_div(words.numel(), CHUNK)
        counts = torch.empty(num_chunks, dtype=torch.int32, device=x.device)
        stride, magic = self.spec.stride, magic_of(self.spec)
        launch(_count, (num_chunks,), words, message, counts, num_words, STRIDE=stride)
        offsets = offsets_of(counts)
        launch(_compact, (num_chunks,), words, message, offsets, num_words, num_chunks, MAGIC=magic, STRIDE=stride)
        return offsets[-1]

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        check_device(wire)
        num_words = ceil_div(out.numel() * encoded.itemsize, 4)
        num_chunks, bitmap_words = ceil_div(num_words, CHUNK), ceil_div(num_words, 32)
        offsets = None
        message = aligned(wire)
        message = message[: message.numel() // 4 * 4].view(torch.int32)
        if message.numel() >= 2 + bitmap_words:
            counts = torch.empty(num_chunks, dtype=torch.int64, device=wire.device)
            launch(_count_bits, (num_chunks,), message, counts, num_words, TOO_MANY)
            offsets = offsets_of(counts)
        _, size, found = header_of(wire, "mpc", (magic_of(self.spec),), offsets)
        there = size // 4 - 2 - bitmap_words
        if there < 0:
            raise WireError(f"mpc: {num_words} words need a bitmap of {bitmap_words}, {there + bitmap_words} are there")
        if offsets is None or found != there:
            raise WireError(f"mpc: the bitmap announces {found % TOO_MANY} words of {num_words}, {there} are there")
        stride = self.spec.stride
        with room_for_values(out, encoded, add=add) as room:
            launch(_restore, (num_chunks,), message, room, offsets, num_words, SUMS=stride == 1)
            if stride > 1:
                launch(_accumulate, (num_chunks,), room, num_words, STRIDE=stride, WIDTH=power_of_two(stride))


make = TritonMpc
"""Make the codec of a spec."""


# ------------------------------------------------------------------------------------------------------ device


@triton.jit
def _transposed(x_GC):
    """Transpose each row as a matrix of 32 x 32 bits: swap bit i of word j and bit j of word i. Plane p of the format
    is then word 31 - p."""
    x_GC = _swapped(x_GC, 16, 0x0000FFFF)
    x_GC = _swapped(x_GC, 8, 0x00FF00FF)
    x_GC = _swapped(x_GC, 4, 0x0F0F0F0F)
    x_GC = _swapped(x_GC, 2, 0x33333333)
    return _swapped(x_GC, 1, 0x55555555)


@triton.jit
def _swapped(x_GC, DISTANCE: tl.constexpr, MASK: tl.constexpr):
    """Swap the squares of DISTANCE bits next to the diagonal."""
    pairs = tl.reshape(x_GC, (32, 16 // DISTANCE, 2, DISTANCE))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    moved = ((first >> DISTANCE) ^ second) & MASK
    pairs = tl.join(first ^ (moved << DISTANCE), second ^ moved)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (32, 32))


@triton.jit
def _places(num_words, chunk):
    """For every place of the tile, the number of its residual word in the chunk; whether groups are whole; and the
    number of words of the chunk. The transposition yields planes in the opposite order."""
    rem = tl.minimum(num_words - chunk * 1024, 1024).to(tl.int32)
    column_GC = tl.broadcast_to(tl.arange(0, 32)[None, :], (32, 32))
    group_G = tl.arange(0, 32)
    whole_G = (group_G + 1) * 32 <= rem
    bit_GC = tl.where(whole_G[:, None], 31 - column_GC, column_GC)
    return bit_GC, whole_G, rem


@triton.jit
def _residual(words, num_words, chunk, STRIDE: tl.constexpr):
    """The residual words (uint32) of a chunk, their bits in the bitmap, and the bitmap."""
    bit_GC, whole_G, rem = _places(num_words, chunk)
    at_GC = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    words += chunk * 1024
    word_GC = tl.load(words + at_GC, mask=at_GC < rem, other=0)
    before_GC = tl.load(words + at_GC - STRIDE, mask=(at_GC < rem) & (at_GC >= STRIDE), other=0)
    difference_GC = word_GC.to(tl.uint32, bitcast=True) - before_GC.to(tl.uint32, bitcast=True)
    difference_GC = tl.where(at_GC < rem, difference_GC, 0)
    # The predecessor of a plane is the plane of the next higher bit, that is, of the words shifted down.
    planes_GC = _transposed(difference_GC) - _transposed(difference_GC >> 1)
    residual_GC = tl.where(whole_G[:, None], planes_GC, difference_GC)
    kept_GC = (residual_GC != 0).to(tl.int32) << bit_GC
    return residual_GC, bit_GC, tl.sum(kept_GC, axis=1).to(tl.int32), rem


@triton.jit
def _ranks(bitmap_G, bit_GC):
    """Number of kept words in the chunk before each word."""
    ones_G = num_ones(bitmap_G)
    before_G = tl.cumsum(ones_G, axis=0).to(tl.int32) - ones_G
    below_GC = (tl.full((32, 32), 1, tl.int32) << bit_GC) - 1
    return before_G[:, None] + num_ones(bitmap_G[:, None] & below_GC)


@triton.jit
def _count(words, message, counts, num_words, STRIDE: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    _, _, bitmap_G, rem = _residual(words, num_words, chunk, STRIDE)
    group_G = tl.arange(0, 32)
    tl.store(message + 2 + chunk * 32 + group_G, bitmap_G, mask=group_G * 32 < rem)
    tl.store(counts + chunk, tl.sum(num_ones(bitmap_G), axis=0))


@triton.jit
def _compact(words, message, offsets, num_words, num_chunks, MAGIC: tl.constexpr, STRIDE: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    residual_GC, bit_GC, bitmap_G, _ = _residual(words, num_words, chunk, STRIDE)
    start = 2 + (chunk * 0 + num_words + 31) // 32
    at_GC = start + tl.load(offsets + chunk) + _ranks(bitmap_G, bit_GC)
    tl.store(message + at_GC, residual_GC.to(tl.int32, bitcast=True), mask=residual_GC != 0)
    if chunk == 0:
        tl.store(message, MAGIC)
        tl.store(message + 1, (start + tl.load(offsets + num_chunks)).to(tl.int32))


@triton.jit
def _count_bits(message, counts, num_words, TOO_MANY):
    """Number of words that the bitmap announces for a chunk; a huge number if it announces words that cannot exist."""
    chunk = tl.program_id(0).to(tl.int64)
    rem = tl.minimum(num_words - chunk * 1024, 1024).to(tl.int32)
    group_G = tl.arange(0, 32)
    bitmap_G = tl.load(message + 2 + chunk * 32 + group_G, mask=group_G * 32 < rem, other=0)
    count = tl.sum(num_ones(bitmap_G), axis=0).to(tl.int64)
    left_G = rem - group_G * 32
    beyond_G = tl.where((left_G > 0) & (left_G < 32), bitmap_G.to(tl.uint32, bitcast=True) >> (left_G & 31), 0)
    count += tl.where(tl.max(beyond_G, axis=0) > 0, TOO_MANY, 0)
    tl.store(counts + chunk, count)


@triton.jit
def _restore(message, out, offsets, num_words, SUMS: tl.constexpr):
    """Write the words of a chunk or, without ``SUMS``, their differences."""
    chunk = tl.program_id(0).to(tl.int64)
    bit_GC, whole_G, rem = _places(num_words, chunk)
    group_G = tl.arange(0, 32)
    bitmap_G = tl.load(message + 2 + chunk * 32 + group_G, mask=group_G * 32 < rem, other=0)
    start = 2 + (chunk * 0 + num_words + 31) // 32
    at_GC = start + tl.load(offsets + chunk) + _ranks(bitmap_G, bit_GC)
    kept_GC = ((bitmap_G[:, None] >> bit_GC) & 1) == 1
    residual_GC = tl.load(message + at_GC, mask=kept_GC, other=0)
    # Each plane is the sum of its residual word and those after it, modulo 2^32.
    after_GC = tl.sum(residual_GC, axis=1).to(tl.int32)[:, None] - tl.cumsum(residual_GC, axis=1).to(tl.int32)
    words_GC = _transposed((residual_GC + after_GC).to(tl.uint32, bitcast=True)).to(tl.int32, bitcast=True)
    words_GC = tl.where(whole_G[:, None], words_GC, residual_GC)
    if SUMS:
        # The sum of all words up to each one: within its group, plus the sums of earlier groups.
        total_G = tl.sum(words_GC, axis=1).to(tl.int32)
        before_G = tl.cumsum(total_G, axis=0).to(tl.int32) - total_G
        words_GC = tl.cumsum(words_GC, axis=1).to(tl.int32) + before_G[:, None]
    at_GC = group_G[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + chunk * 1024 + at_GC, words_GC, mask=at_GC < rem)


@triton.jit
def _accumulate(words, num_words, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Replace the differences of a chunk by the words: sums along each place of its records of STRIDE words."""
    RECORDS: tl.constexpr = 2048 // WIDTH  # at least 1024 / STRIDE, because WIDTH is less than twice STRIDE
    chunk = tl.program_id(0).to(tl.int64)
    rem = tl.minimum(num_words - chunk * 1024, 1024).to(tl.int32)
    place_RW = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (RECORDS, WIDTH))
    at_RW = tl.arange(0, RECORDS)[:, None] * STRIDE + place_RW
    inside_RW = (place_RW < STRIDE) & (at_RW < rem)
    words += chunk * 1024
    difference_RW = tl.load(words + at_RW, mask=inside_RW, other=0)
    tl.store(words + at_RW, tl.cumsum(difference_RW, axis=0).to(tl.int32), mask=inside_RW)
