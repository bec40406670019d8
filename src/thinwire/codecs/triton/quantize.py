# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Device functions of block quantisation. Numbered rules refer to ``docs/wire-format.md``.

Shapes: R blocks of V values (zeros where a block is shorter). Codes are fp32, as MAGIC + code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.triton.tiles import MAGIC, MAGIC_BITS, butterflies, flip_signs, products

INF_BITS = tl.constexpr(0x7F800000)
NAN_BITS = tl.constexpr(0x7FC00000)
SMALLEST_MAX = tl.constexpr(2.0**-112)


@triton.jit
def key_of(x):
    """Magnitudes as integers of the same order, with the lowest bit set for positive values. The largest key of a block
    thus gives both the maximum and its sign, which rule 2 needs."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits << 1) | (bits >> 31)) ^ 1


@triton.jit
def largest_key(x_RV):
    """The largest key of every row, from the largest positive and the largest negative value: two maxima of the bits
    are cheaper than a key for every value."""
    above_R = tl.max(x_RV.to(tl.int32, bitcast=True), axis=1)
    below_R = tl.max(x_RV.to(tl.uint32, bitcast=True), axis=1)
    return tl.maximum(key_of(above_R), key_of(below_R))


@triton.jit
def rotated(x_RV, rem, R: tl.constexpr, V: tl.constexpr):
    """Rule 6: rotate blocks, and tell which had a non-finite value; those become zeros."""
    poisoned_R = tl.max(key_of(x_RV) >> 1, axis=1) >= INF_BITS
    x_RV = tl.where(poisoned_R[:, None], 0.0, x_RV)
    turned_RV = butterflies(flip_signs(x_RV * (1.0 / V), V), R, V, 1)
    whole_R = (tl.arange(0, R) + 1) * V <= rem
    return tl.where(whole_R[:, None], turned_RV, x_RV), poisoned_R


@triton.jit
def unrotated(code_RV, rem, R: tl.constexpr, V: tl.constexpr):
    """Rule 6 backwards: rotate the codes (fp32) of all whole blocks."""
    turned_RV = flip_signs(products(code_RV, R, V), V)
    if rem < R * V:
        whole_R = (tl.arange(0, R) + 1) * V <= rem
        turned_RV = tl.where(whole_R[:, None], turned_RV, code_RV)
    return turned_RV


@triton.jit
def quantize(
    x_RV,
    key_R,
    poisoned_R,
    position_RV,
    seed,
    FORM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Codes (R, V) and the bits of the scales (R), computed from the largest keys."""
    R: tl.constexpr = TILE.rows
    V: tl.constexpr = TILE.columns
    BITS: tl.constexpr = FORM.bits
    SEARCH: tl.constexpr = FORM.searches
    STOCHASTIC: tl.constexpr = FORM.stochastic
    largest_R = (key_R >> 1).to(tl.float32, bitcast=True)
    bounded_R = tl.maximum(largest_R, SMALLEST_MAX)
    max_R = tl.where((key_R & 1) == 1, bounded_R, -bounded_R)
    if STOCHASTIC:
        code_RV, scale_R = round_at_random(x_RV, bounded_R, position_RV, seed, R, BITS)
    elif SEARCH:
        code_RV, scale_R = search(x_RV, max_R, R, V, BITS)
    else:
        levels: tl.constexpr = 1 << (BITS - 1)
        code_RV = to_codes(x_RV, max_R, R, levels)
        scale_R = max_R * (-1.0 / levels)
    bits_R = tl.where(largest_R == 0.0, 0, scale_R.to(tl.int32, bitcast=True))
    return code_RV, tl.where(poisoned_R, NAN_BITS, bits_R)


@triton.jit
def to_codes(x_RV, max_R, R: tl.constexpr, LEVELS: tl.constexpr):
    """Codes of rule 3, plus MAGIC_BITS. None is below -LEVELS, because no value exceeds the maximum."""
    factor_R = tl.div_rn(tl.full((R,), -LEVELS, tl.float32), max_R)
    return tl.minimum(x_RV * factor_R[:, None] + MAGIC, MAGIC + (LEVELS - 1)).to(tl.int32, bitcast=True)


