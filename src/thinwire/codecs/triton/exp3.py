# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""exp3. All parts of a message except the escapes have fixed places. A prefix sum of the blocks' escape counts tells
the second pass where the escapes of each block go.

Kernels handle four values at a time, as the four bytes of a word, called quad. *Spread* bytes are those of values
0, 2, 1 and 3: pairs of bf16 values become words of spread bytes, and back, by shifts and masks.

Shapes: B blocks per program, of 512 values: Q = 128 quads, H = 64 pairs of quads, W = 16 words per bit plane.
T = B * W words of a bit plane are one dimension where threads read and write single values, because releases of Triton
differ in which of two dimensions without neighbours comes first, and would exchange all values between threads.
"""

from __future__ import annotations

from typing import final

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.bits import store
from thinwire.codecs.reference.exp3 import BLOCK, CODED, RAW
from thinwire.codecs.triton.launch import aligned, ceil_div, check_device, launch
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

BLOCKS = 8
"""Blocks per program: 32 values for each of 128 threads."""
WORD_BLOCKS = 64
"""Blocks per program of kernels that read bit planes only."""


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
        pairs = words_of(x)
        values, views = pairs.view(torch.int16), (room.view(torch.int32), room)
        if _escapes_at(numel) < 2 + ceil_div(numel, 2):
            counts = torch.empty(num_blocks, dtype=torch.int32, device=x.device)
            launch(_write_blocks, grid, pairs, *views, counts, numel, num_blocks, B=BLOCKS)
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
        views = message.view(torch.int32), message
        offsets = None
        if message.numel() >= 4 * escapes_at:
            counts = torch.empty(num_blocks, dtype=torch.int64, device=wire.device)
            word_grid = (ceil_div(num_blocks, WORD_BLOCKS),)
            launch(_count_escapes, word_grid, *views, counts, numel, num_blocks, TOO_MANY, B=WORD_BLOCKS)
            offsets = offsets_of(counts)
        magic, size, found = header_of(wire, "exp3", (CODED, RAW), offsets)
        if magic == RAW:
            if size != 8 + 4 * ceil_div(numel, 2):
                raise WireError(f"exp3: {numel} values are {2 * numel} bytes, the message holds {size - 8}")
            store(message[8 : 8 + 2 * numel].view(encoded), out, add=add)
            return
        there = size - 4 * escapes_at
        if there < 0:
            raise WireError(f"exp3: {numel} values need {4 * escapes_at - 8} bytes and escapes, {size - 8} are there")
        if offsets is None or 4 * ceil_div(found, 4) != there:
            raise WireError(
                f"exp3: {found % TOO_MANY} escapes are marked, {there} bytes of them are there"
                + (", and blocks announce other numbers" if found >= TOO_MANY else "")
            )
        with room_for_values(out, encoded, add=add) as room:
            launch(_expand, grid, *views, offsets, room, room.view(torch.int16), numel, num_blocks, B=BLOCKS)


make = TritonExp3
"""Make the codec of a spec."""


def _escapes_at(numel: int) -> int:
    """Offset of a message's escapes in words."""
    num_blocks = ceil_div(numel, BLOCK)
    return 2 + ceil_div(num_blocks, 4) + ceil_div(num_blocks, 2) + 48 * num_blocks + ceil_div(numel, 4)


# ------------------------------------------------------------------------------------------------------ device

ONES = tl.constexpr(0x01010101)
HIGH = tl.constexpr(0x80808080)
"""The highest bit of every byte."""
ALL = tl.constexpr(0xFFFFFFFF)
"""All bits: x ^ ALL is ~x, which the interpreter of Triton 3.6 cannot compute of unsigned words with NumPy 2."""
TO_NIBBLE = tl.constexpr((1 << 28) + (1 << 22) + (1 << 13) + (1 << 7))
"""Times the lowest bits of four spread bytes: brings them to the highest four bits, in the order of the values."""
FROM_NIBBLE = tl.constexpr(1 + (1 << 6) + (1 << 15) + (1 << 21))
"""Times four bits: brings them to the lowest bits of spread bytes; other bits of these have to be cleared."""


@triton.jit
def _parts(numel, num_blocks):
    """Offsets in words of counts, planes, signs with mantissas, and escapes. The bases start at word 2."""
    counts_at = 2 + (num_blocks + 3) // 4
    planes_at = counts_at + (num_blocks + 1) // 2
    rest_at = planes_at + 48 * num_blocks
    return counts_at, planes_at, rest_at, rest_at + (numel + 3) // 4


