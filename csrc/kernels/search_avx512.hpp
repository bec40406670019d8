// Blocks of int4 with search (docs/wire-format.md, rule 4) on CPUs that look up 64 bytes in a table of 128 at once:
// from values to bytes of the wire without a detour through memory for single codes. Included by block.cpp only.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/blocks_avx512.hpp"
#include "kernels/search.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

// Of the words of two registers the high bytes, in the order in which packing puts words.
struct HighBytes {
    alignas(64) std::uint8_t from[kChunk];
    constexpr HighBytes() : from() {
        for (int i = 0; i < kChunk; ++i) {
            const int word = i / 16 * 8 + i % 8;
            from[i] = static_cast<std::uint8_t>(2 * word + 1 + (i % 16 < 8 ? 0 : 64));
        }
    }
};

// Asks for a chunk that will be read later; it may lie beyond the end. The processor itself looks ahead to the end of a
// page only, which eight blocks of bf16 fill.
template <class Source>
void prefetch_chunk(const char* values) {
    for (std::int64_t at = 0; at < kChunk * Source::kBytes; at += 64) {
        _mm_prefetch(values + at, _MM_HINT_T0);
    }
}

// Four blocks of a multiple of 128 values side by side. With kBlock, which is then the blocks' size, loops are
// unrolled; 0 is any size. To be called: load, refine once for each distance of the search, write.
template <class Source, std::int64_t kBlock>
class FourBlocks {
public:
    FourBlocks(const Search& search, const char* values, std::int64_t block)
        : search_(search), values_(values), any_block_(block) {}

    void load() {
        maxima_ = maxima_of<Source>(values_, block());
        quantize();
        best_ = _mm_set1_epi32(search_.start);
        errors<1>({best_}, {&least_});
    }

