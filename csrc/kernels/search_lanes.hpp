// Blocks of int4 with search (docs/wire-format.md, rule 4), from values to bytes of the wire without a detour through
// memory for single codes. Included by block.cpp only.
#pragma once

#include <cstdint>

#include "kernels/blocks_lanes.hpp"
#include "kernels/search.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr Search kSearch4 = kSearches[2];

// Four blocks of a multiple of 2 * kWidth values side by side. With kBlock, which is then the blocks' size, loops are
// unrolled; 0 is any size. To be called: measure, round, search, write.
template <class Source, std::int64_t kBlock>
class FourBlocks {
public:
    FourBlocks(const char* values, std::int64_t block) : values_(values), any_block_(block) {}

    void measure() {
        maxima_ = maxima_of<Source>(values_, block());
    }

    void round() {
        const Lanes fraction = all_words((1 << 15) / kSearch4.finer + 1);
        alignas(16) float factors[4];
        store_four(factors, all_four(-kSearch4.coarse * kSearch4.finer) / maxima_.max);
        Lanes sum_of[4];
        Lanes squares_of[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            const Floats factor = all_floats(factors[row]);
            Lanes squares_in_run = zeros();
            sum_of[row] = squares_of[row] = zeros();
            for_runs<kSquaresRun>(
                row, kWidth,
                [&](std::int64_t at) __attribute__((always_inline)) {
                    const char* values = values_ + at * Source::kBytes;
                    prefetch<Source>(values + 8 * block() * Source::kBytes);
                    const Parts x = Source::load(values);
                    const Lanes first = rounded_words(x.part[0], x.part[1], factor);
                    const Lanes second = rounded_words(x.part[2], x.part[3], factor);
                    store_lanes(fine_ + at, first);
                    store_lanes(fine_ + at + kWidth / 2, second);
                    const Lanes coarse_first = rounded_products(first, fraction);
                    const Lanes coarse_second = rounded_products(second, fraction);
                    store_lanes(coarse_ + at, coarse_first);
                    store_lanes(coarse_ + at + kWidth / 2, coarse_second);
                    const Lanes coarse = bytes_of(coarse_first, coarse_second);
                    const Lanes magnitude = magnitudes_of_bytes(coarse);
                    store_lanes(magnitude_ + at, magnitude);
                    store_lanes(limit_ + at, one_more_where_negative(7, coarse));
                    sum_of[row] = add_bytes(sum_of[row], magnitude);
                    squares_in_run = add_products(squares_in_run, magnitude, magnitude);
                },
                [&]() __attribute__((always_inline)) {
                    squares_of[row] = add_sums(squares_of[row], squares_in_run);
                    squares_in_run = zeros();
                });
        });
        sums_ = reduced<sum>(sum_of);
        squares_ = reduced<sum>(squares_of);
    }

    // Of each block, the gain whose codes explain most.
    void search() {
        constexpr int kSpread = static_cast<int>(kSearch4.spread);
        const Ints4 centre = middle_gains();
        Ints4 nums[3];
        Ints4 dens[3];
        products({centre, centre - kSpread, centre + kSpread}, nums, dens);
        Floats4 num = floats_of(nums[0]);
        Floats4 den = floats_of(dens[0]);
        for (int i = 1; i < 3; ++i) {
            const Floats4 tried_num = floats_of(nums[i]);
            const Floats4 tried_den = floats_of(dens[i]);
            const Ints4 better = ((tried_num * tried_num) * den) > ((num * num) * tried_den);
            num = select(better, tried_num, num);
            den = select(better, tried_den, den);
        }
        const Floats4 scaled = den * all_four((1 << 15) / kSearch4.finer);
        store_words(gains_, nearest_integers(scaled / select(num > all_four(1.0F), num, all_four(1.0F))));
    }

    // The blocks' bytes and scales.
    void write(std::uint8_t* out, float* scales) const {
        write_codes(out, scales);
        poison(maxima_, block() / 2, out, scales);
    }