@triton.jit
def _tile(numel, num_blocks, B: tl.constexpr):
    """The first block; the number of each block relative to it, and whether the block exists; the number of values from
    the first block on, at most those of B blocks; the numbers of values and blocks in 64 bits."""
    first = tl.program_id(0).to(tl.int64) * B
    block_B = tl.arange(0, B)
    numel = first * 0 + numel
    num_blocks = first * 0 + num_blocks
    rem = tl.minimum(numel - first * 512, B * 512).to(tl.int32)
    return first, block_B, first + block_B < num_blocks, rem, numel, num_blocks


@triton.jit
def _write_blocks(pairs, words, data, counts, numel, num_blocks, B: tl.constexpr):
    first, block_B, there_B, rem, numel, num_blocks = _tile(numel, num_blocks, B)
    counts_at, planes_at, rest_at, _ = _parts(numel, num_blocks)
    left_BQ, right_BQ = _load_quads(pairs + first * 256, rem, B)
    # Shifted to the top, exponents are in the order of the words that they begin.
    highest_BQ = tl.maximum(tl.maximum(left_BQ << 1, right_BQ << 1), tl.maximum(left_BQ << 17, right_BQ << 17))
    largest_B = tl.max(highest_BQ, axis=1) >> 24
    exponent_BQ = ((left_BQ >> 7) & 0x00FF00FF) | ((right_BQ << 1) & 0xFF00FF00)
    # No byte exceeds the largest, so no byte borrows. Past the end, the difference is 0, which is code 0.
    below_BQ = (largest_B * ONES)[:, None] - exponent_BQ
    inside_BQ = tl.full((B, 128), 0xFFFFFFFF, tl.uint32)
    if rem < B * 512:
        inside_BQ = _existing(rem, B)
        below_BQ &= inside_BQ
    # For each base, largest - k, bit 7 of every byte: whether its code is 0 to 6. If largest < k, none is, so that a
    # base below 0 is never the best.
    small_BQ = below_BQ & 0x7F7F7F7F
    fits_BQ = (below_BQ ^ ALL) & HIGH
    best_B = tl.zeros((B,), tl.uint32)
    count_B = 512 - _number(_coded(small_BQ + HIGH, fits_BQ))
    values_B = tl.minimum(tl.maximum(rem - block_B * 512, 0), 512).to(tl.uint32)
    for k in tl.static_range(1, 4):
        tried_B = values_B - _number(_coded(small_BQ + (0x80 - k) * ONES, fits_BQ))
        better_B = tried_B < count_B
        best_B = tl.where(better_B, k, best_B)
        count_B = tl.where(better_B, tried_B, count_B)
    shifted_BQ = small_BQ + ((0x80 - best_B) * ONES)[:, None]
    coded_BQ = _coded(shifted_BQ, fits_BQ)
    code_BQ = ((shifted_BQ & 0x07070707) | (((coded_BQ >> 7) ^ ONES) * 7)) & inside_BQ
    tl.store(counts + first + block_B, count_B.to(tl.int32), mask=there_B)
    tl.store(data + 8 + first + block_B, (largest_B - best_B).to(tl.uint8), mask=there_B)
    tl.store(_halves(words + counts_at) + first + block_B, count_B.to(tl.int16), mask=there_B)
    _store_planes(data + 4 * (planes_at + first * 48), code_BQ, block_B, there_B, B)
    quad_BQ = block_B[:, None] * 128 + tl.arange(0, 128)[None, :]
    rest_BQ = _rest(left_BQ, right_BQ).to(tl.int32, bitcast=True)
    tl.store(words + rest_at + first * 128 + quad_BQ, rest_BQ, mask=quad_BQ * 4 < rem)
    if first == 0:
        # Zeros up to the end of the last word of bases and counts.
        i = tl.arange(0, 4)
        zero = tl.zeros((4,), tl.uint8)
        tl.store(data + 8 + num_blocks + i, zero, mask=8 + num_blocks + i < 4 * counts_at)
        end = 4 * counts_at + 2 * num_blocks
        tl.store(data + end + i, zero, mask=end + i < 4 * planes_at)


