// The operations of lanes.hpp that SSE4, AVX2 and AVX-512 have alike, of any width: MM(name) is the intrinsic of that
// name. What differs stands in lanes_sse4.hpp, lanes_avx2.hpp and lanes_avx512.hpp, which include this file.
#pragma once

#include <cstdint>

#include "kernels/lanes.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

Lanes zeros() {
    return Lanes{};
}

Lanes all_bytes(int value) {
    return MM(set1_epi8)(static_cast<char>(value));
}

Lanes all_words(int value) {
    return MM(set1_epi16)(static_cast<std::int16_t>(value));
}

Lanes all_numbers(std::int32_t value) {
    return MM(set1_epi32)(value);
}

Floats all_floats(float value) {
    return MM(set1_ps)(value);
}

// ------------------------------------------------------------------------------------------------ rounding

// x * factor, rounded to nearest even, as words with saturation: of each 128 bits, those of `a` before those of `b`.
Lanes rounded_words(Floats a, Floats b, Floats factor) {
    return MM(packs_epi32)(MM(cvtps_epi32)(MM(mul_ps)(a, factor)), MM(cvtps_epi32)(MM(mul_ps)(b, factor)));
}

// Words as bytes with saturation, in the same order.
Lanes bytes_of(Lanes a, Lanes b) {
    return MM(packs_epi16)(a, b);
}

// ------------------------------------------------------------------------------------------------ words and bytes

// a * b / 2^15, rounded, halves upwards.
Lanes rounded_products(Lanes a, Lanes b) {
    return MM(mulhrs_epi16)(a, b);
}

Lanes magnitudes_of_bytes(Lanes a) {
    return MM(abs_epi8)(a);
}

Lanes smaller_bytes(Lanes a, Lanes b) {
    return MM(min_epu8)(a, b);
}

// `value`, plus one where a byte of `a` is negative.
Lanes one_more_where_negative(int value, Lanes a) {
#if defined(__AVX512BW__)
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(a), all_bytes(value), all_bytes(value + 1));
#else
    return MM(sub_epi8)(all_bytes(value), MM(cmpgt_epi8)(zeros(), a));
#endif
}

// Bytes between two numbers.
Lanes limited_bytes(Lanes a, int least, int most) {
    return MM(max_epi8)(MM(min_epi8)(a, all_bytes(most)), all_bytes(least));
}

// ------------------------------------------------------------------------------------------------ sums

// Sums of products of bytes of which one is below 128, in 16 bits: as many steps as keep each below 2^15.
Lanes add_products(Lanes sums, Lanes a, Lanes b) {
    return MM(add_epi16)(sums, MM(maddubs_epi16)(a, b));
}

// Sums of 16 bits, each below 2^15, added to others of 32 bits.
Lanes add_sums(Lanes total, Lanes sums) {
    return MM(add_epi32)(total, MM(madd_epi16)(sums, all_words(1)));
}

// Bytes added to sums of 32 bits.
Lanes add_bytes(Lanes total, Lanes bytes) {
    return MM(add_epi32)(total, MM(sad_epu8)(bytes, zeros()));
}

Lanes sum(Lanes a, Lanes b) {
    return MM(add_epi32)(a, b);
}

Lanes larger(Lanes a, Lanes b) {
    return MM(max_epi32)(a, b);
}

Lanes larger_unsigned(Lanes a, Lanes b) {
    return MM(max_epu32)(a, b);
}

// One number from the 32-bit lanes of each of four registers.
template <Lanes (*kJoin)(Lanes, Lanes)>
Ints4 reduced(const Lanes (&lanes)[4]) {
    const Lanes first = kJoin(MM(unpacklo_epi32)(lanes[0], lanes[1]), MM(unpackhi_epi32)(lanes[0], lanes[1]));
    const Lanes second = kJoin(MM(unpacklo_epi32)(lanes[2], lanes[3]), MM(unpackhi_epi32)(lanes[2], lanes[3]));
    return joined<kJoin>(kJoin(MM(unpacklo_epi64)(first, second), MM(unpackhi_epi64)(first, second)));
}

// ------------------------------------------------------------------------------------------------ sources

// kWidth values in four parts, which rounded_words and bytes_of join in whatever order is cheapest; pairs of positions
// 2i and 2i + 1 stay side by side. Maxima and sums do not mind; in_order and pairs_in_order tell who writes values.
struct Parts {
    Floats part[4];
};

struct Float32 : OrderOfFloats {
    static constexpr std::int64_t kBytes = 4;