private:
    // So many steps keep sums in 16 bits below 2^15: of two products of a coarse value with itself (63^2) or with a
    // code (63 * 8).
    static constexpr int kSquaresRun = 4;
    static constexpr int kCodesRun = 32;
    static constexpr std::int64_t kRoom = 4 * (kBlock != 0 ? kBlock : kMostBlock);

    const char* values_;
    std::int64_t any_block_;
    Maxima maxima_;
    // Of each kWidth values, in the order of Source::load: fine values, coarse values, their magnitudes, and the
    // magnitudes that their codes may have.
    alignas(64) std::int16_t fine_[kRoom];
    alignas(64) std::int16_t coarse_[kRoom];
    alignas(64) std::uint8_t magnitude_[kRoom];
    alignas(64) std::uint8_t limit_[kRoom];
    Ints4 sums_;
    Ints4 squares_;
    alignas(16) std::int32_t gains_[4];  // of fine values

    std::int64_t block() const {
        return kBlock != 0 ? kBlock : any_block_;
    }

    // Words for all_numbers, each twice.
    static void store_words(std::int32_t (&to)[4], Ints4 words) {
        const Ints4 twice = words | (words << 16);
        copy(to, &twice, sizeof twice);
    }

    // body(at) for the places of a row, and after() whenever sums of so many steps must be emptied.
    template <int kSteps, class Body, class After>
    __attribute__((always_inline)) void for_runs(int row, std::int64_t step, const Body& body,
                                                 const After& after) const {
        const std::int64_t end = (row + 1) * block();
        for (std::int64_t run = row * block(); run < end; run += kSteps * kWidth) {
            const std::int64_t stop = end - run < kSteps * kWidth ? end : run + kSteps * kWidth;
            for (std::int64_t at = run; at < stop; at += step) {
                body(at);
            }
            after();
        }
    }

    Ints4 middle_gains() const {
        const Floats4 ratio = floats_of(sums_) / floats_of(squares_ + kSearch4.outlier);
        const Ints4 gain = nearest_integers(ratio * all_four(kSearch4.slope) + all_four(kSearch4.base));
        const Ints4 most = Ints4{} + static_cast<int>(kMostGain - kSearch4.spread);
        return select(gain < most, gain, most);
    }

    // For three gains of each block, the sums of value * code and of code * code. A value and its code have the same
    // sign, or one of them is zero: magnitudes will do.
    void products(const Ints4 (&gains)[3], Ints4 (&nums)[3], Ints4 (&dens)[3]) const {
        Lanes num[3][4];
        Lanes den[3][4];
        alignas(16) std::int32_t factors[3][4];
        for (int i = 0; i < 3; ++i) {
            store_words(factors[i], gains[i] << 6);
        }
        for_rows([&](int row) __attribute__((always_inline)) {
            Lanes gain[3];
            Lanes num_in_run[3];
            Lanes den_in_run[3];
            for (int i = 0; i < 3; ++i) {
                gain[i] = all_numbers(factors[i][row]);
                num[i][row] = den[i][row] = num_in_run[i] = den_in_run[i] = zeros();
            }
            for_runs<kCodesRun>(
                row, kWidth,
                [&](std::int64_t at) __attribute__((always_inline)) {
                    const Lanes first = load_lanes(coarse_ + at);
                    const Lanes second = load_lanes(coarse_ + at + kWidth / 2);
                    const Lanes magnitude = load_lanes(magnitude_ + at);
                    const Lanes limit = load_lanes(limit_ + at);
                    for (int i = 0; i < 3; ++i) {
                        const Lanes codes =
                            bytes_of(rounded_products(first, gain[i]), rounded_products(second, gain[i]));
                        const Lanes code = smaller_bytes(magnitudes_of_bytes(codes), limit);
                        num_in_run[i] = add_products(num_in_run[i], magnitude, code);
                        den_in_run[i] = add_products(den_in_run[i], code, code);
                    }
                },
                [&]() __attribute__((always_inline)) {
                    for (int i = 0; i < 3; ++i) {
                        num[i][row] = add_sums(num[i][row], num_in_run[i]);
                        den[i][row] = add_sums(den[i][row], den_in_run[i]);
                        num_in_run[i] = den_in_run[i] = zeros();
                    }
                });
        });
        for (int i = 0; i < 3; ++i) {
            nums[i] = reduced<sum>(num[i]);
            dens[i] = reduced<sum>(den[i]);
        }
    }

    void write_codes(std::uint8_t* out, float* scales) const {
        Lanes num[4];
        Lanes den[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            const Lanes gain = all_numbers(gains_[row]);
            Lanes num_in_run = zeros();
            Lanes den_in_run = zeros();
            num[row] = den[row] = zeros();
            for_runs<kCodesRun>(
                row, 2 * kWidth,
                [&](std::int64_t at) __attribute__((always_inline)) {
                    const Lanes first = codes(fine_ + at, gain);
                    const Lanes second = codes(fine_ + at + kWidth, gain);
                    add_codes(magnitude_ + at, first, num_in_run, den_in_run);
                    add_codes(magnitude_ + at + kWidth, second, num_in_run, den_in_run);
                    store_lanes(out + at / 2, packed_nibbles<Source>(first, second));
                },
                [&]() __attribute__((always_inline)) {
                    num[row] = add_sums(num[row], num_in_run);
                    den[row] = add_sums(den[row], den_in_run);
                    num_in_run = den_in_run = zeros();
                });
        });
        const Ints4 nums = reduced<sum>(num);
        const Ints4 dens = reduced<sum>(den);
        const Floats4 unit = maxima_.max * all_four(-1.0F / kSearch4.coarse);
        const Floats4 quotient = floats_of(nums) / floats_of(dens);
        store_four(scales, select(dens != Ints4{}, unit * quotient, Floats4{}));
    }

    // Of kWidth values.
    static Lanes codes(const std::int16_t* fine, Lanes gain) {
        const Lanes first = rounded_products(load_lanes(fine), gain);
        const Lanes second = rounded_products(load_lanes(fine + kWidth / 2), gain);
        return limited_bytes(bytes_of(first, second), -8, 7);
    }

    static void add_codes(const std::uint8_t* coarse, Lanes codes, Lanes& num, Lanes& den) {
        const Lanes code = magnitudes_of_bytes(codes);
        num = add_products(num, load_lanes(coarse), code);
        den = add_products(den, code, code);
    }
};

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