@triton.jit
def search(x_RV, max_R, R: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr):
    """Rule 4. All sums are of integers, and therefore exact in any order."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    UNIT: tl.constexpr = 256 >> (BITS - 1)
    START: tl.constexpr = 84 if BITS == 2 else 46 if BITS == 3 else 27 if BITS == 4 else 15
    # w + 128 in the lowest bits. Adding the even number 128 to MAGIC changes no rounding.
    factor_R = tl.div_rn(tl.full((R,), -32768, tl.float32), max_R)
    fine_RV = tl.minimum(x_RV * factor_R[:, None] + (MAGIC + 128), MAGIC + (128 + 32767))
    # Values of a = 127 and more count as the smallest of them, so that neither a nor v needs another limit.
    below_RV = tl.minimum(fine_RV, MAGIC + 32767).to(tl.int32, bitcast=True)
    fine_RV = fine_RV.to(tl.int32, bitcast=True)
    bits_RV = (below_RV >> 9) * 4 + (1 + MAGIC_BITS - 4 * (MAGIC_BITS >> 9))
    middle_RV = bits_RV.to(tl.float32, bitcast=True) - MAGIC
    best_R = tl.full((R,), START, tl.int32)
    error_R = error_of(middle_RV, bits_RV, best_R, R, V, LEVELS)
    for part in tl.static_range(3):
        if UNIT >> (3 + part) >= 1:
            centre_R = best_R
            for sign in tl.static_range(2):
                tried_R = centre_R + (2 * sign - 1) * (UNIT >> (3 + part))
                tried_error_R = error_of(middle_RV, bits_RV, tried_R, R, V, LEVELS)
                better_R = tried_error_R < error_R
                best_R = tl.where(better_R, tried_R, best_R)
                error_R = tl.where(better_R, tried_error_R, error_R)
    # r is 2^(17-N) / S rounded, with halves upwards. A quarter more in the numerator gives the same in any rounding.
    reciprocal_R = (((1 << (17 - BITS)) + 0.25) / best_R.to(tl.float32) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    half_R = (1 << (23 - BITS)) - (MAGIC_BITS + 128) * reciprocal_R
    code_RV = (fine_RV * reciprocal_R[:, None] + half_R[:, None]) >> (24 - BITS)
    code_RV = tl.maximum(tl.minimum(code_RV, LEVELS - 1), -LEVELS)
    a_RV = (below_RV >> 8) - (MAGIC_BITS >> 8)
    num_R = tl.sum(a_RV * code_RV, axis=1)
    den_R = tl.sum(code_RV * code_RV, axis=1)
    ratio_R = tl.div_rn(num_R.to(tl.float32), tl.maximum(den_R, 1).to(tl.float32))
    scale_R = max_R * (-1.0 / 128) * ratio_R
    return code_RV + MAGIC_BITS, tl.where(den_R == 0, 0.0, scale_R)


@triton.jit
def error_of(middle_RV, bits_RV, step_R, R: tl.constexpr, V: tl.constexpr, LEVELS: tl.constexpr):
    """error(S) of each row, from the middles of its values (fp32) and MAGIC_BITS plus them (int32). A value takes four
    instructions and a sum."""
    # q is v / S rounded and limited. The limits are those of saturation to [0, 1], which costs no instruction. Rounding
    # may take halves to either side, because both multiples of S are then at the same distance. Other quotients are at
    # least 1 / 2S away from every half, and the error of fp32 is far below that, fused or not.
    inverse_R = (1.0 / step_R.to(tl.float32)) * (1.0 / (2 * LEVELS - 1))
    inverse_RV = tl.broadcast_to(inverse_R[:, None], middle_RV.shape)
    at_RV = tl.fma(middle_RV, inverse_RV, tl.full(middle_RV.shape, LEVELS / (2 * LEVELS - 1), tl.float32))
    at_RV = tl.minimum(tl.maximum(at_RV, 0.0), 1.0)
    steps_RV = tl.full(middle_RV.shape, 2 * LEVELS - 1, tl.float32)
    q_RV = tl.fma(at_RV, steps_RV, tl.full(middle_RV.shape, MAGIC - LEVELS, tl.float32)).to(tl.int32, bitcast=True)
    difference_RV = bits_RV - q_RV * step_R[:, None]
    if LEVELS < 8 or V > 512:
        difference_RV = (difference_RV << 10) >> 10
        if LEVELS < 8:
            difference_RV = tl.minimum(tl.abs(difference_RV), 127)
        error_R = tl.sum(difference_RV * difference_RV, axis=1)
    else:
        # MAGIC_BITS is a multiple of 2^22. So this is the difference modulo 2^22, and its square is the square of the
        # difference modulo 2^23. With 4 bits, 20 <= S <= 34, so a difference is at most 34, or 253 - 7 * 20 = 113 at
        # the ends; with 5 bits, it is at most 253 - 15 * 12 = 73. The sum of 512 squares is below 2^23.
        error_R = tl.sum(difference_RV * difference_RV, axis=1) & 0x7FFFFF
    return error_R


@triton.jit
def round_at_random(x_RV, bounded_R, position_RV, seed, R: tl.constexpr, BITS: tl.constexpr):
    """Rule 5."""
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1
    h = position_RV.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    h = mix(h ^ (h >> 16))
    uniform_RV = (h >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
    levels_R = tl.full((R,), LEVELS, tl.float32)
    factor_R = tl.div_rn(levels_R, bounded_R)
    code_RV = _floor(x_RV * factor_R[:, None] + uniform_RV)
    code_RV = tl.minimum(tl.maximum(code_RV, -1.0 * LEVELS), 1.0 * LEVELS)
    return (code_RV + MAGIC).to(tl.int32, bitcast=True), tl.div_rn(bounded_R, levels_R)


@triton.jit
def _floor(x):
    """``tl.floor`` for magnitudes below 2^22; in some releases of Triton, ``tl.floor`` flushes denormals to zero."""
    nearest = (x + MAGIC) - MAGIC
    return nearest - (nearest > x).to(tl.float32)


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
