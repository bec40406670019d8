# mypy: disable-error-code="no-untyped-def,no-any-return,untyped-decorator"
"""Device functions of block quantisation. Numbered rules refer to ``docs/wire-format.md``.

Shapes: R blocks of V values (zeros where a block is shorter). Codes are fp32, as MAGIC + code.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.codecs.triton.tiles import MAGIC, MAGIC_BITS, butterflies, eighths, flip_signs

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
def rotated(x_RV, rem, R: tl.constexpr, V: tl.constexpr):
    """Rule 6: rotate blocks, and tell which had a non-finite value; those become zeros."""
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
    """Codes of rule 3. None is below -LEVELS, because no value exceeds the maximum."""
    factor_R = tl.div_rn(tl.full((R,), -LEVELS, tl.float32), max_R)
    return tl.minimum(x_RV * factor_R[:, None] + MAGIC, MAGIC + (LEVELS - 1))


@triton.jit
def search(x_RV, max_R, poisoned_R, R: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr):
    """Rule 4. Its sums are in fp32, but of integers below 2^24, and therefore exact in any order."""
    LEVELS: tl.constexpr = 1 << (BITS - 1)
    UNIT: tl.constexpr = 256 >> (BITS - 1)
    START: tl.constexpr = 84 if BITS == 2 else 46 if BITS == 3 else 27 if BITS == 4 else 15
    fine_RV = tl.where(poisoned_R[:, None], MAGIC, to_codes(x_RV, max_R, R, 1 << 15)).to(tl.int32, bitcast=True)
    fine_RV -= MAGIC_BITS
    a_RV = tl.minimum((fine_RV + 128) >> 8, 127)
    m = eighths((4 * (a_RV >> 1) + (1 + MAGIC_BITS)).to(tl.float32, bitcast=True) - MAGIC, R, V)
    best_R = tl.full((R,), START, tl.float32)
    error_R = error_of(m, best_R, LEVELS)
    for part in tl.static_range(3):
        if UNIT >> (3 + part) >= 1:
            centre_R = best_R
            for sign in tl.static_range(2):
                tried_R = centre_R + (2 * sign - 1) * (UNIT >> (3 + part))
                tried_error_R = error_of(m, tried_R, LEVELS)
                better_R = tried_error_R < error_R
                best_R = tl.where(better_R, tried_R, best_R)
                error_R = tl.where(better_R, tried_error_R, error_R)
    step_R = best_R.to(tl.int32)
    reciprocal_R = ((1 << (18 - BITS)) + step_R) // (2 * step_R)
    finer_RV = (fine_RV * reciprocal_R[:, None]) >> 16
    code_RV = (finer_RV + (1 << (7 - BITS))) >> (8 - BITS)
    code_RV = tl.maximum(tl.minimum(code_RV, LEVELS - 1), -LEVELS)
    num_R = tl.sum(a_RV * code_RV, axis=1)
    den_R = tl.sum(code_RV * code_RV, axis=1)
    ratio_R = tl.div_rn(num_R.to(tl.float32), tl.maximum(den_R, 1).to(tl.float32))
    scale_R = max_R * (-1.0 / 128) * ratio_R
    return (code_RV + MAGIC_BITS).to(tl.float32, bitcast=True), tl.where(den_R == 0, 0.0, scale_R)


@triton.jit
def error_of(m, step_R, LEVELS: tl.constexpr):
    """error(S) of each row, computed from the midpoints of its values in eighths."""
    error_RG = add_error(tl.zeros(m[0].shape, tl.float32), m[0], step_R, LEVELS)
    error_RG = add_error(error_RG, m[1], step_R, LEVELS)
    error_RG = add_error(error_RG, m[2], step_R, LEVELS)
    error_RG = add_error(error_RG, m[3], step_R, LEVELS)
    error_RG = add_error(error_RG, m[4], step_R, LEVELS)
    error_RG = add_error(error_RG, m[5], step_R, LEVELS)
    error_RG = add_error(error_RG, m[6], step_R, LEVELS)
    error_RG = add_error(error_RG, m[7], step_R, LEVELS)
    return row_sums(error_RG)


@triton.jit
def add_error(error_RG, m_RG, step_R, LEVELS: tl.constexpr):
    # q is m / S rounded, with halves upwards. (m + 1/4) / S gives the same in any rounding mode: for integers m and S,
    # it is at least 1 / 4S, more than 2^-9, away from every half, and the error of fp32 is below 2^-14. This also holds
    # for a fused multiply-add, so the compiler may fuse here or not.
    inverse_R = tl.div_rn(tl.full(step_R.shape, 1.0, tl.float32), step_R)
    inverse_RG = tl.broadcast_to(inverse_R[:, None], m_RG.shape)
    f_RG = tl.fma(m_RG + 0.25, inverse_RG, tl.full(m_RG.shape, MAGIC, tl.float32))
    q_RG = tl.maximum(tl.minimum(f_RG, MAGIC + (LEVELS - 1)), MAGIC - LEVELS) - MAGIC
    difference_RG = tl.fma(q_RG, tl.broadcast_to(-step_R[:, None], m_RG.shape), m_RG)
    if LEVELS < 8:
        # With 4 bits, 20 <= S <= 34, so a difference is at most 34, or 253 - 7 * 20 = 113 at the ends. With 5 bits, it
        # is at most 253 - 15 * 12 = 73. The limit matters only for fewer bits.
        difference_RG = tl.minimum(tl.abs(difference_RG), 127.0)
    return tl.fma(difference_RG, difference_RG, error_RG)


@triton.jit
def row_sums(group_RG):
    """Sum integers of magnitude up to 2^17 in int32. The sum of a long row may not fit in fp32, and a GPU adds integers
    across lanes in one instruction."""
    return tl.sum((group_RG + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS, axis=1)


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
    return code_RV + MAGIC, tl.div_rn(bounded_R, levels_R)


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
