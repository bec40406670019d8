# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""ZFP at a fixed rate.

Shapes: B blocks of four values per program. A block has at most 128 bits: two 64-bit words, low and high. Bit planes
are encoded in runs, and decoded one by one with a table.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.coder import Sum
from thinwire.codecs.triton.launch import aligned, aligned_rows, ceil_div, check_device, launch, room_for
from thinwire.codecs.triton.slices import Slices, slice_of
from thinwire.codecs.triton.tiles import narrow, widen
from thinwire.codecs.triton.transcode import Form

__all__ = ["TritonZfp", "make"]

ENCODED_BLOCKS = 128
"""Blocks that a program encodes. Their bits fill whole words at any rate, so that programs share no words. Each thread
has one block, so that its values and words need no exchange between threads."""
DECODED_BLOCKS = 256
"""Blocks that a program decodes."""
HEADER = tl.constexpr(9)
WINDOW = tl.constexpr(8)
"""Largest number of bits in the code of one plane."""


@final
class TritonZfp(Codec):
    """Fixed length, lossy. One launch encodes or decodes any number of messages. If blocks do not end at words, shared
    words are cleared first, and each slice takes a launch."""

    backend: ClassVar[str] = "triton"

    def _encode(self, x: Tensor, wire: Tensor, seed: int) -> int:
        del seed
        check_device(x)
        total = self.max_wire_bytes(x.numel(), x.dtype)
        room = room_for(wire, total)
        if self.spec.zfp_block_bits % 32:
            room.zero_()
        self._launch_encode(x, None, room.view(1, -1), x.numel())
        if room.data_ptr() != wire.data_ptr():
            wire[:total].copy_(room)
        return total

    def _encode_slices(self, x: Tensor, bounds: Sequence[tuple[int, int]], wires: Tensor, seed: int) -> None:
        check_device(x)
        if self.spec.zfp_block_bits % 32 or wires.data_ptr() % 16:
            super()._encode_slices(x, bounds, wires, seed)
            return
        self._launch_encode(x, bounds, wires, max(stop - start for start, stop in bounds))

    def _launch_encode(self, x: Tensor, bounds: Sequence[tuple[int, int]] | None, wires: Tensor, longest: int) -> None:
        form, slices = Form.of_tensor(x.dtype), Slices.of(bounds, x)
        launch(
            _encode,
            (ceil_div(longest, 4 * ENCODED_BLOCKS), len(wires)),
            form.view(x),
            wires.view(torch.int32),
            wires.stride(0) // 16,
            _plane_codes(x.device),
            slices.table,
            longest,
            slices.start,
            slices.step,
            SLICES=slices.mode,
            KIND=form.kind,
            BLOCK_BITS=self.spec.zfp_block_bits,
            B=ENCODED_BLOCKS,
        )

    def _decode(self, wire: Tensor, out: Tensor, encoded: torch.dtype, *, add: bool) -> None:
        del encoded
        check_device(wire)
        self._launch_decode(aligned(wire).view(1, -1), out, 1.0, add=add)

    def _decode_sum(self, total: Sum, out: Tensor) -> None:
        check_device(total.wires)
        if total.onto is not None:
            super()._decode_sum(total, out)
            return
        rows = aligned_rows(total.wires, self.max_wire_bytes(total.numel, total.encoded))
        self._launch_decode(rows, out, total.scale, add=False)

    def _launch_decode(self, rows: Tensor, out: Tensor, scale: float, *, add: bool) -> None:
        form, words = Form.of_tensor(out.dtype), rows.view(torch.int32)
        launch(
            _decode,
            (ceil_div(out.numel(), 4 * DECODED_BLOCKS),),
            words,
            words.stride(0) // 4 if len(words) > 1 else 0,
            words.shape[1],
            form.view(out),
            _plane_values(out.device),
            out.numel(),
            scale,
            COUNT=len(words),
            KIND=form.kind,
            BLOCK_BITS=self.spec.zfp_block_bits,
            ADD=add,
            B=DECODED_BLOCKS,
        )


