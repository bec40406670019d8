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
    COARSE: tl.constexpr = 127 if BITS == 5 else 63
    FINER: tl.constexpr = 8 if BITS >= 4 else LEVELS
    UNIT: tl.constexpr = 64 * (COARSE + 1) // LEVELS
    OUTLIER: tl.constexpr = 49152 if BITS == 5 else 8192
    BASE: tl.constexpr = 34.0 if BITS == 2 else 38.0 if BITS == 3 else 47.25 if BITS == 4 else 56.5
    SLOPE: tl.constexpr = 1575.0 if BITS == 2 else 1282.0 if BITS == 3 else 783.0 if BITS == 4 else 764.0
    SPREAD: tl.constexpr = 12 if BITS == 2 else 8 if BITS == 3 else 5 if BITS == 4 else 4
    fine_RV = x_RV * tl.div_rn(tl.full((R,), -COARSE * FINER, tl.float32), max_R)[:, None] + MAGIC - MAGIC
    # Halves are rounded away from zero, because the product is a little larger. It is exact.
    step_RV = tl.full(fine_RV.shape, (1 + 2**-12) / FINER, tl.float32)
    coarse_RV = tl.fma(fine_RV, step_RV, tl.full(fine_RV.shape, MAGIC, tl.float32))
    bits_RV = coarse_RV.to(tl.int32, bitcast=True)
    coarse_RV -= MAGIC
    squares_R = sum_of_products(bits_RV, bits_RV, COARSE * COARSE, V)
    ratio_R = tl.div_rn(tl.sum(tl.abs(coarse_RV), axis=1), squares_R + OUTLIER)
    centre_R = tl.minimum((ratio_R * SLOPE + BASE + MAGIC) - MAGIC, 255 - SPREAD)
    num_R, den_R = products_of(coarse_RV, bits_RV, centre_R, UNIT, COARSE, V, LEVELS)
    for sign in tl.static_range(2):
        gain_R = centre_R + (2 * sign - 1) * SPREAD
        tried_num_R, tried_den_R = products_of(coarse_RV, bits_RV, gain_R, UNIT, COARSE, V, LEVELS)
        better_R = (tried_num_R * tried_num_R) * den_R > (num_R * num_R) * tried_den_R
        num_R = tl.where(better_R, tried_num_R, num_R)
        den_R = tl.where(better_R, tried_den_R, den_R)
    gain_R = (tl.div_rn(den_R * (32768 // FINER), tl.maximum(num_R, 1.0)) + MAGIC) - MAGIC
    code_RV = codes_of(fine_RV, gain_R, 32768, LEVELS)
    num_R = sum_of_products(bits_RV, code_RV, COARSE * LEVELS, V)
    den_R = sum_of_products(code_RV, code_RV, LEVELS * LEVELS, V)
    scale_R = max_R * (-1.0 / COARSE) * tl.div_rn(num_R, tl.maximum(den_R, 1.0))
    return code_RV, tl.where(den_R == 0, 0.0, scale_R)


@triton.jit
def products_of(
    coarse_RV, bits_RV, gain_R, UNIT: tl.constexpr, COARSE: tl.constexpr, V: tl.constexpr, LEVELS: tl.constexpr
):
    """The sums of value * code and of code * code (fp32) of each row, for the codes of a gain. A value takes four
    instructions and two sums."""
    code_RV = codes_of(coarse_RV, gain_R, UNIT, LEVELS)
    num_R = sum_of_products(bits_RV, code_RV, COARSE * LEVELS, V)
    return num_R, sum_of_products(code_RV, code_RV, LEVELS * LEVELS, V)


@triton.jit
def codes_of(x_RV, gain_R, UNIT: tl.constexpr, LEVELS: tl.constexpr):
    """MAGIC_BITS + the codes of integers (fp32): x * gain / UNIT rounded, halves upwards, and limited."""
    # The limits are those of saturation to [0, 1], which costs no instruction. The quotient is a multiple of 1 / UNIT.
    # Half of that more turns no other quotient and keeps it so far from every half that the error of fp32 does not
    # matter, fused or not.
    RANGE: tl.constexpr = 2 * LEVELS - 1
    factor_RV = tl.broadcast_to((gain_R * (1.0 / (UNIT * RANGE)))[:, None], x_RV.shape)
    at_RV = tl.fma(x_RV, factor_RV, tl.full(x_RV.shape, (LEVELS + 0.5 / UNIT) / RANGE, tl.float32))
    at_RV = tl.minimum(tl.maximum(at_RV, 0.0), 1.0)
    range_RV = tl.full(x_RV.shape, RANGE, tl.float32)
    return tl.fma(at_RV, range_RV, tl.full(x_RV.shape, MAGIC - LEVELS, tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def sum_of_products(a_RV, b_RV, MOST: tl.constexpr, V: tl.constexpr):
    """The sum (fp32) of each row's products, which are 0 to MOST, of integers that are given as MAGIC_BITS more."""
    if MOST * V < 1 << 22:
        # MAGIC_BITS is a multiple of 2^22. So the lowest bits of a product are those of the integers' product.
        sum_R = tl.sum(a_RV * b_RV, axis=1) & ((1 << 22) - 1)
    else:
        sum_R = tl.sum((a_RV - MAGIC_BITS) * (b_RV - MAGIC_BITS), axis=1)
    return sum_R.to(tl.float32)


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
