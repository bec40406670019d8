// Four blocks of int8 side by side (docs/wire-format.md, rule 3), and what these have in common with blocks of a
// search. Included by block.cpp only.
#pragma once

#include <cstdint>

#include "kernels/block_rules.hpp"
#include "kernels/kernels.hpp"
#include "kernels/lanes.hpp"
#include "kernels/values.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

// The largest values of four blocks with their signs (rule 2), and as masks, which of the blocks have a value that is
// not finite and which have none but zeros.
struct Maxima {
    Floats4 max;
    Ints4 poisoned;
    Ints4 zero;
};

template <class Source>
Maxima maxima_of(const char* values, std::int64_t block) {
    Lanes most_of[4];
    Lanes most_unsigned_of[4];
    for_rows([&](int row) __attribute__((always_inline)) {
        Source::largest(values + row * block * Source::kBytes, block, most_of[row], most_unsigned_of[row]);
    });
    // The bits of the largest value without minus sign, if it is not negative itself; and the bits of the largest
    // magnitude that has one, if there is any.
    const Ints4 most = reduced<larger>(most_of);
    const Ints4 most_unsigned = reduced<larger_unsigned>(most_unsigned_of);
    alignas(16) float max[4];
    Maxima maxima;
    for (int row = 0; row < 4; ++row) {
        const std::int32_t positive =
            most[row] < 0 ? -1 : bits_of(Source::widened(static_cast<std::uint32_t>(most[row])));
        const std::int32_t negative =
            most_unsigned[row] < 0 ? bits_of(Source::widened(most_unsigned[row] & INT32_MAX)) : -1;
        const std::int32_t magnitude = positive < negative ? negative : positive;
        const float bounded = value_of(magnitude) < kSmallestMax ? kSmallestMax : value_of(magnitude);
        max[row] = positive < negative ? -bounded : bounded;
        maxima.poisoned[row] = magnitude >= 0x7f800000 ? -1 : 0;
        maxima.zero[row] = magnitude == 0 ? -1 : 0;
    }
    __builtin_memcpy(&maxima.max, max, sizeof max);
    return maxima;
}

// Asks for values that will be read later; they may lie beyond the end. The processor itself looks ahead to the end of
// a page only, which eight blocks of bf16 fill.
template <class Source>
void prefetch(const char* values) {
    for (std::int64_t at = 0; at < kWidth * Source::kBytes; at += 64) {
        __builtin_prefetch(values + at);
    }
}

// Rule 1, for those of four blocks that have a value that is not finite.
[[maybe_unused]] void poison(const Maxima& maxima, std::int64_t code_bytes, std::uint8_t* out, float* scales) {
    for (int row = 0; row < 4; ++row) {
        if (maxima.poisoned[row] != 0) {
            zero(out + row * code_bytes, code_bytes);
            scales[row] = value_of(kPoisonedScale);
        }
    }
}

// Four blocks of a multiple of kWidth values.
template <class Source>
void encode_four_int8(const char* values, std::int64_t block, std::uint8_t* out, float* scales) {
    const Maxima maxima = maxima_of<Source>(values, block);
    const Floats4 factors = all_four(-128.0F) / maxima.max;
    for (int row = 0; row < 4; ++row) {
        const Floats factor = all_floats(factors[row]);
        const std::int64_t end = (row + 1) * block;
        for (std::int64_t at = row * block; at < end; at += kWidth) {
            const Halves x = Source::load(values + at * Source::kBytes);
            const Lanes even = rounded_words(x.even[0], x.even[1], factor);
            const Lanes odd = rounded_words(x.odd[0], x.odd[1], factor);
            store_lanes(out + at, Source::in_order(bytes_of(even, odd)));
        }
    }
    const Floats4 scale = select(maxima.zero, all_four(0.0F), maxima.max * all_four(-1.0F / 128));
    copy(scales, &scale, sizeof scale);
    poison(maxima, block, out, scales);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
