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

// Of values given by the upper bits of each number.
template <class Source>
Ints4 bits_of(Ints4 values) {
    return __builtin_bit_cast(Ints4, Source::widened(values));
}

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
    const Ints4 none = Ints4{} - 1;
    const Ints4 positive = select(most < Ints4{}, none, bits_of<Source>(most));
    const Ints4 negative = select(most_unsigned < Ints4{}, bits_of<Source>(most_unsigned & INT32_MAX), none);
    const Ints4 magnitude = select(positive < negative, negative, positive);
    const Floats4 value = __builtin_bit_cast(Floats4, magnitude);
    const Floats4 bounded = select(value < all_four(kSmallestMax), all_four(kSmallestMax), value);
    Maxima maxima;
    maxima.max = select(positive < negative, -bounded, bounded);
    maxima.poisoned = magnitude >= (Ints4{} + 0x7f800000);
    maxima.zero = magnitude == Ints4{};
    return maxima;
}

void store_four(float* to, Floats4 numbers) {
    copy(to, &numbers, sizeof numbers);
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
    alignas(16) float factors[4];
    store_four(factors, all_four(-128.0F) / maxima.max);
    for (int row = 0; row < 4; ++row) {
        const Floats factor = all_floats(factors[row]);
        const std::int64_t end = (row + 1) * block;
        for (std::int64_t at = row * block; at < end; at += kWidth) {
            prefetch<Source>(values + (at + 8 * block) * Source::kBytes);
            const Parts x = Source::load(values + at * Source::kBytes);
            const Lanes first = rounded_words(x.part[0], x.part[1], factor);
            const Lanes second = rounded_words(x.part[2], x.part[3], factor);
            store_lanes(out + at, Source::in_order(bytes_of(first, second)));
        }
    }
    const Floats4 scale = select(maxima.zero, all_four(0.0F), maxima.max * all_four(-1.0F / 128));
    store_four(scales, scale);
    poison(maxima, block, out, scales);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
