// Blocks of int4 with search (docs/wire-format.md, rule 4) on CPUs that look up 64 bytes in a table of 128 at once:
// from values to bytes of the wire without a detour through memory for single codes. Included by block.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/blocks_avx512.hpp"
#include "kernels/search.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr Search kSearch4 = kSearches[2];

// For each gain, the magnitudes of the codes of coarse values, which are indexed by their low seven bits.
constexpr int kCoarse = 128;

struct CodesOfGains {
    alignas(64) std::uint8_t magnitude[static_cast<int>(kMostGain) + 1][kCoarse];
    CodesOfGains() : magnitude() {
        for (int gain = 0; gain <= static_cast<int>(kMostGain); ++gain) {
            for (int i = 0; i < kCoarse; ++i) {
                const auto coarse = static_cast<std::int16_t>(i < kCoarse / 2 ? i : i - kCoarse);
                const auto factor = static_cast<std::int16_t>(gain << 6);
                const std::int16_t code = limited<4>(rounded_product(coarse, factor));
                magnitude[gain][i] = static_cast<std::uint8_t>(code < 0 ? -code : code);
            }
        }
    }
};

const CodesOfGains& codes_of_gains() {
    static const CodesOfGains codes;
    return codes;
}

// Asks for a chunk that will be read later; it may lie beyond the end. The processor itself looks ahead to the end of a
// page only, which eight blocks of bf16 fill.
template <class Source>
void prefetch_chunk(const char* values) {
    for (std::int64_t at = 0; at < kChunk * Source::kBytes; at += 64) {
        _mm_prefetch(values + at, _MM_HINT_T0);
    }
}

// Four blocks of a multiple of 128 values side by side. With kBlock, which is then the blocks' size, loops are
// unrolled; 0 is any size. To be called: measure, round, search, write.
template <class Source, std::int64_t kBlock>
class FourBlocks {
public:
    FourBlocks(const char* values, std::int64_t block) : values_(values), any_block_(block) {}

    void measure() {
        maxima_ = maxima_of<Source>(values_, block());
    }

    void round() {
        const __m512i fraction = _mm512_set1_epi16((1 << 15) / kSearch4.finer + 1);
        for (int row = 0; row < 4; ++row) {
            const __m512 factor = _mm512_set1_ps(-kSearch4.coarse * kSearch4.finer / maxima_.max[row]);
            const std::int64_t end = (row + 1) * block();
            for (std::int64_t done = row * block(); done < end; done += kChunk) {
                const char* values = values_ + done * Source::kBytes;
                prefetch_chunk<Source>(values + 8 * block() * Source::kBytes);
                const Words words = rounded(Source::load(values), factor);
                _mm512_store_si512(fine_ + done, _mm512_slli_epi16(words.even, 5));
                _mm512_store_si512(fine_ + done + kChunk / 2, _mm512_slli_epi16(words.odd, 5));
                const __m512i coarse = _mm512_packs_epi16(_mm512_mulhrs_epi16(words.even, fraction),
                                                          _mm512_mulhrs_epi16(words.odd, fraction));
                _mm512_store_si512(coarse_ + done, coarse);
            }
        }
    }

    // Of each block, the gain whose codes explain most.
    void search() {
        const __m128 spread = _mm_set1_ps(kSearch4.spread);
        const __m128 centre = middle_gains();
        __m128i nums[3];
        __m128i dens[3];
        products({centre, _mm_sub_ps(centre, spread), _mm_add_ps(centre, spread)}, nums, dens);
        __m128 num = _mm_cvtepi32_ps(nums[0]);
        __m128 den = _mm_cvtepi32_ps(dens[0]);
        for (int i = 1; i < 3; ++i) {
            const __m128 tried_num = _mm_cvtepi32_ps(nums[i]);
            const __m128 tried_den = _mm_cvtepi32_ps(dens[i]);
            const __m128 explained = _mm_mul_ps(_mm_mul_ps(num, num), tried_den);
            const __m128 tried = _mm_mul_ps(_mm_mul_ps(tried_num, tried_num), den);
            const __mmask8 better = _mm_cmp_ps_mask(tried, explained, _CMP_GT_OQ);
            num = _mm_mask_mov_ps(num, better, tried_num);
            den = _mm_mask_mov_ps(den, better, tried_den);
        }
        const __m128 scaled = _mm_mul_ps(den, _mm_set1_ps((1 << 15) / kSearch4.finer));
        gains_ = _mm_cvtps_epi32(_mm_div_ps(scaled, _mm_max_ps(num, _mm_set1_ps(1.0F))));
    }

