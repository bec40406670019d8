// Values of blocks as whole numbers, for CPUs with AVX-512: 64 at a time, and of those the even and the odd positions
// apart, in whatever order is cheapest. Maxima and sums do not mind; Source::kPairs tells who writes values.
// Included by block.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/block_rules.hpp"
#include "kernels/kernels.hpp"
#include "kernels/values.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kChunk = 64;

// Which pairs of a chunk, of positions 2i and 2i + 1, a register has that was packed to words or bytes.
struct Pairs {
    // Where the bytes of a chunk come from, if each lane has 8 of even and 8 of odd positions.
    alignas(64) std::uint8_t values[kChunk];
    // Where the pairs of two chunks come from, if each lane has 8 of either.
    alignas(64) std::uint8_t pairs[kChunk];

    // The first lane's, and how much is to be added for each lane after it.
    constexpr Pairs(const int (&first)[8], int lane) : values(), pairs() {
        for (int i = 0; i < kChunk; ++i) {
            const int pair = first[i % 8] + i / 16 * lane;
            const int half = i % 16 / 8;
            values[2 * pair + half] = static_cast<std::uint8_t>(i);
            pairs[pair + kChunk / 2 * half] = static_cast<std::uint8_t>(i);
        }
    }
};

// Even and odd values of a chunk as fp32, 16 at a time.
struct Halves {
    __m512 even[2];
    __m512 odd[2];
};

struct Float32 {
    static constexpr std::int64_t kBytes = 4;
    static constexpr Pairs kPairs = Pairs({0, 1, 8, 9, 16, 17, 24, 25}, 2);

    static Halves load(const char* x) {
        Halves halves;
        for (int i = 0; i < 2; ++i) {
            const __m512 first = _mm512_loadu_ps(x + 128 * i);
            const __m512 second = _mm512_loadu_ps(x + 128 * i + 64);
            halves.even[i] = _mm512_shuffle_ps(first, second, 0x88);
            halves.odd[i] = _mm512_shuffle_ps(first, second, 0xdd);
        }
        return halves;
    }

    // Per 32-bit lane, the largest magnitude and the largest of the bits as integers.
    static void largest(const char* x, std::int64_t numel, __m512i& magnitude, __m512i& most) {
        const __m512i unsigned_bits = _mm512_set1_epi32(INT32_MAX);
        magnitude = _mm512_setzero_si512();
        most = _mm512_set1_epi32(INT32_MIN);
        for (std::int64_t i = 0; i < numel; i += 16) {
            const __m512i bits = _mm512_loadu_si512(x + 4 * i);
            magnitude = _mm512_max_epi32(magnitude, _mm512_and_si512(bits, unsigned_bits));
            most = _mm512_max_epi32(most, bits);
        }
    }
};

struct BFloat16 {
    static constexpr std::int64_t kBytes = 2;
    static constexpr Pairs kPairs = Pairs({0, 1, 2, 3, 16, 17, 18, 19}, 4);

    static Halves load(const char* x) {
        Halves halves;
        for (int i = 0; i < 2; ++i) {
            const __m512i bits = _mm512_loadu_si512(x + 64 * i);
            halves.even[i] = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
            halves.odd[i] = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x10000)));
        }
        return halves;
    }

    static void largest(const char* x, std::int64_t numel, __m512i& magnitude, __m512i& most) {
        const __m512i unsigned_bits = _mm512_set1_epi16(INT16_MAX);
        magnitude = _mm512_setzero_si512();
        most = _mm512_set1_epi16(INT16_MIN);
        for (std::int64_t i = 0; i < numel; i += 32) {
            const __m512i bits = _mm512_loadu_si512(x + 2 * i);
            magnitude = _mm512_max_epi16(magnitude, _mm512_and_si512(bits, unsigned_bits));
            most = _mm512_max_epi16(most, bits);
        }
        magnitude = widened(magnitude);
        most = widened(most);
    }

private:
    static __m512i widened(__m512i halves) {
        return _mm512_max_epi32(_mm512_slli_epi32(halves, 16), _mm512_and_si512(halves, _mm512_set1_epi32(-0x10000)));
    }
};

