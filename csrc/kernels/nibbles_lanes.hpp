// Codes of four bits, read from the wire. Included by block.cpp only.
#pragma once

#include <cstdint>

#include "kernels/lanes.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

// So many values are read at a time.
constexpr std::int64_t kNibbles = 2 * kWidth;

// Codes of a multiple of kNibbles values.
void unpack_nibbles(const std::uint8_t* in, std::int64_t numel, std::int8_t* codes) {
    constexpr std::int8_t kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    const Lanes table = table_of(kCodes);
    for (std::int64_t done = 0; done < numel; done += kNibbles) {
        const Lanes pairs = load_lanes(in + done / 2);
        const Lanes even = looked_up(table, low_nibbles(pairs));
        const Lanes odd = looked_up(table, high_nibbles(pairs));
        const Lanes parts[2] = {lower_bytes(even, odd), upper_bytes(even, odd)};
        store_in_turn(codes + done, parts);
    }
}

// The 16-bit values that the sixteen codes have, of a multiple of kNibbles values.
void look_up_nibbles(const std::uint8_t* in, std::int64_t numel, const std::uint16_t (&values)[16], void* out) {
    std::uint8_t low[16];
    std::uint8_t high[16];
    for (int i = 0; i < 16; ++i) {
        low[i] = static_cast<std::uint8_t>(values[i]);
        high[i] = static_cast<std::uint8_t>(values[i] >> 8);
    }
    const Lanes low_table = table_of(low);
    const Lanes high_table = table_of(high);
    for (std::int64_t done = 0; done < numel; done += kNibbles) {
        const Lanes pairs = load_lanes(in + done / 2);
        const Lanes even = low_nibbles(pairs);
        const Lanes odd = high_nibbles(pairs);
        const Lanes even_low = looked_up(low_table, even);
        const Lanes even_high = looked_up(high_table, even);
        const Lanes odd_low = looked_up(low_table, odd);
        const Lanes odd_high = looked_up(high_table, odd);
        const Lanes first_even = lower_bytes(even_low, even_high);
        const Lanes first_odd = lower_bytes(odd_low, odd_high);
        const Lanes last_even = upper_bytes(even_low, even_high);
        const Lanes last_odd = upper_bytes(odd_low, odd_high);
        const Lanes parts[4] = {lower_words(first_even, first_odd), upper_words(first_even, first_odd),
                                lower_words(last_even, last_odd), upper_words(last_even, last_odd)};
        store_in_turn(static_cast<char*>(out) + 2 * done, parts);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
