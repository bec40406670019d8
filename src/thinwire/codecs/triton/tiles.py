# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Device functions that load and store values, and pack and unpack codes.

A tile is (R, V) fp32 values. A row has G = V // 8 groups, because eight codes of any width fill a whole number of
bytes. *local* is the index of a value in the tile's part of the message, *base* the index of that part, and *rem* the
number of values of the message from there on. Kernels keep *base* in 64 bits and everything else in 32 bits.

Kernels treat bf16 as int16 and convert it by its bits. The interpreter, whose own conversion does not round to nearest
even, thus computes the same as a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)
"""1.5 * 2^23: for abs(x) < 2^22, the lowest mantissa bits of x + MAGIC are rint(x) in two's complement."""
MAGIC_BITS = tl.constexpr(0x4B400000)
"""Bits of MAGIC."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of a program, a constant of its kernel.

    Attributes:
        rows: Number of rows, R.
        columns: Number of columns, V, a power of two.
        block: Number of values of a row that are used.
        lanes: Number of threads that share a row.
    """

    rows: int
    columns: int
    block: int
    lanes: int


@triton.jit
def places(R: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """*local* and column of every value of a tile whose rows hold BLOCK values of a message."""
    column_RV = tl.broadcast_to(tl.arange(0, V)[None, :], (R, V))
    return tl.arange(0, R)[:, None] * BLOCK + column_RV, column_RV


@triton.jit
def groups(rem, R: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Index of each group in the tile's part of the message, and whether the group has values."""
    column_RG = tl.broadcast_to(tl.arange(0, V // 8)[None, :], (R, V // 8))
    group_RG = tl.arange(0, R)[:, None] * (BLOCK // 8) + column_RG
    return group_RG, (column_RG < BLOCK // 8) & (group_RG * 8 < rem)


@triton.jit
def load(ptr, rem, R: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of words, with 0 where there are no values. Whole tiles use no mask, so that loads stay wide."""
    local_RV, column_RV = places(R, V, BLOCK)
    if rem < R * BLOCK:
        x_RV = tl.load(ptr + local_RV, mask=(column_RV < BLOCK) & (local_RV < rem), other=0)
    elif V == BLOCK:
        x_RV = tl.load(ptr + local_RV)
    else:
        x_RV = tl.load(ptr + local_RV, mask=column_RV < BLOCK, other=0)
    return x_RV


@triton.jit
def load_rows(ptr, rem, KIND: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr):
    """Load a tile as ``load``, converted to fp32, with each row inside a warp unless rows are too long.

    Reductions over a row then need no shared memory and no barrier. The compiler assigns threads by the shape that is
    loaded: first UNIT values, which are 16 bytes, to each of C / UNIT lanes, then rows, and K last. K and rows are one
    dimension, N, because releases of Triton differ in which of two dimensions without neighbours comes first.
    """
    R: tl.constexpr = TILE.rows
    V: tl.constexpr = TILE.columns
    BLOCK: tl.constexpr = TILE.block
    RUN: tl.constexpr = UNIT * (TILE.lanes if TILE.lanes < 32 else 32)
    C: tl.constexpr = RUN if RUN < V else V
    K: tl.constexpr = V // C
    number_N = tl.arange(0, K * R)
    column_NC = (number_N // R * C)[:, None] + tl.arange(0, C)[None, :]
    local_NC = (number_N % R * BLOCK)[:, None] + column_NC
    if rem < R * BLOCK:
        x_NC = widen(tl.load(ptr + local_NC, mask=(column_NC < BLOCK) & (local_NC < rem), other=0), KIND)
    elif V == BLOCK:
        x_NC = widen(tl.load(ptr + local_NC), KIND)
    else:
        x_NC = widen(tl.load(ptr + local_NC, mask=column_NC < BLOCK, other=0), KIND)
    return tl.reshape(tl.permute(tl.reshape(x_NC, (K, R, C)), (1, 0, 2)), (R, V))


@triton.jit
def store(ptr, x_RV, rem, R: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of ``load``."""
    local_RV, column_RV = places(R, V, BLOCK)
    if rem < R * BLOCK:
        tl.store(ptr + local_RV, x_RV, mask=(column_RV < BLOCK) & (local_RV < rem))
    elif V == BLOCK:
        tl.store(ptr + local_RV, x_RV)
    else:
        tl.store(ptr + local_RV, x_RV, mask=column_RV < BLOCK)


@triton.jit
def widen(x, KIND: tl.constexpr):
    """Convert to fp32, exactly."""
    if KIND == "bfloat16":
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float16":
        x = x.to(tl.float32)
    return x


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """Convert from fp32, rounding to nearest even. NaN becomes the same bits on every device."""
    if KIND != "float32":
        bits = x.to(tl.uint32, bitcast=True)
        is_nan = x != x
        if KIND == "bfloat16":
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            x = tl.where(is_nan, 0x7FC0, rounded).to(tl.int16)
        else:
            half_bits = x.to(tl.float16).to(tl.int16, bitcast=True)
            x = tl.where(is_nan, 0x7E00, half_bits).to(tl.int16).to(tl.float16, bitcast=True)
    return x


@triton.jit
def load_codes(codes, base, rem, R: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Unpack codes to fp32 (R, G, 8). The last group may be read beyond its values, where zeros or scales follow."""
    group_RG, inside_RG = groups(rem, R, V, BLOCK)
    j = tl.arange(0, 8)[None, None, :]
    offset: tl.constexpr = 1 << (BITS - 1)
    if BITS == 8:
        at = (group_RG * 8)[:, :, None] + j
        unsigned = tl.load(codes + base + at, mask=inside_RG[:, :, None], other=0).to(tl.int32) & 255
    elif BITS == 4 or BITS == 2:
        word_RG = tl.load(codes + base // 8 + group_RG, mask=inside_RG, other=0).to(tl.int32)
        unsigned = (word_RG[:, :, None] >> (BITS * j)) & (2 * offset - 1)
    else:
        codes += base // 8 * BITS
        word_RG = tl.zeros((R, V // 8), tl.int64)
        for byte in tl.static_range(BITS):
            part_RG = tl.load(codes + (group_RG * BITS + byte), mask=inside_RG, other=0)
            word_RG |= (part_RG.to(tl.int64) & 255) << (8 * byte)
        unsigned = ((word_RG[:, :, None] >> (BITS * j)) & (2 * offset - 1)).to(tl.int32)
    # Convert integers to floats through the lowest bits of MAGIC, which is faster than a conversion.
    return (unsigned ^ (MAGIC_BITS + offset)).to(tl.float32, bitcast=True) - (MAGIC + offset)


@triton.jit
def store_codes(codes, base, code_RV, poisoned_R, rem, TILE: tl.constexpr, BITS: tl.constexpr):
    """Pack codes, given as MAGIC_BITS + code; those of poisoned rows become 0. Codes beyond the end of the message must
    be 0, and complete the last group."""
    R: tl.constexpr = TILE.rows
    V: tl.constexpr = TILE.columns
    BLOCK: tl.constexpr = TILE.block
    if BITS == 8:
        store(codes + base, tl.where(poisoned_R[:, None], 0, code_RV).to(tl.int8), rem, R, V, BLOCK)
    elif BITS == 4 or BITS == 2:
        # Four codes at a time: a thread that loads fp32 values holds that many neighbours.
        u0, u1, u2, u3 = quarters(code_RV, R, V)
        word_RQ = tl.where(poisoned_R[:, None], 0, packed(u0, u1, u2, u3, BITS))
        WORD: tl.constexpr = tl.int16 if BITS == 4 else tl.int8
        column_RQ = tl.broadcast_to(tl.arange(0, V // 4)[None, :], (R, V // 4))
        at_RQ = tl.arange(0, R)[:, None] * (BLOCK // 4) + column_RQ
        words = codes.to(tl.pointer_type(WORD), bitcast=True) + base // 4
        tl.store(words + at_RQ, word_RQ.to(WORD), mask=(column_RQ < BLOCK // 4) & (at_RQ * 4 < rem))
    else:
        u = eighths(code_RV, R, V)
        group_RG, inside_RG = groups(rem, R, V, BLOCK)
        low_RG = packed(u[0], u[1], u[2], u[3], BITS).to(tl.int64)
        word_RG = low_RG | (packed(u[4], u[5], u[6], u[7], BITS).to(tl.int64) << (4 * BITS))
        word_RG = tl.where(poisoned_R[:, None], 0, word_RG)
        codes += base // 8 * BITS
        num_bytes = (rem * BITS + 7) // 8
        for byte in tl.static_range(BITS):
            at_RG = group_RG * BITS + byte
            part_RG = (word_RG >> (8 * byte)).to(tl.int8)
            tl.store(codes + at_RG, part_RG, mask=inside_RG & (at_RG < num_bytes))


@triton.jit
def packed(u0, u1, u2, u3, BITS: tl.constexpr):
    """The lowest BITS bits of four codes, given as MAGIC_BITS + code, one after the other."""
    # code + LEVELS is not negative, so the sum has no carries; the exclusive or makes it two's complement again.
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    ONES: tl.constexpr = 1 | (1 << BITS) | (1 << (2 * BITS)) | (1 << (3 * BITS))
    # MAGIC_BITS * ONES modulo 2^32, between -2^31 and 2^31
    OFFSET: tl.constexpr = (LEVELS * ONES - MAGIC_BITS * ONES + (1 << 31)) % (1 << 32) - (1 << 31)
    word = ((u3 * (1 << BITS) + u2) * (1 << BITS) + u1) * (1 << BITS) + u0
    return (word + OFFSET) ^ (LEVELS * ONES)


@triton.jit
def quarters(x_RV, R: tl.constexpr, V: tl.constexpr):
    """Split a tile into four tiles (R, V / 4): the first, second, third and fourth value of every group of four."""
    even, odd = tl.split(tl.reshape(x_RV, (R, V // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def eighths(x_RV, R: tl.constexpr, V: tl.constexpr):
    """Split a tile into eight tiles (R, G) of the first, second, ... value of every group of eight.

    Sums over these tiles are computed in a thread's registers in a defined order, unlike a reduction.
    """
    even, odd = tl.split(tl.reshape(x_RV, (R, V // 8, 2, 2, 2)))
    even04, even26 = tl.split(even)
    odd15, odd37 = tl.split(odd)
    x0, x4 = tl.split(even04)
    x1, x5 = tl.split(odd15)
    x2, x6 = tl.split(even26)
    x3, x7 = tl.split(odd37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def butterflies(x_RV, R: tl.constexpr, V: tl.constexpr, START: tl.constexpr):
    """Unnormalised Walsh-Hadamard transform of every row, in the order of the wire format's rule 6, from the level on
    at which values START columns apart are added and subtracted."""
    for level in tl.static_range(13):  # blocks have at most 8192 values
        if 1 << level >= START and 1 << level < V:
            x_RV = _butterfly(x_RV, R, V, 1 << level)
    return x_RV


@triton.jit
def products(code_RV, R: tl.constexpr, V: tl.constexpr):
    """``butterflies`` of all levels for codes, given as fp32: integers of at most 128.

    Matrix products compute them, because sums of integers are exact in any order: below 2^11 in fp16, and below 2^24 in
    fp32. Two products add 16 and up to 32 values each, and butterflies do the rest of a longer block.
    """
    if V < 16:
        turned_RV = butterflies(code_RV, R, V, 1)
    elif V <= 32:
        turned_RV = tl.dot(code_RV.to(tl.float16), _hadamard(V, V))
    else:
        # Blocks of fewer than 256 values share a product with their neighbours.
        N: tl.constexpr = min(max(V // 16, 16), 32)
        P: tl.constexpr = R * V // (16 * N)
        sums = tl.dot(tl.reshape(code_RV.to(tl.float16), (P * N, 16)), _hadamard(16, 16)).to(tl.float16)
        sums = tl.reshape(tl.permute(tl.reshape(sums, (P, N, 16)), (0, 2, 1)), (P * 16, N))
        sums = tl.reshape(tl.dot(sums, _hadamard(N, V // 16)), (P, 16, N))
        turned_RV = butterflies(tl.reshape(tl.permute(sums, (0, 2, 1)), (R, V)), R, V, 16 * N)
    return turned_RV


@triton.jit
def _hadamard(N: tl.constexpr, V: tl.constexpr):
    """A matrix (N, N) that turns N values as ``butterflies`` does, or, if V is less than N, each V of them."""
    row_NN = tl.broadcast_to(tl.arange(0, N)[:, None], (N, N))
    column_NN = tl.broadcast_to(tl.arange(0, N)[None, :], (N, N))
    # The sign is that of the number of bits that row and column share: N is at most 32.
    shared_NN = row_NN & column_NN & (V - 1)
    odd_NN = (0x6996 >> ((shared_NN ^ (shared_NN >> 4)) & 15)) & 1
    return tl.where((row_NN ^ column_NN) < V, 1 - 2 * odd_NN, 0).to(tl.float16)


@triton.jit
def _butterfly(x_RV, R: tl.constexpr, V: tl.constexpr, DISTANCE: tl.constexpr):
    pairs = tl.reshape(x_RV, (R, V // (2 * DISTANCE), 2, DISTANCE))
    upper, lower = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    return tl.reshape(tl.permute(tl.join(upper + lower, upper - lower), (0, 1, 3, 2)), (R, V))


@triton.jit
def flip_signs(x_RV, V: tl.constexpr):
    """Multiply by the fixed signs of rule 6."""
    position = tl.arange(0, V).to(tl.uint32)
    flip = (position * 0x9E3779B1 + 0x7F4A7C15) & 0x80000000
    return (x_RV.to(tl.uint32, bitcast=True) ^ flip[None, :]).to(tl.float32, bitcast=True)