__m512i sum(__m512i a, __m512i b) {
    return _mm512_add_epi32(a, b);
}

__m512i larger(__m512i a, __m512i b) {
    return _mm512_max_epi32(a, b);
}

// One number from the 32-bit lanes of each of four registers.
template <__m512i (*kJoin)(__m512i, __m512i)>
__m128i reduced(const __m512i (&lanes)[4]) {
    const __m512i first = kJoin(_mm512_unpacklo_epi32(lanes[0], lanes[1]), _mm512_unpackhi_epi32(lanes[0], lanes[1]));
    const __m512i second = kJoin(_mm512_unpacklo_epi32(lanes[2], lanes[3]), _mm512_unpackhi_epi32(lanes[2], lanes[3]));
    const __m512i quarters = kJoin(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m512i halves = kJoin(quarters, _mm512_shuffle_i64x2(quarters, quarters, 0x4e));
    return _mm512_castsi512_si128(kJoin(halves, _mm512_shuffle_i64x2(halves, halves, 0xb1)));
}

// The largest values of four blocks with their signs (rule 2 of docs/wire-format.md), and as masks, which of the blocks
// have a value that is not finite and which have none but zeros.
struct Maxima {
    alignas(16) float max[4];
    int poisoned;
    int zero;
};

template <class Source>
Maxima maxima_of(const char* values, std::int64_t block) {
    __m512i magnitude[4];
    __m512i most[4];
    for_rows([&](int row) __attribute__((always_inline)) {
        Source::largest(values + row * block * Source::kBytes, block, magnitude[row], most[row]);
    });
    const __m128i magnitudes = reduced<larger>(magnitude);
    const __m128i is_positive = _mm_cmpeq_epi32(magnitudes, reduced<larger>(most));
    const __m128i sign = _mm_andnot_si128(is_positive, _mm_set1_epi32(INT32_MIN));
    const __m128 bounded = _mm_max_ps(_mm_castsi128_ps(magnitudes), _mm_set1_ps(kSmallestMax));
    Maxima maxima;
    _mm_store_ps(maxima.max, _mm_or_ps(bounded, _mm_castsi128_ps(sign)));
    maxima.poisoned = _mm_cmpgt_epi32_mask(magnitudes, _mm_set1_epi32(0x7f7fffff));
    maxima.zero = _mm_cmpeq_epi32_mask(magnitudes, _mm_setzero_si128());
    return maxima;
}

// x * factor, rounded to nearest even and bounded by saturation.
struct Words {
    __m512i even;
    __m512i odd;
};

Words rounded(const Halves& x, __m512 factor) {
    __m512i even[2];
    __m512i odd[2];
    for (int i = 0; i < 2; ++i) {
        even[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x.even[i], factor));
        odd[i] = _mm512_cvtps_epi32(_mm512_mul_ps(x.odd[i], factor));
    }
    return {_mm512_packs_epi32(even[0], even[1]), _mm512_packs_epi32(odd[0], odd[1])};
}

// Four blocks of int8 without search (rule 3), of a multiple of 64 values.
template <class Source>
void encode_four_int8(const char* values, std::int64_t block, std::uint8_t* out, float* scales) {
    const Maxima maxima = maxima_of<Source>(values, block);
    const __m512i order = _mm512_load_si512(Source::kPairs.values);
    for (int row = 0; row < 4; ++row) {
        const __m512 factor = _mm512_set1_ps(-128.0F / maxima.max[row]);
        const std::int64_t end = (row + 1) * block;
        for (std::int64_t at = row * block; at < end; at += kChunk) {
            const Words words = rounded(Source::load(values + at * Source::kBytes), factor);
            const __m512i bytes = _mm512_packs_epi16(words.even, words.odd);
            _mm512_storeu_si512(out + at, _mm512_permutexvar_epi8(order, bytes));
        }
        const bool is_zero = (maxima.zero >> row & 1) != 0;
        scales[row] = is_zero ? 0.0F : maxima.max[row] * (-1.0F / 128);
        if ((maxima.poisoned >> row & 1) != 0) {
            zero(out + row * block, block);
            scales[row] = value_of(kPoisonedScale);
        }
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
