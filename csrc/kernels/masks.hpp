// Sets of 64 places as bits of a word. Included by kernels only: everything has internal linkage, see kernels.hpp.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(THINWIRE_NEON)
#include <arm_neon.h>
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

[[maybe_unused]] int popcount(std::uint64_t word) {
#if defined(__POPCNT__)
    return __builtin_popcountll(word);
#else
    word -= word >> 1 & 0x5555555555555555;
    word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
    return static_cast<int>(((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f) * 0x0101010101010101 >> 56);
#endif
}

// Which of 64 bytes are `value`.
[[maybe_unused]] std::uint64_t places_of(const std::uint8_t* bytes, std::uint8_t value) {
#if defined(__AVX512BW__)
    return _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(static_cast<char>(value)));
#elif defined(__AVX2__)
    const __m256i wanted = _mm256_set1_epi8(static_cast<char>(value));
    const auto half = [&](int i) {
        const __m256i there = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 32 * i));
        return static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(there, wanted)));
    };
    return half(0) | std::uint64_t{half(1)} << 32;
#elif defined(__SSE2__)
    const __m128i wanted = _mm_set1_epi8(static_cast<char>(value));
    std::uint64_t mask = 0;
    for (int i = 0; i < 4; ++i) {
        const __m128i there = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i));
        const int part = _mm_movemask_epi8(_mm_cmpeq_epi8(there, wanted));
        mask |= std::uint64_t{static_cast<std::uint32_t>(part)} << 16 * i;
    }
    return mask;
#elif defined(THINWIRE_NEON)
    const uint8x16_t wanted = vdupq_n_u8(value);
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
    const auto part = [&](int i) { return vandq_u8(vceqq_u8(vld1q_u8(bytes + 16 * i), wanted), bit); };
    const uint8x16_t sums = vpaddq_u8(vpaddq_u8(part(0), part(1)), vpaddq_u8(part(2), part(3)));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
#else
    constexpr std::uint64_t kOnes = 0x0101010101010101;
    constexpr std::uint64_t kLow = 0x7f * kOnes;
    std::uint64_t mask = 0;
    for (int i = 0; i < 8; ++i) {
        std::uint64_t word;
        __builtin_memcpy(&word, bytes + 8 * i, sizeof word);
        word ^= value * kOnes;
        const std::uint64_t zeros = ~(((word & kLow) + kLow) | word | kLow);  // the top bit of each byte that is zero
        mask |= (zeros >> 7) * 0x0102040810204080 >> 56 << 8 * i;
    }
    return mask;
#endif
}

// Writes `at` and the place of each bit, and may write `always` numbers where there are fewer. Returns the end.
// How many bits there are is as good as random, and a branch on that takes long.
template <int always>
std::uint32_t* list_places(std::uint64_t bits, std::int64_t at, std::uint32_t* to) {
    std::uint32_t* const end = to + popcount(bits);
    for (int i = 0; i < always; ++i, bits &= bits - 1) {
        *to++ = static_cast<std::uint32_t>(at + __builtin_ctzll(bits | std::uint64_t{1} << 63));
    }
    for (; bits != 0; bits &= bits - 1) {
        *to++ = static_cast<std::uint32_t>(at + __builtin_ctzll(bits));
    }
    return end;
}

// The low bits, each at the place of a bit of the mask, in their order.
[[maybe_unused]] std::uint64_t deposit(std::uint64_t bits, std::uint64_t mask) {
#if defined(__BMI2__)
    return _pdep_u64(bits, mask);
#else
    std::uint64_t placed = 0;
    for (; bits != 0 && mask != 0; bits >>= 1, mask &= mask - 1) {
        placed |= (bits & 1) != 0 ? mask & (0 - mask) : 0;
    }
    return placed;
#endif
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
