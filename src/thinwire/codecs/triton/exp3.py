# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""exp3. All parts of a message except the escapes have fixed places. A prefix sum of the blocks' escape counts tells
the second pass where the escapes of each block go.

Shapes: B blocks of V = 512 values per program; W = 16 words per bit plane.
"""

from __future__ import annotations

from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.triton.launch import aligned, ceil_div, check_device, launch
from thinwire.codecs.triton.message import TOO_MANY, VariableCodec, header_of, num_ones, offsets_of
from thinwire.codecs.triton.tiles import widen
from thinwire.errors import WireError

__all__ = ["TritonExp3", "make"]

CODED, RAW = 0x33505845, 0x30505845
BLOCK = 512
BLOCKS = 4
"""Blocks per program: 16 values for each of 128 threads."""


@final
class TritonExp3(VariableCodec):
    """Lossless for bf16; variable length."""

    def _size(self, x: Tensor, found: int) -> int:
        num_words = _escapes_at(x.numel()) + ceil_div(found, 4)
        return 4 * min(num_words, 2 + ceil_div(x.numel(), 2))

    def _write(self, x: Tensor, room: Tensor) -> Tensor:
        """Write the message to the start of ``room``; return the number of its escapes, on the device."""
        numel, num_blocks = x.numel(), ceil_div(x.numel(), BLOCK)
        grid = (ceil_div(num_blocks, BLOCKS),)
        values, views = x.view(torch.int16), (room.view(torch.int32), room.view(torch.int16), room)
        if _escapes_at(numel) < 2 + ceil_div(numel, 2):
            counts = torch.empty(num_blocks, dtype=torch.int32, device=x.device)
            launch(_write_blocks, grid, values, *views, counts, numel, num_blocks, B=BLOCKS)
            offsets = offsets_of(counts)
        else:
            # Too few values for the message to be shorter. The kernel sees this by as many escapes as values.
            offsets = torch.full((num_blocks + 1,), numel, dtype=torch.int64, device=x.device)
        launch(_write_rest, grid, values, *views, offsets, numel, num_blocks, CODED=CODED, RAW=RAW, B=BLOCKS)
        return offsets[-1]

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        check_device(wire)
        numel, num_blocks = out.numel(), ceil_div(out.numel(), BLOCK)
        escapes_at, grid = _escapes_at(numel), (ceil_div(num_blocks, BLOCKS),)
        message = aligned(wire)
        message = message[: message.numel() // 4 * 4]
        views = message.view(torch.int32), message.view(torch.int16), message
        offsets = None
        if message.numel() >= 4 * escapes_at:
            counts = torch.empty(num_blocks, dtype=torch.int64, device=wire.device)
            launch(_count_escapes, grid, *views, counts, numel, num_blocks, TOO_MANY, B=BLOCKS)
            offsets = offsets_of(counts)
        magic, size, found = header_of(wire, "exp3", (CODED, RAW), offsets)
        if magic == RAW:
            if size != 8 + 4 * ceil_div(numel, 2):
                raise WireError(f"exp3: {numel} values are {2 * numel} bytes, the message holds {size - 8}")
            values = message[8 : 8 + 2 * numel].view(encoded)
            out.add_(values) if add else out.copy_(values)
            return
        there = size - 4 * escapes_at
        if there < 0:
            raise WireError(f"exp3: {numel} values need {4 * escapes_at - 8} bytes and escapes, {size - 8} are there")
        if offsets is None or 4 * ceil_div(found, 4) != there:
            raise WireError(
                f"exp3: {found % TOO_MANY} escapes are marked, {there} bytes of them are there"
                + (", and blocks announce other numbers" if found >= TOO_MANY else "")
            )
        target = out if add else out.view(torch.int16)
        launch(_expand, grid, *views, offsets, target, numel, num_blocks, ADD=add, B=BLOCKS)


make = TritonExp3
"""Make the codec of a spec."""


def _escapes_at(numel: int) -> int:
    """Offset of a message's escapes in words."""
    num_blocks = ceil_div(numel, BLOCK)
    return 2 + ceil_div(num_blocks, 4) + ceil_div(num_blocks, 2) + 48 * num_blocks + ceil_div(numel, 4)


# ------------------------------------------------------------------------------------------------------ device


@triton.jit
def _parts(numel, num_blocks):
    """Offsets in words of counts, planes, signs with mantissas, and escapes. The bases start at word 2."""
    counts_at = 2 + (num_blocks + 3) // 4
    planes_at = counts_at + (num_blocks + 1) // 2
    rest_at = planes_at + 48 * num_blocks
    return counts_at, planes_at, rest_at, rest_at + (numel + 3) // 4