# ------------------------------------------------------------------------------------------------------ tables


make = TritonZfp
"""Make the codec of a spec."""


def _plane_code(significant: int, plane: int) -> int:
    """For one bit plane: the code, from the highest of eight bits on, | its length << 8."""
    bits = [plane >> index & 1 for index in range(significant)]
    at = significant
    while at < 4:
        rest = plane >> at
        bits.append(int(rest != 0))
        if not rest:
            break
        while at < 3:
            bits.append(plane >> at & 1)
            if bits[-1]:
                break
            at += 1
        at += 1
    return sum(bit << 7 - index for index, bit in enumerate(bits)) | len(bits) << 8


def _plane_value(there: int, significant: int, window: int) -> int:
    """The inverse for the next eight bits, of which ``there`` exist: the plane | the bits that it takes << 8 | the
    number of values that are significant afterwards << 12. A unary code ends at the end of its block; other missing
    bits are 0."""
    bits = [window >> index & 1 for index in range(there)]
    taken = min(significant, there)
    plane = sum(bit << index for index, bit in enumerate(bits[:taken]))
    while significant < 4 and taken < there:
        taken += 1
        if not bits[taken - 1]:
            break
        while significant < 3 and taken < there:
            taken += 1
            if bits[taken - 1]:
                break
            significant += 1
        plane |= 1 << significant
        significant += 1
    return plane | taken << 8 | significant << 12


@functools.cache
def _plane_codes(device: torch.device) -> Tensor:
    """Codes of the 16 planes for up to two significant values."""
    codes = [_plane_code(significant, plane) for significant in range(3) for plane in range(16)]
    return torch.tensor(codes, dtype=torch.int16).to(device)


@functools.cache
def _plane_values(device: torch.device) -> Tensor:
    """Planes of the 256 windows for each number of significant values and each number of available bits."""
    values = [_plane_value(t, significant, w) for t in range(9) for significant in range(5) for w in range(256)]
    return torch.tensor(values, dtype=torch.int16).to(device)


# ------------------------------------------------------------------------------------------------------ device


@triton.jit
def _four(x_B4, B: tl.constexpr):
    """The four values of each block, as four tensors (B)."""
    xz_B2, yw_B2 = tl.split(tl.reshape(x_B4, (B, 2, 2)))
    x_B, z_B = tl.split(xz_B2)
    y_B, w_B = tl.split(yw_B2)
    return x_B, y_B, z_B, w_B


@triton.jit
def _integer(x_B, factor_B, overflows_B):
    # For such small exponents, libzfp's factor overflows fp32, and x86 casts infinities and NaN to the smallest
    # integer. Kernels avoid the cast, because its result differs between GPUs.
    x_B = tl.where(overflows_B, 0.0, x_B)
    return tl.where(overflows_B, -2147483648, (x_B * factor_B).to(tl.int32))


@triton.jit
def _negabinary(x_B):
    return (x_B.to(tl.uint32, bitcast=True) + 0xAAAAAAAA) ^ 0xAAAAAAAA


