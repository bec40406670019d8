// The operations of lanes.hpp with AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/lanes.hpp"

#define MM(name) _mm256_##name

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kWidth = 32;

using Lanes = __m256i;
using Floats = __m256;

Lanes load_lanes(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

void store_lanes(void* to, Lanes lanes) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), lanes);
}

// The parts of 128 bits, joined.
template <Lanes (*kJoin)(Lanes, Lanes)>
Ints4 joined(Lanes halves) {
    const Lanes whole = kJoin(halves, _mm256_permute2x128_si256(halves, halves, 1));
    return __builtin_bit_cast(Ints4, _mm256_castsi256_si128(whole));
}

// kWidth / 4 of fp16.
Floats widened_halves(const char* x) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// The orders of Float32 and BFloat16.
struct OrderOfFloats {
    static Lanes in_order(Lanes bytes) {
        return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    }

    static Lanes pairs_in_order(Lanes bytes) {
        const __m128i words = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(bytes, 0xd8), _mm256_broadcastsi128_si256(words));
    }
};

struct OrderOfHalves {
    static Lanes in_order(Lanes bytes) {
        return _mm256_permute4x64_epi64(bytes, 0xd8);
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return OrderOfFloats::in_order(bytes);
    }
};

// A table of sixteen bytes for looked_up.
Lanes table_of(const void* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}

// The first 128 bits of every part, then the second ones.
template <int kParts>
void store_in_turn(void* to, const Lanes (&parts)[kParts]) {
    auto* at = static_cast<__m128i*>(to);
    for (int i = 0; i < kParts; ++i) {
        _mm_storeu_si128(at + i, _mm256_castsi256_si128(parts[i]));
        _mm_storeu_si128(at + kParts + i, _mm256_extracti128_si256(parts[i], 1));
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET

#include "kernels/lanes_x86.hpp"