    static Parts load(const char* x) {
        const auto* from = reinterpret_cast<const float*>(x);
        return {{MM(loadu_ps)(from), MM(loadu_ps)(from + kWidth / 4), MM(loadu_ps)(from + kWidth / 2),
                 MM(loadu_ps)(from + 3 * kWidth / 4)}};
    }

    // Per 32-bit lane, the largest of the bits as signed and as unsigned integers.
    static void largest(const char* x, std::int64_t numel, Lanes& most, Lanes& most_unsigned) {
        most = all_numbers(INT32_MIN);
        most_unsigned = zeros();
        for (std::int64_t i = 0; i < numel; i += kWidth / 4) {
            const Lanes bits = load_lanes(x + 4 * i);
            most = larger(most, bits);
            most_unsigned = larger_unsigned(most_unsigned, bits);
        }
    }

    static Floats4 widened(Ints4 bits) {
        return __builtin_bit_cast(Floats4, bits);
    }
};

// What dtypes of 16 bits have in common.
struct SixteenBits {
    static constexpr std::int64_t kBytes = 2;

    static void largest(const char* x, std::int64_t numel, Lanes& most, Lanes& most_unsigned) {
        most = all_words(INT16_MIN);
        most_unsigned = zeros();
        for (std::int64_t i = 0; i < numel; i += kWidth / 2) {
            const Lanes bits = load_lanes(x + 2 * i);
            most = MM(max_epi16)(most, bits);
            most_unsigned = MM(max_epu16)(most_unsigned, bits);
        }
        const Lanes high_halves = all_numbers(-0x10000);
        most = larger(MM(slli_epi32)(most, 16), most & high_halves);
        most_unsigned = larger_unsigned(MM(slli_epi32)(most_unsigned, 16), most_unsigned & high_halves);
    }
};

struct BFloat16 : SixteenBits, OrderOfHalves {
    static Parts load(const char* x) {
        const Lanes first = load_lanes(x);
        const Lanes second = load_lanes(x + kWidth);
        return {{lower(first), upper(first), lower(second), upper(second)}};
    }

    static Floats4 widened(Ints4 bits) {
        return __builtin_bit_cast(Floats4, bits);
    }

private:
    // The words of each 128 bits' lower or upper half, above zeros.
    static Floats lower(Lanes bits) {
        return __builtin_bit_cast(Floats, MM(unpacklo_epi16)(zeros(), bits));
    }

    static Floats upper(Lanes bits) {
        return __builtin_bit_cast(Floats, MM(unpackhi_epi16)(zeros(), bits));
    }
};

struct Float16 : SixteenBits, OrderOfFloats {
    static Parts load(const char* x) {
        return {{widened_halves(x), widened_halves(x + kWidth / 2), widened_halves(x + kWidth),
                 widened_halves(x + 3 * kWidth / 2)}};
    }

    static Floats4 widened(Ints4 bits) {
        Floats4 values;
        for (int i = 0; i < 4; ++i) {
            values[i] = float_of_fp16(static_cast<std::uint16_t>(bits[i] >> 16));
        }
        return values;
    }
};

// ------------------------------------------------------------------------------------------------ nibbles

Lanes low_nibbles(Lanes bytes) {
    return bytes & all_bytes(15);
}

// The pairs of two vectors of codes.
template <class Source>
Lanes packed_nibbles(Lanes first, Lanes second) {
    const Lanes weights = all_words(0x1001);  // 1 for the even values, 16 for the odd ones
    const Lanes low = MM(maddubs_epi16)(low_nibbles(first), weights);
    const Lanes high = MM(maddubs_epi16)(low_nibbles(second), weights);
    return Source::pairs_in_order(MM(packus_epi16)(low, high));
}

Lanes high_nibbles(Lanes bytes) {
    return low_nibbles(MM(srli_epi16)(bytes, 4));
}

Lanes looked_up(Lanes table, Lanes nibbles) {
    return MM(shuffle_epi8)(table, nibbles);
}

// Of each 128 bits the lower or the upper half of both, byte by byte or word by word in turn.
Lanes lower_bytes(Lanes a, Lanes b) {
    return MM(unpacklo_epi8)(a, b);
}

Lanes upper_bytes(Lanes a, Lanes b) {
    return MM(unpackhi_epi8)(a, b);
}

Lanes lower_words(Lanes a, Lanes b) {
    return MM(unpacklo_epi16)(a, b);
}

Lanes upper_words(Lanes a, Lanes b) {
    return MM(unpackhi_epi16)(a, b);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET

#undef MM