    // The blocks' bytes and scales.
    void write(std::uint8_t* out, float* scales) const {
        write_codes(out, scales);
        for (int row = 0; row < 4; ++row) {
            if ((maxima_.poisoned >> row & 1) != 0) {
                zero(out + row * block() / 2, block() / 2);
                scales[row] = value_of(kPoisonedScale);
            }
        }
    }

private:
    const char* values_;
    std::int64_t any_block_;
    __m128i gains_;  // of fine values
    Maxima maxima_;
    // Fine values times 32, of each chunk the even positions before the odd ones; and coarse values.
    alignas(64) std::int16_t fine_[4 * (kBlock != 0 ? kBlock : kMostBlock)];
    alignas(64) std::int8_t coarse_[4 * (kBlock != 0 ? kBlock : kMostBlock)];

    std::int64_t block() const {
        return kBlock != 0 ? kBlock : any_block_;
    }

    __m128 middle_gains() const {
        __m512i sum_of[4];
        __m512i squares_of[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            sum_of[row] = squares_of[row] = _mm512_setzero_si512();
            const std::int8_t* coarse = coarse_ + row * block();
            for (std::int64_t at = 0; at < block(); at += kChunk) {
                const __m512i magnitude = _mm512_abs_epi8(_mm512_load_si512(coarse + at));
                sum_of[row] = _mm512_dpbusd_epi32(sum_of[row], magnitude, _mm512_set1_epi8(1));
                squares_of[row] = _mm512_dpbusd_epi32(squares_of[row], magnitude, magnitude);
            }
        });
        const __m128i squares = _mm_add_epi32(reduced<sum>(squares_of), _mm_set1_epi32(kSearch4.outlier));
        const __m128 ratio = _mm_div_ps(_mm_cvtepi32_ps(reduced<sum>(sum_of)), _mm_cvtepi32_ps(squares));
        const __m128 gain = _mm_add_ps(_mm_mul_ps(ratio, _mm_set1_ps(kSearch4.slope)), _mm_set1_ps(kSearch4.base));
        const __m128 whole = _mm_round_ps(gain, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return _mm_min_ps(whole, _mm_set1_ps(kMostGain - kSearch4.spread));
    }

    // For three gains of each block, the sums of value * code and of code * code. A value and its code have the same
    // sign, or one of them is zero: magnitudes will do, and fit the instruction.
    void products(const __m128 (&gains)[3], __m128i (&nums)[3], __m128i (&dens)[3]) const {
        const CodesOfGains& codes = codes_of_gains();
        alignas(16) std::int32_t gain_of[3][4];
        for (int i = 0; i < 3; ++i) {
            _mm_store_si128(reinterpret_cast<__m128i*>(gain_of[i]), _mm_cvtps_epi32(gains[i]));
        }
        __m512i num[3][4];
        __m512i den[3][4];
        for_rows([&](int row) __attribute__((always_inline)) {
            __m512i low[3];
            __m512i high[3];
            for (int i = 0; i < 3; ++i) {
                const std::uint8_t* table = codes.magnitude[gain_of[i][row]];
                low[i] = _mm512_load_si512(table);
                high[i] = _mm512_load_si512(table + 64);
                num[i][row] = den[i][row] = _mm512_setzero_si512();
            }
            const std::int8_t* coarse = coarse_ + row * block();
            for (std::int64_t at = 0; at < block(); at += kChunk) {
                const __m512i value = _mm512_load_si512(coarse + at);
                const __m512i magnitude = _mm512_abs_epi8(value);
                for (int i = 0; i < 3; ++i) {
                    const __m512i code = _mm512_permutex2var_epi8(low[i], value, high[i]);
                    num[i][row] = _mm512_dpbusd_epi32(num[i][row], magnitude, code);
                    den[i][row] = _mm512_dpbusd_epi32(den[i][row], code, code);
                }
            }
        });
        for (int i = 0; i < 3; ++i) {
            nums[i] = reduced<sum>(num[i]);
            dens[i] = reduced<sum>(den[i]);
        }
    }

