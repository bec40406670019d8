# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Device functions of block quantisation. Rules are those of ``docs/wire-format.md``.

Shapes: R blocks of V values (zeros where a block is shorter). Codes are fp32, as MAGIC + code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.triton.tiles import MAGIC, butterflies, eighths, flip_signs

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST_MAX = tl.constexpr(2.0**-112)


@triton.jit
def key_of(x):
    """Magnitudes as integers, in order, and in the lowest bit whether the value is positive: the largest key of a
    block tells both of rule 2's questions at once."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits << 1) | (bits >> 31)) ^ 1


@triton.jit
def rotated(x_RV, rem, R: tl.constexpr, V: tl.constexpr):
    """Rule 6: blocks rotated, and whether each had a value that is not finite (it is zeros then)."""
    poisoned_R = tl.max(key_of(x_RV) >> 1, axis=1) >= INF_BITS
    x_RV = tl.where(poisoned_R[:, None], 0.0, x_RV)
    turned_RV = butterflies(flip_signs(x_RV * (1.0 / V), V), R, V)
    whole_R = (tl.arange(0, R) + 1) * V <= rem
    return tl.where(whole_R[:, None], turned_RV, x_RV), poisoned_R


@triton.jit
def quantize(
    x_RV,
    key_R,
    poisoned_R,
    position_RV,
    seed,
    R: tl.constexpr,
    V: tl.constexpr,
    BITS: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes (R, V) and the bits of the scales (R), from the largest keys."""
    largest_R = (key_R >> 1).to(tl.float32, bitcast=True)
    bounded_R = tl.maximum(largest_R, SMALLEST_MAX)
    max_R = tl.where((key_R & 1) == 1, bounded_R, -bounded_R)
    if STOCHASTIC:
        f_RV, scale_R = round_at_random(x_RV, bounded_R, position_RV, seed, R, BITS)
    elif SEARCH:
        f_RV, scale_R = search(x_RV, max_R, poisoned_R, R, V, BITS)
    else:
        levels: tl.constexpr = 1 << (BITS - 1)
        f_RV = to_codes(x_RV, max_R, R, levels)
        scale_R = max_R * (-1.0 / levels)
    f_RV = tl.where(poisoned_R[:, None], MAGIC, f_RV)
    bits_R = tl.where(largest_R == 0.0, 0, scale_R.to(tl.int32, bitcast=True))
    return f_RV, tl.where(poisoned_R, NAN_BITS, bits_R)


@triton.jit
def to_codes(x_RV, max_R, R: tl.constexpr, LEVELS: tl.constexpr):
    """Rule 3's codes. They cannot come below -LEVELS: no value is larger than the maximum."""
    factor_R = tl.div_rn(tl.full((R,), -LEVELS, tl.float32), max_R)
    return tl.minimum(x_RV * factor_R[:, None] + MAGIC, MAGIC + (LEVELS - 1))


