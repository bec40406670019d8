# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""ZFP at a fixed rate.

Shapes: B blocks of four values per program. A block has at most 128 bits, which are four words of 32 bits. Tables say
what a few bits mean at once, so that no loop goes from bit to bit: two planes are encoded, and eight bits decoded, by
one look-up. The file is long because both directions share the tables.
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
from thinwire.codecs.reference.zfp import plane_code
from thinwire.codecs.triton.launch import aligned, aligned_rows, ceil_div, check_device, launch, power_of_two, room_for
from thinwire.codecs.triton.slices import Slices, slice_of
from thinwire.codecs.triton.tiles import narrow, widen
from thinwire.codecs.triton.transcode import Form

BLOCKS = 512
"""Blocks of a program. Their bits fill whole words at any rate, so that programs share no words."""
HEADER = tl.constexpr(9)
INF_BITS = tl.constexpr(0x7F800000)


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
        # The words of all blocks of a thread are in registers.
        blocks = BLOCKS // power_of_two(ceil_div(self.spec.zfp_block_bits, 32))
        launch(
            _encode,
            (ceil_div(longest, 4 * blocks), len(wires)),
            form.view(x),
            wires.view(torch.int32),
            wires.stride(0) // 16,
            _plane_pairs(x.device),
            slices.table,
            longest,
            slices.start,
            slices.step,
            SLICES=slices.mode,
            KIND=form.kind,
            BLOCK_BITS=self.spec.zfp_block_bits,
            B=blocks,
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
            (ceil_div(out.numel(), 4 * BLOCKS),),
            words,
            words.stride(0) // 4 if len(words) > 1 else 0,
            words.shape[1],
            form.view(out),
            _windows((self.spec.zfp_block_bits - HEADER.value - 1) % 8 + 1, out.device),
            out.numel(),
            scale,
            SCALED=scale != 1.0,
            COUNT=len(words),
            KIND=form.kind,
            BLOCK_BITS=self.spec.zfp_block_bits,
            ADD=add,
            B=BLOCKS,
        )


# ------------------------------------------------------------------------------------------------------ tables


make = TritonZfp
"""Make the codec of a spec."""


def _pair_code(significant: int, pair: int) -> int:
    """For two bit planes: the length of their code | the number of values that are significant afterwards << 8 | the
    code << 16. From the highest bit of ``pair`` on, each value has two: its bits in the first plane and in the second.
    With three significant values the fourth one has a bit in each code, as if it were significant."""
    code, length = 0, 0
    for second in range(2):
        plane = sum((pair >> 7 - 2 * value - second & 1) << value for value in range(4))
        bits, num_bits, significant = plane_code(significant, plane)
        code |= bits << length
        length += num_bits
    return length | min(significant, 3) << 8 | code << 16


@functools.cache
def _plane_pairs(device: torch.device) -> Tensor:
    """Codes of all pairs of planes for zero, one, two, and more significant values."""
    codes = [_pair_code(significant, pair) for significant in range(4) for pair in range(256)]
    return torch.tensor(codes, dtype=torch.int32, device=device)


_PLACES = [
    *(("more", value) for value in range(3)),
    *(("first", value) for value in range(3)),
    *((f"one of {known}", value) for known in range(1, 4) for value in range(known)),
    ("one of 3", 3),
]
"""What the next bit of a code may say: whether any value from this one on has a bit in this plane, whether this one is
the first of them, or the bit of this value, which is one of 1, 2 or more significant ones. (With three of them the
fourth value has a bit of its own, which says whether it has become significant.) A block begins at the first place."""


def _follow(place: tuple[str, int], bit: int) -> tuple[int | None, tuple[str, int], bool]:
    """Read a bit of a code: the value whose bit it sets, the next place, and whether that is in the next plane."""
    kind, value = place
    if kind == "more":
        after = ("first", value) if bit else _PLACES[0] if value == 0 else (f"one of {value}", 0)
        return None, after, not bit
    if kind == "first" and not bit:
        return (None, ("first", value + 1), False) if value < 2 else (3, ("one of 3", 0), True)
    known = value + 1 if kind == "first" else int(kind[-1])
    after = (kind, value + 1) if value + 1 < known else ("more", known) if known < 3 else ("one of 3", (value + 1) % 4)
    return value if bit else None, after, value == 3


