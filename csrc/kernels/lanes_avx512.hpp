// The operations of lanes.hpp with AVX-512 (F and BW).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/lanes.hpp"

#define MM(name) _mm512_##name

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kWidth = 64;

using Lanes = __m512i;
using Floats = __m512;

Lanes load_lanes(const void* from) {
    return _mm512_loadu_si512(from);
}

void store_lanes(void* to, Lanes lanes) {
    _mm512_storeu_si512(to, lanes);
}

// The parts of 128 bits, joined.
template <Lanes (*kJoin)(Lanes, Lanes)>
Ints4 joined(Lanes quarters) {
    const Lanes halves = kJoin(quarters, _mm512_shuffle_i64x2(quarters, quarters, 0x4e));
    const Lanes whole = kJoin(halves, _mm512_shuffle_i64x2(halves, halves, 0xb1));
    return __builtin_bit_cast(Ints4, _mm512_castsi512_si128(whole));
}

// kWidth / 4 of fp16.
Floats widened_halves(const char* x) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// Where words come from if word i of lane j is the (4i + j)th.
struct WordOrder {
    alignas(64) std::uint16_t from[32];

    constexpr WordOrder() : from() {
        for (int i = 0; i < 32; ++i) {
            from[i] = static_cast<std::uint16_t>(8 * (i % 4) + i / 4);
        }
    }
};

constexpr WordOrder kWords;

// The orders of Float32 and BFloat16.
struct OrderOfFloats {
    // Number i of lane j is the (4i + j)th.
    static Lanes in_order(Lanes bytes) {
        const Lanes from = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        return _mm512_permutexvar_epi32(from, bytes);
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return _mm512_permutexvar_epi16(_mm512_load_si512(kWords.from), bytes);
    }
};

struct OrderOfHalves {
    static Lanes in_order(Lanes bytes) {
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), bytes);
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return OrderOfFloats::in_order(bytes);
    }
};

// A table of sixteen bytes for looked_up.
Lanes table_of(const void* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}

// The lower or the upper half of both, 128 bits in turn.
Lanes lower_quarters(Lanes a, Lanes b) {
    return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
}

Lanes upper_quarters(Lanes a, Lanes b) {
    return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
}

// The first 128 bits of every part, then the second ones, and so on. Whole vectors are stored: CPUs write whole lines
// faster.
void store_in_turn(void* to, const Lanes (&parts)[2]) {
    auto* at = static_cast<Lanes*>(to);
    store_lanes(at, lower_quarters(parts[0], parts[1]));
    store_lanes(at + 1, upper_quarters(parts[0], parts[1]));
}

void store_in_turn(void* to, const Lanes (&parts)[4]) {
    auto* at = static_cast<Lanes*>(to);
    const Lanes first = lower_quarters(parts[0], parts[1]);
    const Lanes second = lower_quarters(parts[2], parts[3]);
    const Lanes third = upper_quarters(parts[0], parts[1]);
    const Lanes fourth = upper_quarters(parts[2], parts[3]);
    store_lanes(at, _mm512_shuffle_i64x2(first, second, 0x44));
    store_lanes(at + 1, _mm512_shuffle_i64x2(first, second, 0xee));
    store_lanes(at + 2, _mm512_shuffle_i64x2(third, fourth, 0x44));
    store_lanes(at + 3, _mm512_shuffle_i64x2(third, fourth, 0xee));
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET

#include "kernels/lanes_x86.hpp"
