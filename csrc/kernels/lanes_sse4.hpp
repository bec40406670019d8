// The operations of lanes.hpp with SSE4 (and SSSE3).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/lanes.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kWidth = 16;

using Lanes = __m128i;
using Floats = __m128;

Lanes load_lanes(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
}

void store_lanes(void* to, Lanes lanes) {
    _mm_storeu_si128(static_cast<__m128i*>(to), lanes);
}

Lanes zeros() {
    return _mm_setzero_si128();
}

Lanes all_bytes(int value) {
    return _mm_set1_epi8(static_cast<char>(value));
}

Lanes all_words(int value) {
    return _mm_set1_epi16(static_cast<std::int16_t>(value));
}

Lanes all_numbers(std::int32_t value) {
    return _mm_set1_epi32(value);
}

Floats all_floats(float value) {
    return _mm_set1_ps(value);
}

// ------------------------------------------------------------------------------------------------ rounding

// x * factor, rounded to nearest even, as words with saturation: of each 128 bits, those of `a` before those of `b`.
Lanes rounded_words(Floats a, Floats b, Floats factor) {
    return _mm_packs_epi32(_mm_cvtps_epi32(_mm_mul_ps(a, factor)), _mm_cvtps_epi32(_mm_mul_ps(b, factor)));
}

// Words as bytes with saturation, in the same order.
Lanes bytes_of(Lanes a, Lanes b) {
    return _mm_packs_epi16(a, b);
}

// ------------------------------------------------------------------------------------------------ words and bytes

// a * b / 2^15, rounded, halves upwards.
Lanes rounded_products(Lanes a, Lanes b) {
    return _mm_mulhrs_epi16(a, b);
}

Lanes magnitudes_of_bytes(Lanes a) {
    return _mm_abs_epi8(a);
}

Lanes smaller_bytes(Lanes a, Lanes b) {
    return _mm_min_epu8(a, b);
}

// `value`, plus one where a byte of `a` is negative.
Lanes one_more_where_negative(int value, Lanes a) {
    return _mm_sub_epi8(all_bytes(value), _mm_cmpgt_epi8(zeros(), a));
}

// Bytes between two numbers.
Lanes limited_bytes(Lanes a, int least, int most) {
    return _mm_max_epi8(_mm_min_epi8(a, all_bytes(most)), all_bytes(least));
}

// ------------------------------------------------------------------------------------------------ sums

// Sums of products of bytes of which one is below 128, in 16 bits: as many steps as keep each below 2^15.
Lanes add_products(Lanes sums, Lanes a, Lanes b) {
    return _mm_add_epi16(sums, _mm_maddubs_epi16(a, b));
}

// Sums of 16 bits, each below 2^15, added to others of 32 bits.
Lanes add_sums(Lanes total, Lanes sums) {
    return _mm_add_epi32(total, _mm_madd_epi16(sums, all_words(1)));
}

// Bytes added to sums of 32 bits.
Lanes add_bytes(Lanes total, Lanes bytes) {
    return _mm_add_epi32(total, _mm_sad_epu8(bytes, zeros()));
}

Lanes sum(Lanes a, Lanes b) {
    return _mm_add_epi32(a, b);
}

Lanes larger(Lanes a, Lanes b) {
    return _mm_max_epi32(a, b);
}

Lanes larger_unsigned(Lanes a, Lanes b) {
    return _mm_max_epu32(a, b);
}

// One number from the 32-bit lanes of each of four registers.
template <Lanes (*kJoin)(Lanes, Lanes)>
Ints4 reduced(const Lanes (&lanes)[4]) {
    const Lanes first = kJoin(_mm_unpacklo_epi32(lanes[0], lanes[1]), _mm_unpackhi_epi32(lanes[0], lanes[1]));
    const Lanes second = kJoin(_mm_unpacklo_epi32(lanes[2], lanes[3]), _mm_unpackhi_epi32(lanes[2], lanes[3]));
    return __builtin_bit_cast(Ints4, kJoin(_mm_unpacklo_epi64(first, second), _mm_unpackhi_epi64(first, second)));
}

// ------------------------------------------------------------------------------------------------ sources

// kWidth values in four parts, which rounded_words and bytes_of join in whatever order is cheapest; pairs of positions
// 2i and 2i + 1 stay side by side. Maxima and sums do not mind; in_order and pairs_in_order tell who writes values.
struct Parts {
    Floats part[4];
};

struct Float32 {
    static constexpr std::int64_t kBytes = 4;

    static Parts load(const char* x) {
        const auto* from = reinterpret_cast<const float*>(x);
        return {{_mm_loadu_ps(from), _mm_loadu_ps(from + 4), _mm_loadu_ps(from + 8), _mm_loadu_ps(from + 12)}};
    }

    // Per 32-bit lane, the largest of the bits as signed and as unsigned integers.
    static void largest(const char* x, std::int64_t numel, Lanes& most, Lanes& most_unsigned) {
        most = _mm_set1_epi32(INT32_MIN);
        most_unsigned = zeros();
        for (std::int64_t i = 0; i < numel; i += 4) {
            const Lanes bits = load_lanes(x + 4 * i);
            most = _mm_max_epi32(most, bits);
            most_unsigned = _mm_max_epu32(most_unsigned, bits);
        }
    }

    static Floats4 widened(Ints4 bits) {
        return __builtin_bit_cast(Floats4, bits);
    }

