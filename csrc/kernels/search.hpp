// Rule 4 of docs/wire-format.md: codes and scale of a block of N-bit codes, N of 2 to 5, by the step of least error.
// Included by block.cpp only.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"
#include "kernels/values.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kBins = 128;  // a block's 8-bit codes, two by two

// A step that the search may try.
struct Step {
    // Of the middle of a bin, which is indexed by the low seven bits of a >> 1. At most 127.
    alignas(64) std::uint8_t error[kBins];
    std::int32_t reciprocal;  // a value in 1/32768 of the largest, times this / 65536: its code at the top of 8 bits
};

struct Search {
    int bits;
    int num_distances;
    int distance[3];  // in entries of `step`
    int start;
    Step step[15];
};

constexpr int floor_div(int numerator, int denominator) {
    return numerator / denominator - (numerator % denominator < 0 ? 1 : 0);
}

void fill(Step& step, int bits, int size) {
    const int levels = 1 << (bits - 1);
    for (int bin = 0; bin < kBins; ++bin) {
        const int middle = 4 * (bin < kBins / 2 ? bin : bin - kBins) + 1;
        int code = floor_div(2 * middle + size, 2 * size);
        code = code < -levels ? -levels : (code > levels - 1 ? levels - 1 : code);
        int error = middle - code * size;
        error = error < 0 ? -error : error;
        step.error[bin] = static_cast<std::uint8_t>(error > 127 ? 127 : error);
    }
    step.reciprocal = ((1 << (18 - bits)) + size) / (2 * size);
}

void fill(Search& search, int bits, int start) {
    const int unit = 256 >> (bits - 1);
    const int finest = unit < 32 ? 1 : unit / 32;
    search.bits = bits;
    search.num_distances = 0;
    search.start = 0;
    for (int part = 8; part <= 32 && unit >= part; part *= 2) {
        const int distance = unit / part / finest;
        search.distance[search.num_distances++] = distance;
        search.start += distance;
    }
    for (int i = 0; i <= 2 * search.start; ++i) {
        fill(search.step[i], bits, start + (i - search.start) * finest);
    }
}

struct Searches {
    Search of_bits[4];
    Searches() {
        constexpr int kStart[4] = {84, 46, 27, 15};
        for (int i = 0; i < 4; ++i) {
            fill(of_bits[i], i + 2, kStart[i]);
        }
    }
};

const Search& search_of(int bits) {
    static const Searches searches;
    return searches.of_bits[bits - 2];
}

// Errors are summed over the bins, not the values: plain loops that every compiler vectorises.
std::int32_t error_of(const std::int16_t* count, const Step& step) {
    std::int32_t sum = 0;
    for (int bin = 0; bin < kBins; ++bin) {
        const auto error = static_cast<std::int16_t>(step.error[bin]);
        sum += static_cast<std::int32_t>(static_cast<std::int16_t>(error * error)) * count[bin];
    }
    return sum;
}

const Step& best_step(const Search& search, const std::int16_t* count) {
    int best = search.start;
    std::int32_t least = error_of(count, search.step[best]);
    for (int i = 0; i < search.num_distances; ++i) {
        const int below = best - search.distance[i];
        const int above = best + search.distance[i];
        const std::int32_t error_below = error_of(count, search.step[below]);
        const std::int32_t error_above = error_of(count, search.step[above]);
        if (error_below < least) {
            least = error_below;
            best = below;
        }
        if (error_above < least) {
            least = error_above;
            best = above;
        }
    }
    return search.step[best];
}

// x * factor rounded to nearest even and bounded. |x * factor| is at most 32768, so adding 1.5 * 2^23 leaves the
// integer in the low bits.
void round_finely(const float* x, std::int64_t numel, float factor, std::int16_t* w) {
    constexpr float kShift = 12582912.0F;
    for (std::int64_t i = 0; i < numel; ++i) {
        const float scaled = x[i] * factor;
        const float bounded = scaled > 32767.0F ? 32767.0F : scaled;
        w[i] = static_cast<std::int16_t>(bits_of(bounded + kShift));
    }
}

// The codes of values (up to kMostBlock of them) whose signed largest is `max`. Returns the scale. Loops over 16-bit
// numbers throughout: twice as many fit in a vector, and the upper half of their products is one instruction.
float search_codes(const Search& search, const float* x, std::int64_t numel, float max, std::int8_t* codes) {
    alignas(64) std::int16_t w[kMostBlock];
    alignas(64) std::int16_t a[kMostBlock];
    alignas(64) std::int16_t code[kMostBlock];
    std::int16_t count[2][kBins] = {};
    round_finely(x, numel, -32768.0F / max, w);
    for (std::int64_t i = 0; i < numel; ++i) {
        const auto rounded = static_cast<std::int16_t>(((w[i] >> 7) + 1) >> 1);  // (w + 128) / 256, without overflow
        a[i] = static_cast<std::int16_t>(rounded > 127 ? 127 : rounded);
    }
    for (std::int64_t i = 0; i < numel; ++i) {
        ++count[i & 1][(a[i] >> 1) & (kBins - 1)];  // in turn, for equal bins in a row would wait for one another
    }
    for (int bin = 0; bin < kBins; ++bin) {
        count[0][bin] = static_cast<std::int16_t>(count[0][bin] + count[1][bin]);
    }
    const Step& step = best_step(search, count[0]);
    const auto reciprocal = static_cast<std::int16_t>(step.reciprocal);
    const auto levels = static_cast<std::int16_t>(1 << (search.bits - 1));
    const auto half = static_cast<std::int16_t>(1 << (7 - search.bits));
    const int shift = 8 - search.bits;
    for (std::int64_t i = 0; i < numel; ++i) {
        const auto finer = static_cast<std::int16_t>((w[i] * reciprocal) >> 16);
        const auto nearest = static_cast<std::int16_t>(static_cast<std::int16_t>(finer + half) >> shift);
        const auto bounded = nearest < levels ? nearest : static_cast<std::int16_t>(levels - 1);
        code[i] = bounded < -levels ? static_cast<std::int16_t>(-levels) : bounded;
    }
    std::int32_t num = 0;
    std::int32_t den = 0;
    for (std::int64_t i = 0; i < numel; ++i) {
        num += a[i] * code[i];
        den += code[i] * code[i];
        codes[i] = static_cast<std::int8_t>(code[i]);
    }
    return den == 0 ? 0.0F : (max * (-1.0F / 128)) * (static_cast<float>(num) / static_cast<float>(den));
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
