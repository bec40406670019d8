// The operations of lanes.hpp with SSE4 (and SSSE3).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/lanes.hpp"

#define MM(name) _mm_##name

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

// The parts of 128 bits, joined.
template <Lanes (*kJoin)(Lanes, Lanes)>
Ints4 joined(Lanes lanes) {
    return __builtin_bit_cast(Ints4, lanes);
}

// kWidth / 4 of fp16, widened without F16C: what is finite exactly, and what is not as numbers, which rule 1 does not
// look at.
Floats widened_halves(const char* x) {
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

// The orders of Float32 and BFloat16.
struct OrderOfFloats {
    static Lanes in_order(Lanes bytes) {
        return bytes;
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return bytes;
    }
};

using OrderOfHalves = OrderOfFloats;

// A table of sixteen bytes for looked_up.
Lanes table_of(const void* bytes) {
    return load_lanes(bytes);
}

template <int kParts>
void store_in_turn(void* to, const Lanes (&parts)[kParts]) {
    auto* at = static_cast<Lanes*>(to);
    for (int i = 0; i < kParts; ++i) {
        store_lanes(at + i, parts[i]);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET

#include "kernels/lanes_x86.hpp"