    // Of each block, the step of least error among the best so far and its neighbours.
    void refine(int distance) {
        const __m128i below = _mm_sub_epi32(best_, _mm_set1_epi32(distance));
        const __m128i above = _mm_add_epi32(best_, _mm_set1_epi32(distance));
        __m128i error_below;
        __m128i error_above;
        errors<2>({below, above}, {&error_below, &error_above});
        take_better(below, error_below);
        take_better(above, error_above);
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
    const Search& search_;
    const char* values_;
    std::int64_t any_block_;
    __m128i best_;  // indices of steps
    __m128i least_;
    Maxima maxima_;
    // In 1/32768 of the largest value, of each chunk the even positions before the odd ones; and in 1/128.
    alignas(64) std::int16_t fine_[4 * (kBlock != 0 ? kBlock : kMostBlock)];
    alignas(64) std::int8_t coarse_[4 * (kBlock != 0 ? kBlock : kMostBlock)];

    std::int64_t block() const {
        return kBlock != 0 ? kBlock : any_block_;
    }

    void quantize() {
        static constexpr HighBytes kHighBytes;
        const __m512i high_bytes = _mm512_load_si512(kHighBytes.from);
        const __m512i half = _mm512_set1_epi16(128);
        for (int row = 0; row < 4; ++row) {
            const __m512 factor = _mm512_set1_ps(-32768.0F / maxima_.max[row]);
            const std::int64_t end = (row + 1) * block();
            for (std::int64_t done = row * block(); done < end; done += kChunk) {
                const char* values = values_ + done * Source::kBytes;
                prefetch_chunk<Source>(values + 8 * block() * Source::kBytes);
                const Words words = rounded(Source::load(values), factor);
                _mm512_store_si512(fine_ + done, words.even);
                _mm512_store_si512(fine_ + done + kChunk / 2, words.odd);
                const __m512i coarse = _mm512_permutex2var_epi8(_mm512_adds_epi16(words.even, half), high_bytes,
                                                                _mm512_adds_epi16(words.odd, half));
                _mm512_store_si512(coarse_ + done, coarse);
            }
        }
    }

    void take_better(__m128i tried, __m128i error) {
        const __mmask8 better = _mm_cmplt_epi32_mask(error, least_);
        best_ = _mm_mask_mov_epi32(best_, better, tried);
        least_ = _mm_mask_mov_epi32(least_, better, error);
    }

    // The errors of kCount steps for each block.
    template <int kCount>
    void errors(const __m128i (&steps)[kCount], __m128i* const (&errors)[kCount]) const {
        alignas(16) std::int32_t step_of[kCount][4];
        for (int i = 0; i < kCount; ++i) {
            _mm_store_si128(reinterpret_cast<__m128i*>(step_of[i]), steps[i]);
        }
        __m512i error[kCount][4];
        for_rows([&](int row) __attribute__((always_inline)) {
            __m512i low[kCount];
            __m512i high[kCount];
            for (int i = 0; i < kCount; ++i) {
                const std::uint8_t* table = search_.step[step_of[i][row]].error;
                low[i] = _mm512_load_si512(table);
                high[i] = _mm512_load_si512(table + 64);
                error[i][row] = _mm512_setzero_si512();
            }
            const std::int8_t* coarse = coarse_ + row * block();
            for (std::int64_t at = 0; at < block(); at += kChunk) {
                // The look-up takes seven bits of each byte: what comes down from the byte above does no harm.
                const __m512i bin = _mm512_srli_epi16(_mm512_load_si512(coarse + at), 1);
                for (int i = 0; i < kCount; ++i) {
                    // Errors are at most 127, which either sign will do for.
                    const __m512i bytes = _mm512_permutex2var_epi8(low[i], bin, high[i]);
                    error[i][row] = _mm512_dpbusd_epi32(error[i][row], bytes, bytes);
                }
            }
        });
        for (int i = 0; i < kCount; ++i) {
            *errors[i] = reduced<sum>(error[i]);
        }
    }

    void write_codes(std::uint8_t* out, float* scales) const {
        alignas(16) std::int32_t step_of[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(step_of), best_);
        const __m512i order = _mm512_load_si512(Source::kPairs.pairs);
        const __m512i high_nibbles = _mm512_set1_epi8(-16);
        __m512i num[4];
        __m512i den[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            const auto step = static_cast<std::int16_t>(search_.step[step_of[row]].reciprocal);
            const __m512i reciprocal = _mm512_set1_epi16(step);
            num[row] = den[row] = _mm512_setzero_si512();
            const std::int64_t end = (row + 1) * block();
            for (std::int64_t done = row * block(); done < end; done += 2 * kChunk) {
                const __m512i first = codes(fine_ + done, reciprocal);
                const __m512i second = codes(fine_ + done + kChunk, reciprocal);
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
        const __m128 unit = _mm_mul_ps(_mm_load_ps(maxima_.max), _mm_set1_ps(-1.0F / 128));
        const __m128 scale = _mm_mul_ps(unit, _mm_div_ps(_mm_cvtepi32_ps(nums), _mm_cvtepi32_ps(dens)));
        _mm_storeu_ps(scales, _mm_maskz_mov_ps(_mm_test_epi32_mask(dens, dens), scale));
    }

    // Of a chunk, in the high nibbles; the low ones are zeros. Packing and the sum bound them by saturation.
    static __m512i codes(const std::int16_t* fine, __m512i reciprocal) {
        const __m512i even = _mm512_mulhi_epi16(_mm512_load_si512(fine), reciprocal);
        const __m512i odd = _mm512_mulhi_epi16(_mm512_load_si512(fine + kChunk / 2), reciprocal);
        const __m512i finer = _mm512_adds_epi8(_mm512_packs_epi16(even, odd), _mm512_set1_epi8(8));
        return _mm512_and_si512(finer, _mm512_set1_epi8(-16));
    }

    // A value and its code have the same sign, or one of them is zero: magnitudes will do, and fit the instruction.
    static void add_products(const std::int8_t* coarse, __m512i code, __m512i& num, __m512i& den) {
        const __m512i magnitude = _mm512_srli_epi16(_mm512_abs_epi8(code), 4);
        num = _mm512_dpbusd_epi32(num, _mm512_abs_epi8(_mm512_load_si512(coarse)), magnitude);
        den = _mm512_dpbusd_epi32(den, magnitude, magnitude);
    }
};

// A step of a search waits for the one before; with a second search under way the processor has something to do
// meanwhile.
template <class Source, std::int64_t kBlock>
void encode_two_fours(const Search& search, const char* values, std::int64_t block, std::uint8_t* out, float* scales) {
    FourBlocks<Source, kBlock> first(search, values, block);
    FourBlocks<Source, kBlock> second(search, values + 4 * block * Source::kBytes, block);
    first.load();
    second.load();
    for (int i = 0; i < search.num_distances; ++i) {
        first.refine(search.distance[i]);
        second.refine(search.distance[i]);
    }
    first.write(out, scales);
    second.write(out + 2 * block, scales + 4);
}

// Eight blocks of a multiple of 128 values.
template <class Source>
void encode_eight_int4(const char* values, std::int64_t block, std::uint8_t* out, float* scales) {
    const Search& search = search_of(4);
    if (block == 256) {
        encode_two_fours<Source, 256>(search, values, block, out, scales);
    } else {
        encode_two_fours<Source, 0>(search, values, block, out, scales);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