    void write_codes(std::uint8_t* out, float* scales) const {
        alignas(16) std::int32_t gain_of[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(gain_of), gains_);
        const __m512i order = _mm512_load_si512(Source::kPairs.pairs);
        const __m512i high_nibbles = _mm512_set1_epi8(-16);
        __m512i num[4];
        __m512i den[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            const __m512i gain = _mm512_set1_epi16(static_cast<std::int16_t>(gain_of[row]));
            num[row] = den[row] = _mm512_setzero_si512();
            const std::int64_t end = (row + 1) * block();
            for (std::int64_t done = row * block(); done < end; done += 2 * kChunk) {
                const __m512i first = codes(fine_ + done, gain);
                const __m512i second = codes(fine_ + done + kChunk, gain);
                add_products(coarse_ + done, first, num[row], den[row]);
                add_products(coarse_ + done + kChunk, second, num[row], den[row]);
                const __m512i even = _mm512_srli_epi16(_mm512_unpacklo_epi64(first, second), 4);
                const __m512i odd = _mm512_unpackhi_epi64(first, second);
                // The even nibble where the mask is 0, the odd where it is 1.
                const __m512i pairs = _mm512_ternarylogic_epi32(high_nibbles, odd, even, 0xca);
                _mm512_storeu_si512(out + done / 2, _mm512_permutexvar_epi8(order, pairs));
            }
        });
        const __m128i nums = reduced<sum>(num);
        const __m128i dens = reduced<sum>(den);
        const __m128 unit = _mm_mul_ps(_mm_load_ps(maxima_.max), _mm_set1_ps(-1.0F / kSearch4.coarse));
        const __m128 scale = _mm_mul_ps(unit, _mm_div_ps(_mm_cvtepi32_ps(nums), _mm_cvtepi32_ps(dens)));
        _mm_storeu_ps(scales, _mm_maskz_mov_ps(_mm_test_epi32_mask(dens, dens), scale));
    }

    // Of a chunk, in the high nibbles; the low ones are zeros. Packing and the sum bound them by saturation.
    static __m512i codes(const std::int16_t* fine, __m512i gain) {
        const __m512i even = _mm512_mulhi_epi16(_mm512_load_si512(fine), gain);
        const __m512i odd = _mm512_mulhi_epi16(_mm512_load_si512(fine + kChunk / 2), gain);
        const __m512i finer = _mm512_adds_epi8(_mm512_packs_epi16(even, odd), _mm512_set1_epi8(8));
        return _mm512_and_si512(finer, _mm512_set1_epi8(-16));
    }

    static void add_products(const std::int8_t* coarse, __m512i code, __m512i& num, __m512i& den) {
        const __m512i magnitude = _mm512_srli_epi16(_mm512_abs_epi8(code), 4);
        num = _mm512_dpbusd_epi32(num, _mm512_abs_epi8(_mm512_load_si512(coarse)), magnitude);
        den = _mm512_dpbusd_epi32(den, magnitude, magnitude);
    }
};

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
