// Rule 4 of docs/wire-format.md: codes and scale of a block of N-bit codes, N of 2 to 5, by the best of three gains.
// Included by block.cpp only.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"
#include "kernels/values.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

// The constants of rule 4 for N bits.
struct Search {
    int coarse;    // the largest of the coarse values
    int finer;     // fine values of a coarse one
    int outlier;   // added to the sum of squares
    float base;    // of the gain in the middle
    float slope;   // of the gain in the middle
    float spread;  // distance of the two other gains
};

constexpr Search kSearches[] = {
    {63, 2, 8192, 34.0F, 1575.0F, 12.0F},
    {63, 4, 8192, 38.0F, 1282.0F, 8.0F},
    {63, 8, 8192, 47.25F, 783.0F, 5.0F},
    {127, 8, 49152, 56.5F, 764.0F, 4.0F},
};

constexpr float kMostGain = 255.0F;

// A float that this is added to, and that is below 2^22, has its nearest integer in the low bits.
constexpr float kShift = 12582912.0F;

constexpr std::int16_t magnitude(std::int16_t value) {
    return static_cast<std::int16_t>(value < 0 ? -value : value);
}

// a * b / 2^15 rounded, halves upwards: one instruction of SSSE3 and later, which compilers recognise.
constexpr std::int16_t rounded_product(std::int16_t a, std::int16_t b) {
    return static_cast<std::int16_t>(((a * b >> 14) + 1) >> 1);
}

template <int kBits>
constexpr std::int16_t limited(std::int16_t code) {
    constexpr std::int16_t kMost = (1 << (kBits - 1)) - 1;
    const std::int16_t below = code < kMost ? code : kMost;
    return below > -kMost - 1 ? below : static_cast<std::int16_t>(-kMost - 1);
}

// What decides between gains: the least-squares scale of a gain's codes is num / den, and num^2 / den the part of the
// squares that they explain.
struct Products {
    float num;
    float den;

    bool is_better_than(const Products& other) const {
        return (num * num) * other.den > (other.num * other.num) * den;
    }
};

// Codes and scale of up to kMostBlock values whose signed largest is `max`. All loops are over 16-bit numbers: twice as
// many fit in a vector, and products are added in pairs.
template <int kBits>
class Searched {
public:
    float encode(const float* x, std::int64_t numel, float max, std::int8_t* codes) {
        numel_ = numel;
        round_values(x, static_cast<float>(-kSearch.coarse * kSearch.finer) / max);
        const Products best = best_of_three();
        const Products last = write_codes(to_fine_gain(best), codes);
        return last.den == 0 ? 0.0F : (max * (-1.0F / static_cast<float>(kSearch.coarse))) * (last.num / last.den);
    }

private:
    static constexpr Search kSearch = kSearches[kBits - 2];
    // Gains have a unit of 64 (coarse + 1) / 2^(N-1), which a product is divided by. As factors of rounded_product,
    // they have one of 2^15.
    static constexpr int kGainShift = 15 - 6 - (kSearch.coarse == 127 ? 7 : 6) + kBits - 1;

    std::int64_t numel_;
    alignas(64) std::int16_t fine_[kMostBlock];
    alignas(64) std::int16_t coarse_[kMostBlock];

    // Rounds to nearest even: |x * factor| is at most 1016.
    void round_values(const float* x, float factor) {
        for (std::int64_t i = 0; i < numel_; ++i) {
            fine_[i] = static_cast<std::int16_t>(bits_of(x[i] * factor + kShift));
        }
        // Halves are rounded away from zero, because the factor is a little larger than a whole fraction.
        constexpr auto kFraction = static_cast<std::int16_t>((1 << 15) / kSearch.finer + 1);
        for (std::int64_t i = 0; i < numel_; ++i) {
            coarse_[i] = rounded_product(fine_[i], kFraction);
        }
    }

    Products best_of_three() const {
        const float centre = middle_gain();
        std::int16_t gains[3];
        for (int i = 0; i < 3; ++i) {
            const float offset = i == 0 ? 0.0F : (i == 1 ? -kSearch.spread : kSearch.spread);
            gains[i] = static_cast<std::int16_t>(static_cast<int>(centre + offset) << kGainShift);
        }
        std::int32_t num[3] = {};
        std::int32_t den[3] = {};
        for (std::int64_t i = 0; i < numel_; ++i) {
            for (int gain = 0; gain < 3; ++gain) {
                const std::int16_t code = limited<kBits>(rounded_product(coarse_[i], gains[gain]));
                num[gain] += coarse_[i] * code;
                den[gain] += code * code;
            }
        }
        Products best = {static_cast<float>(num[0]), static_cast<float>(den[0])};
        for (int gain = 1; gain < 3; ++gain) {
            const Products tried = {static_cast<float>(num[gain]), static_cast<float>(den[gain])};
            best = tried.is_better_than(best) ? tried : best;
        }
        return best;
    }

    float middle_gain() const {
        std::int32_t sum = 0;
        std::int32_t squares = 0;
        for (std::int64_t i = 0; i < numel_; ++i) {
            sum += magnitude(coarse_[i]);
            squares += coarse_[i] * coarse_[i];
        }
        const float ratio = static_cast<float>(sum) / static_cast<float>(squares + kSearch.outlier);
        const float centre = (ratio * kSearch.slope + kSearch.base + kShift) - kShift;
        return centre < kMostGain - kSearch.spread ? centre : kMostGain - kSearch.spread;
    }

    // The gain of fine values, in 1/2^15, whose step is the scale.
    static std::int16_t to_fine_gain(const Products& best) {
        const float scaled = best.den * static_cast<float>((1 << 15) / kSearch.finer);
        const float gain = scaled / (best.num > 1.0F ? best.num : 1.0F);
        return static_cast<std::int16_t>(bits_of(gain + kShift));
    }

    Products write_codes(std::int16_t gain, std::int8_t* codes) const {
        std::int32_t num = 0;
        std::int32_t den = 0;
        for (std::int64_t i = 0; i < numel_; ++i) {
            const std::int16_t code = limited<kBits>(rounded_product(fine_[i], gain));
            num += coarse_[i] * code;
            den += code * code;
            codes[i] = static_cast<std::int8_t>(code);
        }
        return {static_cast<float>(num), static_cast<float>(den)};
    }
};

template <int kBits>
float search_codes(const float* x, std::int64_t numel, float max, std::int8_t* codes) {
    Searched<kBits> searched;  // without initial values
    return searched.encode(x, numel, max, codes);
}

float search_codes(int bits, const float* x, std::int64_t numel, float max, std::int8_t* codes) {
    switch (bits) {
        case 2:
            return search_codes<2>(x, numel, max, codes);
        case 3:
            return search_codes<3>(x, numel, max, codes);
        case 4:
            return search_codes<4>(x, numel, max, codes);
        default:
            return search_codes<5>(x, numel, max, codes);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