@triton.jit
def _tile(numel, num_blocks, B: tl.constexpr):
    """The first block; the number of each block relative to it, and whether the block exists; the number of each value
    in the tile, and whether the value exists; the numbers of values and blocks in 64 bits."""
    first = tl.program_id(0).to(tl.int64) * B
    block_B = tl.arange(0, B)
    numel = first * 0 + numel
    num_blocks = first * 0 + num_blocks
    at_BV = block_B[:, None] * 512 + tl.arange(0, 512)[None, :]
    left = tl.minimum(numel - first * 512, B * 512).to(tl.int32)
    return first, block_B, first + block_B < num_blocks, at_BV, at_BV < left, numel, num_blocks


@triton.jit
def _codes(exponent_BV, base_B, inside_BV):
    code_BV = base_B[:, None] - exponent_BV
    code_BV = tl.where((code_BV >= 0) & (code_BV < 7), code_BV, 7)
    return tl.where(inside_BV, code_BV, 0)


@triton.jit
def _write_blocks(values, words, halves, data, counts, numel, num_blocks, B: tl.constexpr):
    first, block_B, there_B, at_BV, inside_BV, numel, num_blocks = _tile(numel, num_blocks, B)
    counts_at, planes_at, rest_at, escapes_at = _parts(numel, num_blocks)
    bits_BV = tl.load(values + first * 512 + at_BV, mask=inside_BV, other=0).to(tl.int32)
    exponent_BV = (bits_BV >> 7) & 255
    largest_B = tl.max(tl.where(inside_BV, exponent_BV, 0), axis=1)
    base_B = largest_B
    code_BV = _codes(exponent_BV, base_B, inside_BV)
    count_B = tl.sum((code_BV == 7).to(tl.int32), axis=1)
    for k in tl.static_range(1, 4):
        tried_B = tl.maximum(largest_B - k, 0)
        tried_BV = _codes(exponent_BV, tried_B, inside_BV)
        tried_count_B = tl.sum((tried_BV == 7).to(tl.int32), axis=1)
        better_B = tried_count_B < count_B
        base_B = tl.where(better_B, tried_B, base_B)
        count_B = tl.where(better_B, tried_count_B, count_B)
        code_BV = tl.where(better_B[:, None], tried_BV, code_BV)
    tl.store(counts + first + block_B, count_B, mask=there_B)
    tl.store(data + 8 + first + block_B, base_B.to(tl.uint8), mask=there_B)
    tl.store(halves + 2 * counts_at + first + block_B, count_B.to(tl.int16), mask=there_B)
    tl.store(data + 4 * rest_at + first * 512 + at_BV, _rest(bits_BV), mask=inside_BV)
    word_W = tl.arange(0, 16)
    bit = tl.arange(0, 32)[None, None, :]
    code_BWV = tl.reshape(code_BV, (B, 16, 32))
    words += planes_at + first * 48
    for k in tl.static_range(3):
        plane_BW = tl.sum(((code_BWV >> k) & 1) << bit, axis=2).to(tl.int32)
        tl.store(words + block_B[:, None] * 48 + k * 16 + word_W[None, :], plane_BW, mask=there_B[:, None])
    if first == 0:
        # Zeros up to the end of the last word of each part.
        i = tl.arange(0, 4)
        zero = tl.zeros((4,), tl.uint8)
        tl.store(data + 8 + num_blocks + i, zero, mask=8 + num_blocks + i < 4 * counts_at)
        end = 4 * counts_at + 2 * num_blocks
        tl.store(data + end + i, zero, mask=end + i < 4 * planes_at)
        tl.store(data + 4 * rest_at + numel + i, zero, mask=4 * rest_at + numel + i < 4 * escapes_at)


@triton.jit
def _rest(bits_BV):
    """Sign and mantissa of bf16 values."""
    return (((bits_BV >> 8) & 128) | (bits_BV & 127)).to(tl.uint8)