    static Lanes in_order(Lanes bytes) {
        return bytes;
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return bytes;
    }
};

// What dtypes of 16 bits have in common.
struct SixteenBits {
    static constexpr std::int64_t kBytes = 2;

    static void largest(const char* x, std::int64_t numel, Lanes& most, Lanes& most_unsigned) {
        most = _mm_set1_epi16(INT16_MIN);
        most_unsigned = zeros();
        for (std::int64_t i = 0; i < numel; i += 8) {
            const Lanes bits = load_lanes(x + 2 * i);
            most = _mm_max_epi16(most, bits);
            most_unsigned = _mm_max_epu16(most_unsigned, bits);
        }
        most = _mm_max_epi32(_mm_slli_epi32(most, 16), high_halves(most));
        most_unsigned = _mm_max_epu32(_mm_slli_epi32(most_unsigned, 16), high_halves(most_unsigned));
    }

protected:
    static Lanes high_halves(Lanes bits) {
        return _mm_and_si128(bits, _mm_set1_epi32(-0x10000));
    }
};

struct BFloat16 : SixteenBits {
    static Parts load(const char* x) {
        const Lanes first = load_lanes(x);
        const Lanes second = load_lanes(x + 16);
        return {{lower(first), upper(first), lower(second), upper(second)}};
    }

    static Floats4 widened(Ints4 bits) {
        return __builtin_bit_cast(Floats4, bits);
    }

    static Lanes in_order(Lanes bytes) {
        return bytes;
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return bytes;
    }

private:
    // The words of each 128 bits' lower or upper half, above zeros.
    static Floats lower(Lanes bits) {
        return _mm_castsi128_ps(_mm_unpacklo_epi16(zeros(), bits));
    }

    static Floats upper(Lanes bits) {
        return _mm_castsi128_ps(_mm_unpackhi_epi16(zeros(), bits));
    }
};

struct Float16 : SixteenBits {
    static Parts load(const char* x) {
        return {{widened_four(x), widened_four(x + 8), widened_four(x + 16), widened_four(x + 24)}};
    }

    static Floats4 widened(Ints4 bits) {
        Floats4 values;
        for (int i = 0; i < 4; ++i) {
            values[i] = float_of_fp16(static_cast<std::uint16_t>(bits[i] >> 16));
        }
        return values;
    }

    static Lanes in_order(Lanes bytes) {
        return Float32::in_order(bytes);
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return Float32::pairs_in_order(bytes);
    }

private:
    // Without F16C: what is finite exactly, and what is not as numbers, which rule 1 does not look at.
    static Floats widened_four(const char* x) {
        const Lanes halves = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
        const Lanes sign = _mm_slli_epi32(_mm_srli_epi32(halves, 15), 31);
        const Lanes magnitude = _mm_srli_epi32(_mm_slli_epi32(halves, 17), 4);
        // A denormal gets the smallest normal's exponent, and with it one too many of its leading bit.
        const Lanes is_denormal = _mm_cmpgt_epi32(_mm_set1_epi32(1 << 23), magnitude);
        const Lanes smallest = _mm_and_si128(is_denormal, _mm_set1_epi32(113 << 23));
        const Lanes exponent = _mm_sub_epi32(_mm_set1_epi32(112 << 23), _mm_slli_epi32(is_denormal, 23));
        const Floats value = _mm_castsi128_ps(_mm_add_epi32(magnitude, exponent));
        return _mm_or_ps(_mm_sub_ps(value, _mm_castsi128_ps(smallest)), _mm_castsi128_ps(sign));
    }
};

// ------------------------------------------------------------------------------------------------ nibbles

Lanes low_nibbles(Lanes bytes) {
    return _mm_and_si128(bytes, all_bytes(15));
}

// The pairs of two vectors of codes.
template <class Source>
Lanes packed_nibbles(Lanes first, Lanes second) {
    const Lanes weights = all_words(0x1001);  // 1 for the even values, 16 for the odd ones
    const Lanes low = _mm_maddubs_epi16(low_nibbles(first), weights);
    const Lanes high = _mm_maddubs_epi16(low_nibbles(second), weights);
    return Source::pairs_in_order(_mm_packus_epi16(low, high));
}

Lanes high_nibbles(Lanes bytes) {
    return low_nibbles(_mm_srli_epi16(bytes, 4));
}

// A table of sixteen bytes for looked_up.
Lanes table_of(const void* bytes) {
    return _mm_loadu_si128(static_cast<const __m128i*>(bytes));
}

Lanes looked_up(Lanes table, Lanes nibbles) {
    return _mm_shuffle_epi8(table, nibbles);
}

// Of each 128 bits the lower or the upper half of both, byte by byte or word by word in turn.
Lanes lower_bytes(Lanes a, Lanes b) {
    return _mm_unpacklo_epi8(a, b);
}

Lanes upper_bytes(Lanes a, Lanes b) {
    return _mm_unpackhi_epi8(a, b);
}

Lanes lower_words(Lanes a, Lanes b) {
    return _mm_unpacklo_epi16(a, b);
}

Lanes upper_words(Lanes a, Lanes b) {
    return _mm_unpackhi_epi16(a, b);
}

template <int kParts>
void store_in_turn(void* to, const Lanes (&parts)[kParts]) {
    auto* at = static_cast<__m128i*>(to);
    for (int i = 0; i < kParts; ++i) {
        _mm_storeu_si128(at + i, parts[i]);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