@triton.jit
def search(x_RV, max_R, poisoned_R, R: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr):
    """Rule 4, in fp32 that is exact throughout: numbers stay below 2^24, and see ``requantized``."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    UNIT: tl.constexpr = 256 >> (BITS - 1)
    a_RV = tl.where(poisoned_R[:, None], 0.0, to_codes(x_RV, max_R, R, 128) - MAGIC)
    a = eighths(a_RV, R, V)
    best_R = tl.full((R,), 13 * UNIT // 16, tl.float32)
    error_R = error_of(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], best_R, LEVELS)
    for part in tl.static_range(3):
        if UNIT >> (3 + part) >= 1:
            centre_R = best_R
            for sign in tl.static_range(2):
                tried_R = centre_R + (2 * sign - 1) * (UNIT >> (3 + part))
                tried_error_R = error_of(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], tried_R, LEVELS)
                better_R = tried_error_R < error_R
                best_R = tl.where(better_R, tried_R, best_R)
                error_R = tl.where(better_R, tried_error_R, error_R)
    f_RV = requantized(a_RV, best_R, LEVELS)
    q = eighths(f_RV - MAGIC, R, V)
    num_R = products_of(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7])
    den_R = products_of(q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7], q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7])
    ratio_R = tl.div_rn(num_R.to(tl.float32), tl.maximum(den_R, 1).to(tl.float32))
    return f_RV, max_R * (-1.0 / 128) * tl.where(den_R == 0, 0.0, ratio_R)


@triton.jit
def requantized(a, threshold_R, LEVELS: tl.constexpr):
    """MAGIC + q(a, T).

    floor((4a + T) / 2T) is 2a / T rounded, halves upwards; and so is (2a + 1/4) / T, rounded in any way: for whole a
    and T this is at least 1 / 4T, more than 2^-10, away from every half, and fp32 is off by less than 2^-18. That
    also goes for a fused product, which saves an operation and may be fused or not.
    """
    factor_R = tl.div_rn(tl.full(threshold_R.shape, 2.0, tl.float32), threshold_R)
    f = tl.fma(a + 0.125, tl.broadcast_to(factor_R[:, None], a.shape), tl.full(a.shape, MAGIC, tl.float32))
    return tl.maximum(tl.minimum(f, MAGIC + (LEVELS - 1)), MAGIC - LEVELS)


@triton.jit
def error_of(a0, a1, a2, a3, a4, a5, a6, a7, threshold_R, LEVELS: tl.constexpr):
    """error(T) of rows, from their eighths."""
    error_RG = add_error(tl.zeros(a0.shape, tl.float32), a0, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a1, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a2, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a3, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a4, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a5, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a6, threshold_R, LEVELS)
    error_RG = add_error(error_RG, a7, threshold_R, LEVELS)
    return row_sums(error_RG)


@triton.jit
def add_error(error_RG, a_RG, threshold_R, LEVELS: tl.constexpr):
    q_RG = requantized(a_RG, threshold_R, LEVELS) - MAGIC
    difference_RG = tl.fma(q_RG, tl.broadcast_to(-threshold_R[:, None], a_RG.shape), a_RG * 2.0)
    if LEVELS < 8:
        # With 4 bits T is at most 33 and at least 19, so that a difference is at most 33, or 254 - 7 * 19 = 121 at the
        # ends; with 5 bits, at most 254 - 15 * 10 = 104. The limit only binds with fewer bits.
        difference_RG = tl.minimum(tl.abs(difference_RG), 127.0)
    return tl.fma(difference_RG, difference_RG, error_RG)


@triton.jit
def products_of(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    """Sums of the products of two rows, from their eighths."""
    low_RG = tl.fma(a3, b3, tl.fma(a2, b2, tl.fma(a1, b1, a0 * b0)))
    return row_sums(tl.fma(a7, b7, tl.fma(a6, b6, tl.fma(a5, b5, tl.fma(a4, b4, low_RG)))))


@triton.jit
def row_sums(group_RG):
    """Sums of whole numbers of magnitude up to 2^17, int32: a long row's sum need not fit in fp32 (and a GPU can add
    integers across lanes in one instruction)."""
    return tl.sum((group_RG + MAGIC).to(tl.int32, bitcast=True) - 0x4B400000, axis=1)


@triton.jit
def round_at_random(x_RV, bounded_R, position_RV, seed, R: tl.constexpr, BITS: tl.constexpr):
    """Rule 5."""
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    h = position_RV.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    h = mix(h ^ (h >> 16))
    uniform_RV = (h >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
    levels_R = tl.full((R,), LEVELS, tl.float32)
    factor_R = tl.div_rn(levels_R, bounded_R)
    code_RV = tl.floor(x_RV * factor_R[:, None] + uniform_RV)
    code_RV = tl.minimum(tl.maximum(code_RV, -1.0 * LEVELS), 1.0 * LEVELS)
    return code_RV + MAGIC, tl.div_rn(bounded_R, levels_R)


@triton.jit
def mix(h):
    h *= 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def slice_seed(seed, index):
    """The seed of slice ``index``, as ``codecs/codec.py`` defines it."""
    seed = seed.to(tl.uint32)
    index = index.to(tl.uint32)
    h = mix(index ^ (index >> 16)) ^ seed
    return tl.where(index == 0, seed, mix(h ^ (h >> 16)))