def _window(place: int, window: int, there: int, *, ends: bool) -> int:
    """What the next ``there`` bits mean from a place on: four bytes with bits of the values, the lowest for the current
    plane | 256 * the next place << 32 | 2^planes << 48, where so many planes end. A block may end while values are
    sought of which one has a bit; then the current one has it."""
    at, planes, values = _PLACES[place], 0, 0
    for index in range(there):
        value, at, next_plane = _follow(at, window >> index & 1)
        values |= 0 if value is None else 1 << 8 * value + planes
        planes += next_plane
    if ends and at[0] == "first":
        values |= 1 << 8 * at[1] + planes
    return values | _PLACES.index(at) << 40 | 1 << 48 + planes


@functools.cache
def _windows(last: int, device: torch.device) -> Tensor:
    """What windows of eight bits mean, and after them those of ``last`` bits that end a block: for each place, 256
    windows."""
    entries = [_window(place, window, 8, ends=False) for place in range(len(_PLACES)) for window in range(256)]
    entries += [_window(place, window, last, ends=True) for place in range(len(_PLACES)) for window in range(256)]
    return torch.tensor(entries, device=device)


# ------------------------------------------------------------------------------------------------------ device

NUM_PLACES = tl.constexpr(len(_PLACES))


@triton.jit
def _four(x_B4, B: tl.constexpr):
    """The four values of each block, as four tensors (B)."""
    xz_B2, yw_B2 = tl.split(tl.reshape(x_B4, (B, 2, 2)))
    x_B, z_B = tl.split(xz_B2)
    y_B, w_B = tl.split(yw_B2)
    return x_B, y_B, z_B, w_B


@triton.jit
def _negabinary(x_B):
    return (x_B.to(tl.uint32, bitcast=True) + 0xAAAAAAAA) ^ 0xAAAAAAAA