@triton.jit
def _halves(words):
    """A pointer to 32-bit words as one to 16-bit words."""
    return words.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def _load_quads(pairs, rem, B: tl.constexpr):
    """Values 0 and 1, and values 2 and 3 of every quad, as uint32 of shape (B, Q); zeros past the end.

    The shape that is loaded gives a block to 16 threads, whose sums need no shared memory: see ``tiles.load_rows``.
    """
    number_N = tl.arange(0, 4 * B)
    column_NC = (number_N // B * 64)[:, None] + tl.arange(0, 64)[None, :]
    at_NC = (number_N % B * 256)[:, None] + column_NC
    pairs += at_NC
    pair_NC = tl.load(pairs, mask=at_NC * 2 < rem, other=0) if rem < B * 512 else tl.load(pairs)
    pair_BP = tl.reshape(tl.permute(tl.reshape(pair_NC, (4, B, 64)), (1, 0, 2)), (B, 256))
    return tl.split(tl.reshape(pair_BP, (B, 128, 2)).to(tl.uint32, bitcast=True))


@triton.jit
def _existing(rem, B: tl.constexpr):
    """Spread bytes that are 255 where there is a value, and 0 past the end."""
    left_BQ = rem - (tl.arange(0, B)[:, None] * 512 + tl.arange(0, 128)[None, :] * 4)
    low_BQ = tl.where(left_BQ >= 2, 0x00FF00FF, tl.where(left_BQ == 1, 0xFF, 0))
    high_BQ = tl.where(left_BQ >= 4, -0x00FF0100, tl.where(left_BQ == 3, 0x0000FF00, 0))
    return (low_BQ | high_BQ).to(tl.uint32, bitcast=True)


@triton.jit
def _coded(shifted_BQ, fits_BQ):
    """Bit 7 of every byte: whether ``shifted`` is 128 + (0 to 6), if ``fits`` says that it did not overflow."""
    return shifted_BQ & ((shifted_BQ - 0x07070707) ^ ALL) & fits_BQ


@triton.jit
def _number(flag_BQ):
    """The number of bytes of a block whose bit 7 is set. Each of a word's four sums is at most 128."""
    bytes_B = tl.sum(flag_BQ >> 7, axis=1).to(tl.uint32)
    halves_B = (bytes_B & 0x00FF00FF) + ((bytes_B >> 8) & 0x00FF00FF)
    return (halves_B + (halves_B >> 16)) & 0xFFFF


@triton.jit
def _rest(left_BQ, right_BQ):
    """Signs and mantissas of quads, in the order of the values."""
    low_BQ = (left_BQ & 0x00FF00FF) | ((right_BQ << 8) & 0xFF00FF00)
    high_BQ = ((left_BQ >> 8) & 0x00FF00FF) | (right_BQ & 0xFF00FF00)
    return _swapped((low_BQ & 0x7F7F7F7F) | (high_BQ & HIGH))


@triton.jit
def _swapped(x):
    """Swap the two bytes in the middle: from spread bytes to those in the order of the values, and back."""
    return (x & 0xFF0000FF) | ((x >> 8) & 0x0000FF00) | ((x << 8) & 0x00FF0000)


@triton.jit
def _store_planes(planes, code_BQ, block_B, there_B, B: tl.constexpr):
    for k in tl.static_range(3):
        nibble_BQ = ((code_BQ & (ONES << k)) * (TO_NIBBLE >> k)) >> 28
        even_BH, odd_BH = tl.split(tl.reshape(nibble_BQ, (B, 64, 2)))
        at_BH = block_B[:, None] * 192 + k * 64 + tl.arange(0, 64)[None, :]
        tl.store(planes + at_BH, (even_BH | (odd_BH << 4)).to(tl.uint8), mask=there_B[:, None])


@triton.jit
def _write_rest(
    values,
    words,
    data,
    offsets,
    numel,
    num_blocks,
    CODED: tl.constexpr,
    RAW: tl.constexpr,
    B: tl.constexpr,
):
    """Write the header and the escapes or, if there are too many of them, the unencoded values instead of all parts."""
    first, block_B, there_B, rem, numel, num_blocks = _tile(numel, num_blocks, B)
    _, planes_at, _, escapes_at = _parts(numel, num_blocks)
    total = tl.load(offsets + num_blocks)
    coded_end = escapes_at + (total + 3) // 4
    raw_end = 2 + (numel + 1) // 2
    coded = coded_end < raw_end
    values += first * 512
    if coded:
        marked_BW = _marked(words + planes_at + first * 48, block_B, there_B)
        from_T = values + tl.arange(0, B * 16) * 32
        to_T = data + 4 * escapes_at + tl.reshape(_before(marked_BW, offsets + first, block_B, there_B), (B * 16,))
        marked_T = tl.reshape(marked_BW, (B * 16,))
        # Four loads at a time, because the compiler moves no load before a store.
        for quad in tl.static_range(8):
            a_T, b_T, c_T, d_T = _flags(marked_T, quad)
            value_a_T = tl.load(from_T + 4 * quad, mask=a_T == 1, other=0)
            value_b_T = tl.load(from_T + (4 * quad + 1), mask=b_T == 1, other=0)
            value_c_T = tl.load(from_T + (4 * quad + 2), mask=c_T == 1, other=0)
            value_d_T = tl.load(from_T + (4 * quad + 3), mask=d_T == 1, other=0)
            tl.store(to_T, (value_a_T >> 7).to(tl.uint8), mask=a_T == 1)
            tl.store(to_T + a_T, (value_b_T >> 7).to(tl.uint8), mask=b_T == 1)
            tl.store(to_T + (a_T + b_T), (value_c_T >> 7).to(tl.uint8), mask=c_T == 1)
            to_T += a_T + b_T + c_T
            tl.store(to_T, (value_d_T >> 7).to(tl.uint8), mask=d_T == 1)
            to_T += d_T
    else:
        at_BV = block_B[:, None] * 512 + tl.arange(0, 512)[None, :]
        bits_BV = tl.load(values + at_BV, mask=at_BV < rem, other=0)
        tl.store(_halves(words + 2) + first * 512 + at_BV, bits_BV, mask=at_BV < rem)
    if first == 0:
        tl.store(words, tl.where(coded, CODED, RAW).to(tl.int32))
        tl.store(words + 1, tl.where(coded, coded_end, raw_end).to(tl.int32))
        i = tl.arange(0, 4)
        end = tl.where(coded, 4 * escapes_at + total, 8 + 2 * numel)
        tl.store(data + end + i, tl.zeros((4,), tl.uint8), mask=end + i < (end + 3) // 4 * 4)


@triton.jit
def _marked(planes, block_B, there_B):
    """Bits of the values whose code is 7, as words (B, W)."""
    planes += block_B[:, None] * 48 + tl.arange(0, 16)[None, :]
    marked_BW = tl.load(planes, mask=there_B[:, None], other=0)
    marked_BW &= tl.load(planes + 16, mask=there_B[:, None], other=0)
    return marked_BW & tl.load(planes + 32, mask=there_B[:, None], other=0)


@triton.jit
def _before(marked_BW, offsets, block_B, there_B):
    """Number of the first escape of each word, in 64 bits."""
    ones_BW = num_ones(marked_BW)
    start_B = tl.load(offsets + block_B, mask=there_B, other=0)
    return start_B[:, None] + (tl.cumsum(ones_BW, axis=1).to(tl.int32) - ones_BW)


@triton.jit
def _flags(marked_T, quad):
    """Of each of the four values of a quad of each word: 1 if it is marked, or 0."""
    bits_T = marked_T >> (4 * quad)
    return bits_T & 1, (bits_T >> 1) & 1, (bits_T >> 2) & 1, (bits_T >> 3) & 1


@triton.jit
def _before_the_end(marked_BW, block_B, rem):
    """Without bits after the last value, which mark nothing."""
    left_BW = rem - (block_B[:, None] * 512 + tl.arange(0, 16)[None, :] * 32)
    partial_BW = (tl.full(marked_BW.shape, 1, tl.int32) << tl.minimum(tl.maximum(left_BW, 0), 31)) - 1
    return tl.where(left_BW >= 32, marked_BW, marked_BW & partial_BW)


@triton.jit
def _count_escapes(words, data, counts, numel, num_blocks, TOO_MANY, B: tl.constexpr):
    """Number of escapes that the planes of a block mark; a huge number if the block's count contradicts them."""
    first, block_B, there_B, rem, numel, num_blocks = _tile(numel, num_blocks, B)
    counts_at, planes_at, _, _ = _parts(numel, num_blocks)
    marked_BW = _before_the_end(_marked(words + planes_at + first * 48, block_B, there_B), block_B, rem)
    count_B = tl.sum(num_ones(marked_BW), axis=1)
    announced_B = tl.load(_halves(words + counts_at) + first + block_B, mask=there_B, other=0).to(tl.int32) & 0xFFFF
    count_B = count_B.to(tl.int64) + tl.where(count_B != announced_B, TOO_MANY, 0)
    tl.store(counts + first + block_B, count_B, mask=there_B)


@triton.jit
def _expand(words, data, offsets, pairs, values, numel, num_blocks, B: tl.constexpr):
    """Write all values as if none were escaped, then those that are."""
    first, block_B, there_B, rem, numel, num_blocks = _tile(numel, num_blocks, B)
    _, planes_at, rest_at, escapes_at = _parts(numel, num_blocks)
    code_BQ = _load_planes(data + 4 * (planes_at + first * 48), block_B, there_B, B)
    base_B = tl.load(data + 8 + first + block_B, mask=there_B, other=0).to(tl.uint32) * ONES
    # base - code in every byte, modulo 256: the highest bit of each byte takes what the others borrow.
    exponent_BQ = ((base_B | HIGH)[:, None] - code_BQ) ^ ((base_B ^ ALL) & HIGH)[:, None]
    quad_BQ = block_B[:, None] * 128 + tl.arange(0, 128)[None, :]
    rest_BQ = tl.load(words + rest_at + first * 128 + quad_BQ, mask=quad_BQ * 4 < rem, other=0)
    rest_BQ = _swapped(rest_BQ.to(tl.uint32, bitcast=True))
    left_BQ = ((rest_BQ & 0x00800080) << 8) | ((exponent_BQ & 0x00FF00FF) << 7) | (rest_BQ & 0x007F007F)
    right_BQ = (rest_BQ & 0x80008000) | ((exponent_BQ & 0xFF00FF00) >> 1) | ((rest_BQ >> 8) & 0x007F007F)
    pair_BP = tl.reshape(tl.join(left_BQ, right_BQ), (B, 256)).to(tl.int32, bitcast=True)
    at_BP = block_B[:, None] * 256 + tl.arange(0, 256)[None, :]
    tl.store(pairs + first * 256 + at_BP, pair_BP, mask=at_BP * 2 < rem)
    marked_BW = _before_the_end(_marked(words + planes_at + first * 48, block_B, there_B), block_B, rem)
    from_T = data + 4 * escapes_at + tl.reshape(_before(marked_BW, offsets + first, block_B, there_B), (B * 16,))
    rest_at_T = data + 4 * rest_at + first * 512 + tl.arange(0, B * 16) * 32
    to_T = values + first * 512 + tl.arange(0, B * 16) * 32
    marked_T = tl.reshape(marked_BW, (B * 16,))
    tl.debug_barrier()  # other threads have written the pairs
    for quad in tl.static_range(8):
        a_T, b_T, c_T, d_T = _flags(marked_T, quad)
        value_a_T = _escaped(from_T, rest_at_T + 4 * quad, a_T)
        value_b_T = _escaped(from_T + a_T, rest_at_T + (4 * quad + 1), b_T)
        value_c_T = _escaped(from_T + (a_T + b_T), rest_at_T + (4 * quad + 2), c_T)
        from_T += a_T + b_T + c_T
        value_d_T = _escaped(from_T, rest_at_T + (4 * quad + 3), d_T)
        from_T += d_T
        tl.store(to_T + 4 * quad, value_a_T, mask=a_T == 1)
        tl.store(to_T + (4 * quad + 1), value_b_T, mask=b_T == 1)
        tl.store(to_T + (4 * quad + 2), value_c_T, mask=c_T == 1)
        tl.store(to_T + (4 * quad + 3), value_d_T, mask=d_T == 1)


@triton.jit
def _escaped(escapes, rests, flag_T):
    """Values of which the exponents are escapes, where the flag is 1."""
    exponent_T = tl.load(escapes, mask=flag_T == 1, other=0).to(tl.int32)
    rest_T = tl.load(rests, mask=flag_T == 1, other=0).to(tl.int32)
    return (((rest_T & 128) << 8) | (exponent_T << 7) | (rest_T & 127)).to(tl.int16)


@triton.jit
def _load_planes(planes, block_B, there_B, B: tl.constexpr):
    """Codes of quads, as spread bytes."""
    code_BQ = tl.zeros((B, 128), tl.uint32)
    for k in tl.static_range(3):
        at_BH = block_B[:, None] * 192 + k * 64 + tl.arange(0, 64)[None, :]
        byte_BH = tl.load(planes + at_BH, mask=there_B[:, None], other=0).to(tl.uint32)
        nibble_BQ = tl.reshape(tl.join(byte_BH & 15, byte_BH >> 4), (B, 128))
        code_BQ |= ((nibble_BQ * FROM_NIBBLE) & ONES) << k
    return code_BQ