@triton.jit
def _write_rest(
    values,
    words,
    halves,
    data,
    offsets,
    numel,
    num_blocks,
    CODED: tl.constexpr,
    RAW: tl.constexpr,
    B: tl.constexpr,
):
    """Write the header and the escapes or, if there are too many of them, the unencoded values instead of all parts."""
    first, block_B, there_B, at_BV, inside_BV, numel, num_blocks = _tile(numel, num_blocks, B)
    _, _, _, escapes_at = _parts(numel, num_blocks)
    total = tl.load(offsets + num_blocks)
    coded_end = escapes_at + (total + 3) // 4
    raw_end = 2 + (numel + 1) // 2
    coded = coded_end < raw_end
    bits_BV = tl.load(values + first * 512 + at_BV, mask=inside_BV, other=0)
    if coded:
        exponent_BV = (bits_BV.to(tl.int32) >> 7) & 255
        base_B = tl.load(data + 8 + first + block_B, mask=there_B, other=0).to(tl.int32)
        escaped_BV = _codes(exponent_BV, base_B, inside_BV) == 7
        start_B = tl.load(offsets + first + block_B, mask=there_B, other=0)
        escape_BV = start_B[:, None] + _ranks(escaped_BV)
        tl.store(data + 4 * escapes_at + escape_BV, exponent_BV.to(tl.uint8), mask=escaped_BV)
    else:
        tl.store(halves + 4 + first * 512 + at_BV, bits_BV, mask=inside_BV)
    if first == 0:
        tl.store(words, tl.where(coded, CODED, RAW).to(tl.int32))
        tl.store(words + 1, tl.where(coded, coded_end, raw_end).to(tl.int32))
        i = tl.arange(0, 4)
        end = tl.where(coded, 4 * escapes_at + total, 8 + 2 * numel)
        tl.store(data + end + i, tl.zeros((4,), tl.uint8), mask=end + i < (end + 3) // 4 * 4)


@triton.jit
def _ranks(escaped_BV):
    """Number of escapes in the block before each value."""
    escaped_BV = escaped_BV.to(tl.int32)
    return tl.cumsum(escaped_BV, axis=1).to(tl.int32) - escaped_BV


@triton.jit
def _count_escapes(words, halves, data, counts, numel, num_blocks, TOO_MANY, B: tl.constexpr):
    """Number of escapes that the planes of a block mark; a huge number if the block's count contradicts them."""
    first, block_B, there_B, _, _, numel, num_blocks = _tile(numel, num_blocks, B)
    counts_at, planes_at, _, _ = _parts(numel, num_blocks)
    word_BW = block_B[:, None] * 16 + tl.arange(0, 16)[None, :]
    words += planes_at + first * 48 + block_B[:, None] * 48 + tl.arange(0, 16)[None, :]
    inside_BW = tl.broadcast_to(there_B[:, None], (B, 16))
    marked_BW = tl.load(words, mask=inside_BW, other=0)
    marked_BW &= tl.load(words + 16, mask=inside_BW, other=0)
    marked_BW &= tl.load(words + 32, mask=inside_BW, other=0)
    # Bits after the last value mark nothing.
    left_BW = tl.minimum(numel - first * 512, B * 512).to(tl.int32) - word_BW * 32
    partial_BW = (tl.full((B, 16), 1, tl.int32) << tl.minimum(tl.maximum(left_BW, 0), 31)) - 1
    marked_BW = tl.where(left_BW >= 32, marked_BW, marked_BW & partial_BW)
    count_B = tl.sum(num_ones(marked_BW), axis=1)
    announced_B = tl.load(halves + 2 * counts_at + first + block_B, mask=there_B, other=0).to(tl.int32) & 0xFFFF
    count_B = count_B.to(tl.int64) + tl.where(count_B != announced_B, TOO_MANY, 0)
    tl.store(counts + first + block_B, count_B, mask=there_B)


@triton.jit
def _expand(words, halves, data, offsets, out, numel, num_blocks, ADD: tl.constexpr, B: tl.constexpr):
    first, block_B, there_B, at_BV, inside_BV, numel, num_blocks = _tile(numel, num_blocks, B)
    _, planes_at, rest_at, escapes_at = _parts(numel, num_blocks)
    column_BV = tl.broadcast_to(tl.arange(0, 512)[None, :], (B, 512))
    words += planes_at + first * 48 + block_B[:, None] * 48 + (column_BV >> 5)
    bit_BV = column_BV & 31
    code_BV = (tl.load(words, mask=inside_BV, other=0) >> bit_BV) & 1
    code_BV |= ((tl.load(words + 16, mask=inside_BV, other=0) >> bit_BV) & 1) << 1
    code_BV |= ((tl.load(words + 32, mask=inside_BV, other=0) >> bit_BV) & 1) << 2
    escaped_BV = code_BV == 7
    start_B = tl.load(offsets + first + block_B, mask=there_B, other=0)
    escape_BV = start_B[:, None] + _ranks(escaped_BV)
    exponent_BV = tl.load(data + 4 * escapes_at + escape_BV, mask=escaped_BV, other=0).to(tl.int32)
    base_B = tl.load(data + 8 + first + block_B, mask=there_B, other=0).to(tl.int32)
    exponent_BV = tl.where(escaped_BV, exponent_BV, (base_B[:, None] - code_BV) & 255)
    rest_BV = tl.load(data + 4 * rest_at + first * 512 + at_BV, mask=inside_BV, other=0).to(tl.int32)
    bits_BV = (((rest_BV & 128) << 8) | (exponent_BV << 7) | (rest_BV & 127)).to(tl.int16)
    out += first * 512 + at_BV
    if ADD:
        tl.store(out, tl.load(out, mask=inside_BV, other=0) + widen(bits_BV, "bfloat16"), mask=inside_BV)
    else:
        tl.store(out, bits_BV, mask=inside_BV)