@triton.jit(do_not_specialize=["row_step"])
def _encode(
    x,
    words,
    row_step,
    pairs,
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
    x += offset + first
    if left == B * 4:
        at_B4 = tl.arange(0, B)[:, None] * 4 + tl.arange(0, 4)[None, :]
        x_B, y_B, z_B, w_B = _four(widen(tl.load(x + at_B4), KIND), B)
    else:
        # A partial last block is completed by its values: the third by its second, if it exists, the others by its
        # first.
        at_B = tl.arange(0, B) * 4
        second_B = tl.where(at_B + 1 < left, at_B + 1, at_B)
        third_B = tl.where(at_B + 2 < left, at_B + 2, second_B)
        fourth_B = tl.where(at_B + 3 < left, at_B + 3, at_B)
        x_B = widen(tl.load(x + at_B, mask=at_B < left, other=0), KIND)
        y_B = widen(tl.load(x + second_B, mask=at_B < left, other=0), KIND)
        z_B = widen(tl.load(x + third_B, mask=at_B < left, other=0), KIND)
        w_B = widen(tl.load(x + fourth_B, mask=at_B < left, other=0), KIND)

    largest_B = tl.maximum(_magnitude(x_B), _magnitude(y_B))
    largest_B = tl.maximum(largest_B, tl.maximum(_magnitude(z_B), _magnitude(w_B)))
    biased_B = (largest_B >> 24).to(tl.int32)
    # The exponent e with 2^(e-1) <= largest < 2^e is biased - 126, and -126 for denormals. For such small exponents,
    # libzfp's factor overflows fp32, and x86 casts infinities and NaN to the smallest integer.
    overflows_B = biased_B < 29
    factor_B = tl.where(overflows_B, 0, (283 - biased_B) << 23).to(tl.float32, bitcast=True)
    instead_B = tl.where(overflows_B, -2147483648.0, 0.0)
    x_B = tl.fma(x_B, factor_B, instead_B).to(tl.int32)
    y_B = tl.fma(y_B, factor_B, instead_B).to(tl.int32)
    z_B = tl.fma(z_B, factor_B, instead_B).to(tl.int32)
    w_B = tl.fma(w_B, factor_B, instead_B).to(tl.int32)

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

    # Integers of a block with Inf or NaN differ between GPUs, and are not used.
    header_B = (2 * (biased_B + 1) + 1).to(tl.uint32)
    words_B = _coded(
        _negabinary(x_B), _negabinary(y_B), _negabinary(z_B), _negabinary(w_B), header_B, pairs, BLOCK_BITS, B
    )
    # Zeros, and headers of 1 for poisoned blocks: 0 < largest < Inf elsewhere.
    coded_B = largest_B - 1 < 2 * INF_BITS - 1
    instead_B = tl.minimum(largest_B, 1)
    words += row * row_step * 4 + first // 4 * BLOCK_BITS // 32
    inside_B = tl.arange(0, B) * 4 < left
    NUM_WORDS: tl.constexpr = (BLOCK_BITS + 31) // 32
    if BLOCK_BITS % 32 == 0:
        # Threads store single words. To store more at once, they would exchange values before.
        to_B = tl.max_contiguous(words + tl.arange(0, B) * NUM_WORDS, 1)
        for i in tl.static_range(NUM_WORDS):
            word_B = tl.where(coded_B, words_B[i], instead_B if i == 0 else 0)
            tl.store(to_B + i, word_B.to(tl.int32, bitcast=True), mask=inside_B)
        if left < B * 4:
            # Messages consist of whole pairs of words, and so does what a whole tile writes.
            num_words = (left + 3) // 4 * NUM_WORDS
            tl.store(words + num_words, 0, mask=num_words % 2 == 1)
    else:
        start_B = tl.arange(0, B) * BLOCK_BITS
        shift_B = (start_B & 31).to(tl.uint64)
        carried_B = tl.zeros((B,), tl.uint64)
        for i in tl.static_range(NUM_WORDS):
            bits_B = tl.where(coded_B, words_B[i], instead_B if i == 0 else 0)
            if i == NUM_WORDS - 1:
                bits_B = bits_B & ((1 << BLOCK_BITS % 32) - 1)
            carried_B = (carried_B >> 32) | (bits_B.to(tl.uint64) << shift_B)
            _or(words + (start_B >> 5) + i, carried_B, inside_B)
        _or(words + (start_B >> 5) + NUM_WORDS, carried_B >> 32, inside_B)


@triton.jit
def _coded(x_B, y_B, z_B, w_B, header_B, pairs, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """The header and the codes of all bit planes, as four words. Bits beyond the block's size may be set.

    Codes are multiplied by 2^at and added, where ``at`` is the number of bits before. 2^at is a number of 128 bits like
    the block, so that codes beyond the block are multiplied by 0.
    """
    # A zero stands for each plane before the first one with a bit.
    first_B = _leading_zeros(tl.maximum(tl.maximum(x_B, y_B), tl.maximum(z_B, w_B))) & 31
    x_B = x_B << first_B
    y_B = y_B << first_B
    z_B = z_B << first_B
    w_B = w_B << first_B
    start_B = tl.full((B,), 1, tl.uint64) << (first_B + HEADER).to(tl.uint64)
    factor0_B = start_B.to(tl.uint32)
    factor1_B = (start_B >> 32).to(tl.uint32)
    factor2_B = tl.zeros((B,), tl.uint32)
    factor3_B = tl.zeros((B,), tl.uint32)
    # Sums of products at words 0 and 1, 1 and 2, and so on.
    sum0_B = header_B.to(tl.uint64)
    sum1_B = tl.zeros((B,), tl.uint64)
    sum2_B = tl.zeros((B,), tl.uint64)
    sum3_B = tl.zeros((B,), tl.uint64)
    entry_B = tl.zeros((B,), tl.uint32)
    # From there on, each pair of planes takes at least four bits.
    for i in tl.static_range(min((BLOCK_BITS - HEADER + 3) // 4, 16)):
        if i % 8 == 0:
            even_B, odd_B = _pairs_of(x_B << (2 * i), y_B << (2 * i), z_B << (2 * i), w_B << (2 * i))
        pair_B = _pair(even_B, odd_B, i % 8)
        entry_B = tl.load(pairs + ((entry_B & 0x300) | pair_B)).to(tl.uint32, bitcast=True)
        code_B = (entry_B >> 16).to(tl.uint64)
        sum0_B += code_B * factor0_B
        sum1_B += code_B * factor1_B
        sum2_B += code_B * factor2_B
        sum3_B += code_B * factor3_B
        length_B = entry_B & 15
        factor3_B = (factor3_B << length_B) | (factor2_B >> (32 - length_B))
        factor2_B = (factor2_B << length_B) | (factor1_B >> (32 - length_B))
        factor1_B = (factor1_B << length_B) | (factor0_B >> (32 - length_B))
        factor0_B = factor0_B << length_B
    sum1_B += sum0_B >> 32
    sum2_B += sum1_B >> 32
    sum3_B += sum2_B >> 32
    return sum0_B.to(tl.uint32), sum1_B.to(tl.uint32), sum2_B.to(tl.uint32), sum3_B.to(tl.uint32)


@triton.jit
def _pairs_of(x_B, y_B, z_B, w_B):
    """The highest 16 bits of the four as eight bytes, each of two planes: those of even pairs of planes, and of odd
    ones. See ``_pair`` for the order."""
    xz_B = (x_B & 0xFFFF0000) | (z_B >> 16)
    yw_B = (y_B & 0xFFFF0000) | (w_B >> 16)
    even_B = (xz_B & 0xCCCCCCCC) | ((yw_B & 0xCCCCCCCC) >> 2)
    odd_B = ((xz_B & 0x33333333) << 2) | (yw_B & 0x33333333)
    return _swapped(even_B, 12, 0xF0F0), _swapped(odd_B, 12, 0xF0F0)


@triton.jit
def _pair(even_B, odd_B, INDEX: tl.constexpr):
    """Of the pairs of planes of ``_pairs_of`` the one with an index from 0 to 7."""
    bits_B = odd_B if INDEX % 2 == 1 else even_B
    return (bits_B >> (24 - 16 * (INDEX // 2 % 2) - 8 * (INDEX // 4))) & 255


@triton.jit
def _swapped(bits_B, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """The bits of a mask, exchanged with those SHIFT places above."""
    differ_B = ((bits_B >> SHIFT) ^ bits_B) & MASK
    return bits_B ^ differ_B ^ (differ_B << SHIFT)


@triton.jit
def _leading_zeros(bits_B):
    """The number of zeros above the highest set bit."""
    # Compilers know this as one instruction: the population of the zeros below the lowest bit of the reverse.
    bits_B = _reversed(bits_B)
    bits_B = (bits_B ^ 0xFFFFFFFF) & (bits_B - 1)  # not ~: see exp3.ALL
    bits_B = bits_B - ((bits_B >> 1) & 0x55555555)
    bits_B = (bits_B & 0x33333333) + ((bits_B >> 2) & 0x33333333)
    return (((bits_B + (bits_B >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@triton.jit
def _reversed(bits_B):
    """The 32 bits in reverse order, which compilers know as one instruction too."""
    bits_B = ((bits_B >> 1) & 0x55555555) | ((bits_B & 0x55555555) << 1)
    bits_B = ((bits_B >> 2) & 0x33333333) | ((bits_B & 0x33333333) << 2)
    bits_B = ((bits_B >> 4) & 0x0F0F0F0F) | ((bits_B & 0x0F0F0F0F) << 4)
    bits_B = ((bits_B >> 8) & 0x00FF00FF) | ((bits_B & 0x00FF00FF) << 8)
    return (bits_B >> 16) | (bits_B << 16)


@triton.jit
def _or(words, bits_B, inside_B):
    """Combine words that neighbouring blocks share. Words without bits may lie outside the message."""
    word_B = bits_B.to(tl.int32)
    tl.atomic_or(words, word_B, mask=inside_B & (word_B != 0), sem="relaxed")


@triton.jit
def _magnitude(x_B):
    """fp32 without its sign, which keeps the order of bits."""
    return x_B.to(tl.uint32, bitcast=True) << 1


@triton.jit(do_not_specialize=["row_step"])
def _decode(
    words,
    row_step,
    num_words,
    out,
    windows,
    numel,
    scale,
    SCALED: tl.constexpr,
    COUNT: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    ADD: tl.constexpr,
    B: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * B * 4
    left = tl.minimum(numel - first, B * 4).to(tl.int32)
    words += first // 4 * BLOCK_BITS // 32
    num_words = tl.minimum(num_words - first // 4 * BLOCK_BITS // 32, B * 5).to(tl.int32)
    x_B4 = _values(words, num_words, windows, left, BLOCK_BITS, B)
    for _ in range(1, COUNT):
        words += row_step.to(tl.int64) * 4
        x_B4 += _values(words, num_words, windows, left, BLOCK_BITS, B)
    if SCALED:
        x_B4 *= scale
    at_B4 = tl.arange(0, B)[:, None] * 4 + tl.arange(0, 4)[None, :]
    out += first
    if left == B * 4:
        if ADD:
            x_B4 = tl.load(out + at_B4) + x_B4
        tl.store(out + at_B4, narrow(x_B4, KIND))
    else:
        if ADD:
            x_B4 = tl.load(out + at_B4, mask=at_B4 < left, other=0) + x_B4
        tl.store(out + at_B4, narrow(x_B4, KIND), mask=at_B4 < left)


@triton.jit
def _values(words, num_words, windows, left, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """Decode values of a message, fp32 (B, 4)."""
    words_B = _words(words, num_words, left, BLOCK_BITS, B)
    x_B, y_B, z_B, w_B = _decoded(words_B, windows, BLOCK_BITS, B)
    x_B = _integer_of(x_B)
    y_B = _integer_of(y_B)
    z_B = _integer_of(z_B)
    w_B = _integer_of(w_B)

    y_B = y_B + (w_B >> 1)
    w_B = w_B - (y_B >> 1)
    y_B, w_B = y_B + w_B, w_B - y_B
    x_B, z_B = x_B - z_B, x_B + z_B
    y_B, z_B = y_B + z_B, z_B - y_B
    x_B, w_B = x_B - w_B, x_B + w_B

    # 2^(biased - 157) as fp32, which may be a denormal, or zero.
    header_B = words_B[0] & 511
    power_B = (((header_B >> 1) << 23) - (1 << 23)).to(tl.float32, bitcast=True) * 2.0**-29
    # Products are kept by adding -0. Blocks of zeros become 0 * x + 0, and poisoned ones NaN.
    power_B = tl.where((header_B & 1) == 1, power_B, 0.0)
    added_B = tl.where(header_B == 1, 0x7FC00000, header_B << 31).to(tl.float32, bitcast=True)
    x_B = tl.fma(x_B.to(tl.float32), power_B, added_B)
    y_B = tl.fma(y_B.to(tl.float32), power_B, added_B)
    z_B = tl.fma(z_B.to(tl.float32), power_B, added_B)
    w_B = tl.fma(w_B.to(tl.float32), power_B, added_B)
    return tl.reshape(tl.join(tl.join(x_B, z_B), tl.join(y_B, w_B)), (B, 4))


@triton.jit
def _decoded(words_B, windows, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """The negabinary numbers of each block with all bits in reverse order: plane 0 is the lowest bit."""
    x_B = tl.zeros((B,), tl.uint32)
    y_B = tl.zeros((B,), tl.uint32)
    z_B = tl.zeros((B,), tl.uint32)
    w_B = tl.zeros((B,), tl.uint32)
    # The factor 2^p puts bits at plane p. It becomes 0 after plane 31.
    factor_B = tl.full((B,), 1, tl.uint32)
    place_B = tl.zeros((B,), tl.uint32)
    STEPS: tl.constexpr = (BLOCK_BITS - HEADER + 7) // 8
    for i in tl.static_range(STEPS):
        window_B = _byte(words_B, HEADER + 8 * i) & (2 ** min(BLOCK_BITS - HEADER - 8 * i, 8) - 1)
        entry_B = tl.load(windows + (256 * NUM_PLACES if i == STEPS - 1 else 0) + (place_B | window_B))
        values_B = entry_B.to(tl.uint32)
        next_B = (entry_B >> 32).to(tl.uint32)
        x_B += (values_B & 255) * factor_B
        y_B += ((values_B >> 8) & 255) * factor_B
        z_B += ((values_B >> 16) & 255) * factor_B
        w_B += (values_B >> 24) * factor_B
        factor_B = factor_B * (next_B >> 16)
        place_B = next_B & 0xFFFF
    return x_B, y_B, z_B, w_B


@triton.jit
def _byte(words_B, AT: tl.constexpr):
    """At least eight bits from a position on, of which those beyond the last word are 0."""
    byte_B = words_B[AT // 32] >> (AT % 32)
    if AT % 32 > 24 and AT < 96:
        byte_B = byte_B | (words_B[AT // 32 + 1] << (32 - AT % 32))
    return byte_B


@triton.jit
def _words(words, num_words, left, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """The bits of each block as four words, followed by others if there is room."""
    start_B = tl.arange(0, B) * BLOCK_BITS
    inside_B = tl.arange(0, B) * 4 < left
    word0_B = _word(words, start_B, 0, num_words, inside_B, BLOCK_BITS, B)
    word1_B = _word(words, start_B, 1, num_words, inside_B, BLOCK_BITS, B)
    word2_B = _word(words, start_B, 2, num_words, inside_B, BLOCK_BITS, B)
    word3_B = _word(words, start_B, 3, num_words, inside_B, BLOCK_BITS, B)
    if BLOCK_BITS % 32 != 0:
        shift_B = (start_B & 31).to(tl.uint64)
        word4_B = _word(words, start_B, 4, num_words, inside_B, BLOCK_BITS, B)
        word0_B = _shifted(word0_B, word1_B, shift_B)
        word1_B = _shifted(word1_B, word2_B, shift_B)
        word2_B = _shifted(word2_B, word3_B, shift_B)
        word3_B = _shifted(word3_B, word4_B, shift_B)
    return word0_B, word1_B, word2_B, word3_B


@triton.jit
def _word(words, start_B, INDEX: tl.constexpr, num_words, inside_B, BLOCK_BITS: tl.constexpr, B: tl.constexpr):
    """Word INDEX from the word on in which each block starts, or 0 if no block can have bits there."""
    at_B = (start_B >> 5) + INDEX
    if BLOCK_BITS % 32 == 0 and 32 * INDEX < BLOCK_BITS:
        word_B = tl.load(words + at_B, mask=inside_B, other=0).to(tl.uint32, bitcast=True)
    elif BLOCK_BITS % 32 != 0 and 32 * INDEX < BLOCK_BITS + 31:
        # Blocks start up to 31 bits after a word. So the last block may seem to have words behind the message.
        word_B = tl.load(words + at_B, mask=inside_B & (at_B < num_words), other=0).to(tl.uint32, bitcast=True)
    else:
        word_B = tl.zeros((B,), tl.uint32)
    return word_B


@triton.jit
def _shifted(low_B, high_B, shift_B):
    """32 of 64 bits."""
    return ((low_B.to(tl.uint64) | (high_B.to(tl.uint64) << 32)) >> shift_B).to(tl.uint32)


@triton.jit
def _integer_of(reversed_B):
    """Integers from negabinary numbers whose bits are in reverse order."""
    return ((_reversed(reversed_B) ^ 0xAAAAAAAA) - 0xAAAAAAAA).to(tl.int32, bitcast=True)