@triton.jit(do_not_specialize=["row_step"])
def _encode(
    x,
    words,
    row_step,
    codes,
    table,
    numel,
    start,
    step,
    SLICES: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * B * 4
    offset, numel = slice_of(table, numel, start, step, row, SLICES)
    if first >= numel:
        return
    left = tl.minimum(numel - first, B * 4).to(tl.int32)
    words += row * row_step * 4
    first_B4 = tl.arange(0, B)[:, None] * 4
    index_B4 = tl.arange(0, 4)[None, :]
    x += offset + first
    if left == B * 4:
        x_B4 = widen(tl.load(x + first_B4 + index_B4), KIND)
    else:
        # A partial last block is completed by its values: the third by its second, if it exists, the others by its
        # first.
        instead_B4 = tl.where((index_B4 == 2) & (first_B4 + 1 < left), first_B4 + 1, first_B4)
        at_B4 = tl.where(first_B4 + index_B4 < left, first_B4 + index_B4, instead_B4)
        x_B4 = widen(tl.load(x + at_B4, mask=at_B4 < left, other=0), KIND)
    x_B, y_B, z_B, w_B = _four(x_B4, B)

    largest_B = tl.maximum(_magnitude(x_B), _magnitude(y_B))
    largest_B = tl.maximum(largest_B, tl.maximum(_magnitude(z_B), _magnitude(w_B)))
    biased_B = (largest_B >> 23).to(tl.int32)
    poisoned_B = biased_B == 255
    coded_B = (largest_B > 0) & (biased_B < 255)
    # The exponent e with 2^(e-1) <= largest < 2^e is biased - 126, and -126 for denormals.
    overflows_B = (biased_B < 29) | poisoned_B
    factor_B = (tl.where(overflows_B, 127, 283 - biased_B) << 23).to(tl.float32, bitcast=True)
    x_B = _integer(x_B, factor_B, overflows_B)
    y_B = _integer(y_B, factor_B, overflows_B)
    z_B = _integer(z_B, factor_B, overflows_B)
    w_B = _integer(w_B, factor_B, overflows_B)

    x_B = (x_B + w_B) >> 1
    w_B = w_B - x_B
    z_B = (z_B + y_B) >> 1
    y_B = y_B - z_B
    x_B = (x_B + z_B) >> 1
    z_B = z_B - x_B
    w_B = (w_B + y_B) >> 1
    y_B = y_B - w_B
    w_B = w_B + (y_B >> 1)
    y_B = y_B - (w_B >> 1)
    x_B = _negabinary(x_B)
    y_B = _negabinary(y_B)
    z_B = _negabinary(z_B)
    w_B = _negabinary(w_B)

    header_B = tl.where(coded_B, 2 * (biased_B + 1) + 1, tl.where(poisoned_B, 1, 0)).to(tl.uint32)
    low_B, high_B = _planes(x_B, y_B, z_B, w_B, codes, BLOCK_BITS)
    low_B = header_B | tl.where(coded_B, low_B, 0)
    high_B = tl.where(coded_B, high_B, 0)
    block_B = first // 4 + tl.arange(0, B)
    inside_B = tl.arange(0, B) * 4 < left
    if BLOCK_BITS % 32 == 0:
        to_B = words + block_B * (BLOCK_BITS // 32)
        for i in tl.static_range(BLOCK_BITS // 32):
            half_B = low_B if i < 2 else high_B
            if i % 2 == 1:
                half_B = half_B >> 32
            tl.store(to_B + i, half_B.to(tl.int32), mask=inside_B)
        # Messages consist of whole pairs of words.
        num_words = (numel + 3) // 4 * (BLOCK_BITS // 32)
        if (first + left == numel) & (num_words % 2 == 1):
            tl.store(words + num_words, 0)
    else:
        low_B, high_B = _cut(low_B.to(tl.uint64), high_B, BLOCK_BITS)
        start_B = block_B * BLOCK_BITS
        to_B = words + (start_B >> 5)
        shift_B = (start_B & 31).to(tl.uint64)
        _or(to_B, low_B << shift_B, inside_B)
        _or(to_B + 2, ((low_B >> 1) >> (63 - shift_B)) | (high_B << shift_B), inside_B)
        if BLOCK_BITS > 64:
            _or(to_B + 4, (high_B >> 1) >> (63 - shift_B), inside_B)


@triton.jit
def _planes(x_B, y_B, z_B, w_B, codes, BLOCK_BITS: tl.constexpr):
    """The codes of all bit planes behind the place of the header, as a low and a high word.

    Plane 0 is the highest bit of the arguments. So the codes are collected from the highest bit of a word on, and the
    words are reversed at the end.

    The number of significant values only grows, so the planes of a block form four runs: those before its first set
    bit, those with one and with two significant values, and those with more. In each run all planes but the last have
    codes of one length, so that the bits of a run move together. Only the last plane of each of the first three runs,
    in which further values become significant, takes a table.
    """
    zw_B = z_B | w_B
    first_B = _first_plane(x_B | y_B | zw_B)
    second_B = _first_plane(y_B | zw_B)
    third_B = _first_plane(zw_B)
    low_B = tl.zeros(x_B.shape, tl.uint32 if BLOCK_BITS <= 32 else tl.uint64)
    high_B = tl.zeros(x_B.shape, tl.uint64)

    at_B = HEADER + first_B
    code_B, length_B = _change(x_B, y_B, z_B, w_B, first_B, 0, codes, first_B < 32)
    low_B, high_B = _append(low_B, high_B, at_B, code_B, BLOCK_BITS)
    at_B += length_B
    # One significant value: its bit and a zero. The changes before take at least three bits.
    planes_B = tl.maximum(second_B - first_B - 1, 0)
    run_B = _run(x_B, first_B, planes_B)
    for i in tl.static_range((min(BLOCK_BITS, 76) - 12 + 31) // 32):
        low_B, high_B = _append(low_B, high_B, at_B + 32 * i, _every_second(run_B << (16 * i)), BLOCK_BITS)
    at_B += 2 * planes_B
    changes_B = (second_B > first_B) & (second_B < 32)
    code_B, length_B = _change(x_B, y_B, z_B, w_B, second_B, 1, codes, changes_B)
    low_B, high_B = _append(low_B, high_B, at_B, code_B, BLOCK_BITS)
    at_B += length_B
    # Two significant values: their bits and a zero. The changes before take at least four bits.
    planes_B = tl.maximum(third_B - second_B - 1, 0)
    x_run_B = _run(x_B, second_B, planes_B)
    y_run_B = _run(y_B, second_B, planes_B)
    for i in tl.static_range((min(BLOCK_BITS, 109) - 13 + 23) // 24):
        code_B = _every_third(x_run_B << (8 * i)) | (_every_third(y_run_B << (8 * i)) >> 1)
        low_B, high_B = _append(low_B, high_B, at_B + 24 * i, code_B, BLOCK_BITS)
    at_B += 3 * planes_B
    changes_B = (third_B > second_B) & (third_B < 32)
    code_B, length_B = _change(x_B, y_B, z_B, w_B, third_B, 2, codes, changes_B)
    low_B, high_B = _append(low_B, high_B, at_B, code_B, BLOCK_BITS)
    at_B += length_B
    # With three significant values the last code bit is that of the fourth, so that all further planes are copied.
    rest_B = tl.where(third_B < 32, 31 - third_B, 0)
    x_B = _run(x_B, third_B, rest_B)
    y_B = _run(y_B, third_B, rest_B)
    z_B = _run(z_B, third_B, rest_B)
    w_B = _run(w_B, third_B, rest_B)
    for i in tl.static_range((BLOCK_BITS - 13 + 31) // 32):
        code_B = _interleaved(x_B << (8 * i), y_B << (8 * i), z_B << (8 * i), w_B << (8 * i))
        low_B, high_B = _append(low_B, high_B, at_B + 32 * i, code_B, BLOCK_BITS)
    if BLOCK_BITS <= 32:
        low_B = _reversed(low_B)
    else:
        low_B = _reversed_long(low_B)
        if BLOCK_BITS > 64:
            high_B = _reversed_long(high_B)
    return low_B, high_B


@triton.jit
def _append(low_B, high_B, at_B, code_B, BLOCK_BITS: tl.constexpr):
    """Put up to 32 bits at a position. Bits beyond the block's size are cut off; a truncated code is a prefix."""
    if BLOCK_BITS <= 32:
        low_B |= tl.where(at_B < 32, code_B >> (at_B & 31).to(tl.uint32), 0)
    else:
        shift_B = (at_B & 63).to(tl.uint64)
        long_B = code_B.to(tl.uint64) << 32
        low_B |= tl.where(at_B < 64, long_B >> shift_B, 0)
        if BLOCK_BITS > 64:
            carried_B = (long_B << 1) << (63 - shift_B)
            high_B |= tl.where(at_B < 64, carried_B, tl.where(at_B < 128, long_B >> shift_B, 0))
    return low_B, high_B


@triton.jit
def _first_plane(bits_B):
    """The number of zeros above the highest set bit, by the exponent of fp32. A zero below that bit keeps the
    conversion from rounding up to the next power of two."""
    top_B = (bits_B & ~(bits_B >> 1)).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(158 - (top_B >> 23), 32)


@triton.jit
def _change(x_B, y_B, z_B, w_B, plane_B, SIGNIFICANT: tl.constexpr, codes, changes_B):
    """The code of a plane in which further values become significant, and its length. Both are 0 elsewhere."""
    shift_B = ((31 - plane_B) & 31).to(tl.uint32)
    index_B = ((x_B >> shift_B) & 1) | (((y_B >> shift_B) & 1) << 1)
    index_B |= (((z_B >> shift_B) & 1) << 2) | (((w_B >> shift_B) & 1) << 3)
    entry_B = tl.load(codes + (SIGNIFICANT * 16 + index_B.to(tl.int32)), mask=changes_B, other=0).to(tl.int32)
    return entry_B.to(tl.uint32) << 24, entry_B >> 8


@triton.jit
def _run(bits_B, before_B, planes_B):
    """The bits of fewer than 32 planes after one plane."""
    after_B = (bits_B << 1) << (before_B & 31).to(tl.uint32)
    return after_B & ~(tl.full(bits_B.shape, 0xFFFFFFFF, tl.uint32) >> planes_B.to(tl.uint32))


@triton.jit
def _every_second(bits_B):
    """The highest 16 bits, each followed by a zero."""
    bits_B = bits_B & 0xFFFF0000
    bits_B = (bits_B | (bits_B >> 8)) & 0xFF00FF00
    bits_B = (bits_B | (bits_B >> 4)) & 0xF0F0F0F0
    bits_B = (bits_B | (bits_B >> 2)) & 0xCCCCCCCC
    return (bits_B | (bits_B >> 1)) & 0xAAAAAAAA


@triton.jit
def _every_third(bits_B):
    """The highest 8 bits, each followed by two zeros."""
    bits_B = bits_B & 0xFF000000
    bits_B = (bits_B | (bits_B >> 8)) & 0xF00F0000
    bits_B = (bits_B | (bits_B >> 4)) & 0xC30C3000
    return (bits_B | (bits_B >> 2)) & 0x92492400


@triton.jit
def _interleaved(x_B, y_B, z_B, w_B):
    """The highest bits of the four, then the second highest, up to the eighth. Each step exchanges two bits of the
    positions."""
    bits_B = (x_B & 0xFF000000) | ((y_B >> 8) & 0xFF0000) | ((z_B >> 16) & 0xFF00) | (w_B >> 24)
    bits_B = _swapped(bits_B, 14, 0x33330000)
    bits_B = _swapped(bits_B, 7, 0x55005500)
    bits_B = _swapped(bits_B, 12, 0x0F0F0000)
    return _swapped(bits_B, 4, 0x0F000F00)


@triton.jit
def _swapped(bits_B, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The bits of a mask, exchanged with those SHIFT places below."""
    differ_B = ((bits_B << SHIFT) ^ bits_B) & MASK
    return bits_B ^ differ_B ^ (differ_B >> SHIFT)


@triton.jit
def _reversed(bits_B):
    """The 32 bits in reverse order."""
    bits_B = ((bits_B >> 1) & 0x55555555) | ((bits_B & 0x55555555) << 1)
    bits_B = ((bits_B >> 2) & 0x33333333) | ((bits_B & 0x33333333) << 2)
    bits_B = ((bits_B >> 4) & 0x0F0F0F0F) | ((bits_B & 0x0F0F0F0F) << 4)
    bits_B = ((bits_B >> 8) & 0x00FF00FF) | ((bits_B & 0x00FF00FF) << 8)
    return (bits_B >> 16) | (bits_B << 16)


@triton.jit
def _reversed_long(bits_B):
    """The 64 bits in reverse order."""
    high_B = _reversed(bits_B.to(tl.uint32)).to(tl.uint64) << 32
    return high_B | _reversed((bits_B >> 32).to(tl.uint32)).to(tl.uint64)


@triton.jit
def _cut(low_B, high_B, BITS: tl.constexpr):
    """The first BITS bits."""
    if BITS < 64:
        low_B = low_B & ((1 << BITS) - 1)
    elif BITS > 64:
        high_B = high_B & ((1 << (BITS - 64)) - 1)
    return low_B, high_B


@triton.jit
def _or(words, bits_B, inside_B):
    """Combine words that neighbouring blocks share. Words without bits may lie outside the message."""
    low_B = bits_B.to(tl.int32)
    high_B = (bits_B >> 32).to(tl.int32)
    tl.atomic_or(words, low_B, mask=inside_B & (low_B != 0), sem="relaxed")
    tl.atomic_or(words + 1, high_B, mask=inside_B & (high_B != 0), sem="relaxed")


@triton.jit
def _magnitude(x_B):
    return x_B.to(tl.uint32, bitcast=True) & 0x7FFFFFFF


@triton.jit(do_not_specialize=["row_step"])
def _decode(
    words,
    row_step,
    num_words,
    out,
    planes,
    numel,
    scale,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    ADD: tl.constexpr,
    B: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * B * 4
    left = tl.minimum(numel - first, B * 4).to(tl.int32)
    x_B4 = _values(words, num_words, planes, first, left, BLOCK_BITS, B)
    for _ in range(1, COUNT):
        words += row_step.to(tl.int64) * 4
        x_B4 += _values(words, num_words, planes, first, left, BLOCK_BITS, B)
    x_B4 *= scale
    at_B4 = tl.arange(0, B)[:, None] * 4 + tl.arange(0, 4)[None, :]
    out += first
    if ADD:
        x_B4 = tl.load(out + at_B4, mask=at_B4 < left, other=0) + x_B4
    tl.store(out + at_B4, narrow(x_B4, KIND), mask=at_B4 < left)


@triton.jit
def _values(words, num_words, planes, first, left, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """Decode values of a message, fp32 (B, 4)."""
    low_B, high_B = _bits(words, num_words, first, left, BLOCK_BITS, B)
    header_B = (low_B & 511).to(tl.int32)
    x_B = tl.zeros((B,), tl.uint32)
    y_B = tl.zeros((B,), tl.uint32)
    z_B = tl.zeros((B,), tl.uint32)
    w_B = tl.zeros((B,), tl.uint32)
    at_B = tl.full((B,), HEADER, tl.int32)
    significant_B = tl.zeros((B,), tl.int32)
    NUM_PLANES: tl.constexpr = 32 if BLOCK_BITS > 40 else BLOCK_BITS - 9
    for _ in range(NUM_PLANES):
        # At the end of a block no bits are available, and the bits that are read do not matter.
        offset_B = (at_B & 63).to(tl.uint64)
        window_B = low_B >> offset_B
        if BLOCK_BITS > 64:
            window_B |= (high_B << 1) << (63 - offset_B)
            window_B = tl.where(at_B < 64, window_B, high_B >> offset_B)
        there_B = tl.minimum(BLOCK_BITS - at_B, WINDOW)
        entry_B = tl.load(planes + (there_B * 5 + significant_B) * 256 + (window_B & 255).to(tl.int32)).to(tl.int32)
        plane_B = entry_B.to(tl.uint32)
        x_B = (x_B << 1) | (plane_B & 1)
        y_B = (y_B << 1) | ((plane_B >> 1) & 1)
        z_B = (z_B << 1) | ((plane_B >> 2) & 1)
        w_B = (w_B << 1) | ((plane_B >> 3) & 1)
        at_B += (entry_B >> 8) & 15
        significant_B = entry_B >> 12
    x_B = _integer_of(x_B, NUM_PLANES)
    y_B = _integer_of(y_B, NUM_PLANES)
    z_B = _integer_of(z_B, NUM_PLANES)
    w_B = _integer_of(w_B, NUM_PLANES)

    y_B = y_B + (w_B >> 1)
    w_B = w_B - (y_B >> 1)
    y_B = y_B + w_B
    w_B = (w_B << 1) - y_B
    z_B = z_B + x_B
    x_B = (x_B << 1) - z_B
    y_B = y_B + z_B
    z_B = (z_B << 1) - y_B
    w_B = w_B + x_B
    x_B = (x_B << 1) - w_B

    # 2^(biased - 157) as fp32, which may be a denormal, or zero.
    biased_B = header_B >> 1
    power_B = tl.where(biased_B >= 31, (biased_B - 30) << 23, 1 << (tl.maximum(biased_B - 8, 0) & 31))
    power_B = tl.where(biased_B >= 8, power_B, 0).to(tl.float32, bitcast=True)
    xz_B2 = tl.join(x_B.to(tl.float32) * power_B, z_B.to(tl.float32) * power_B)
    yw_B2 = tl.join(y_B.to(tl.float32) * power_B, w_B.to(tl.float32) * power_B)
    x_B4 = tl.reshape(tl.join(xz_B2, yw_B2), (B, 4))
    nonzero_B = (header_B & 1) == 1
    x_B4 = tl.where(nonzero_B[:, None], x_B4, 0.0)
    return tl.where((nonzero_B & (biased_B == 0))[:, None], float("nan"), x_B4)


@triton.jit
def _bits(words, num_words, first, left, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """The bits of each block, followed by others if there is room."""
    inside_B = tl.arange(0, B) * 4 < left
    start_B = (first // 4 + tl.arange(0, B)) * BLOCK_BITS
    at_B = start_B >> 5
    low_B = _pair(words, at_B, num_words, inside_B)
    high_B = tl.zeros((B,), tl.uint64)
    # Blocks of whole words start at a word; others start up to 31 bits after one.
    if (BLOCK_BITS > 64) or (BLOCK_BITS > 33 and BLOCK_BITS % 32 != 0):
        high_B = _pair(words, at_B + 2, num_words, inside_B)
    if BLOCK_BITS % 32 != 0:
        shift_B = (start_B & 31).to(tl.uint64)
        low_B = (low_B >> shift_B) | ((high_B << 1) << (63 - shift_B))
        high_B = high_B >> shift_B
        if BLOCK_BITS > 97:
            high_B |= (_pair(words, at_B + 4, num_words, inside_B) << 1) << (63 - shift_B)
    return low_B, high_B


@triton.jit
def _pair(words, at_B, num_words, inside_B):
    """Two words as a 64-bit word, with 0 beyond the message."""
    low_B = tl.load(words + at_B, mask=inside_B & (at_B < num_words), other=0)
    high_B = tl.load(words + at_B + 1, mask=inside_B & (at_B + 1 < num_words), other=0)
    low_B = low_B.to(tl.uint32, bitcast=True).to(tl.uint64)
    return low_B | (high_B.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)


@triton.jit
def _integer_of(negabinary_B, NUM_PLANES: tl.constexpr):
    """Integers from the NUM_PLANES highest bits of negabinary numbers, which are the lowest bits of the argument."""
    if NUM_PLANES > 0:
        negabinary_B = negabinary_B << (32 - NUM_PLANES)
    return ((negabinary_B ^ 0xAAAAAAAA) - 0xAAAAAAAA).to(tl.int32, bitcast=True)
