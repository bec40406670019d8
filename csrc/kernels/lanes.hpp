// Vectors as wide as the instruction set has them: operations with the same names and meaning on each, of which
// blocks_lanes.hpp and search_lanes.hpp are made. THINWIRE_LANES is defined where there are any.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"
#include "kernels/values.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

using Ints4 = std::int32_t __attribute__((vector_size(16)));
using Floats4 = float __attribute__((vector_size(16)));

[[maybe_unused]] Floats4 floats_of(Ints4 numbers) {
    return __builtin_convertvector(numbers, Floats4);
}

[[maybe_unused]] Floats4 all_four(float value) {
    return Floats4{value, value, value, value};
}

// `a` where the bits of a mask are set, else `b`.
[[maybe_unused]] Floats4 select(Ints4 mask, Floats4 a, Floats4 b) {
    const Ints4 bits = (__builtin_bit_cast(Ints4, a) & mask) | (__builtin_bit_cast(Ints4, b) & ~mask);
    return __builtin_bit_cast(Floats4, bits);
}

[[maybe_unused]] Ints4 select(Ints4 mask, Ints4 a, Ints4 b) {
    return (a & mask) | (b & ~mask);
}

// The nearest integers, halves to even, of numbers between 0 and 2^22.
[[maybe_unused]] Ints4 nearest_integers(Floats4 numbers) {
    const Floats4 shift = all_four(0x1.8p23F);
    return __builtin_bit_cast(Ints4, numbers + shift) - __builtin_bit_cast(Ints4, shift);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET

#if defined(THINWIRE_NEON)
#include "kernels/lanes_neon.hpp"
#define THINWIRE_LANES 1
#elif defined(__AVX512BW__)
#include "kernels/lanes_avx512.hpp"
#define THINWIRE_LANES 1
#elif defined(__AVX2__)
#include "kernels/lanes_avx2.hpp"
#define THINWIRE_LANES 1
#elif defined(__SSE4_1__)
#include "kernels/lanes_sse4.hpp"
#define THINWIRE_LANES 1
#endif
