// Blocks of int4 with search (docs/wire-format.md, rule 4) on CPUs that look up 64 bytes in a table of 128 at once:
// from values to bytes of the wire without a detour through memory for single codes. Included by block.cpp only.
//
// Values are taken in chunks of 64, and in them even and odd positions apart, for the two of a pair share a byte at
// the end. In which order the pairs of a chunk lie does not matter to maxima and sums; Source::kOrder says it to the
// one who writes them.
#pragma once

#include <immintrin.h>

#include "kernels/search.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kChunk = 64;

// Where the 64 bytes of two chunks come from, when byte i of lane L has pair first[i] + L * lane of a chunk, and the
// lane's second half the other chunk's.
struct Order {
    alignas(64) std::uint8_t from[kChunk];
    constexpr Order(const int (&first)[8], int lane) : from() {
        for (int i = 0; i < kChunk; ++i) {
            const int pair = first[i % 8] + i / 16 * lane + (i % 16 < 8 ? 0 : kChunk / 2);
            from[pair] = static_cast<std::uint8_t>(i);
        }
    }
};

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

// Even and odd values of a chunk as fp32, 16 at a time.
struct Halves {
    __m512 even[2];
    __m512 odd[2];
};

struct Float32 {
    static constexpr std::int64_t kBytes = 4;
    static constexpr Order kOrder = Order({0, 1, 8, 9, 16, 17, 24, 25}, 2);

    static Halves load(const char* x) {
        Halves halves;
        for (int i = 0; i < 2; ++i) {
            const __m512 first = _mm512_loadu_ps(x + 128 * i);
            const __m512 second = _mm512_loadu_ps(x + 128 * i + 64);
            halves.even[i] = _mm512_shuffle_ps(first, second, 0x88);
            halves.odd[i] = _mm512_shuffle_ps(first, second, 0xdd);
        }
        return halves;
    }

    // Per 32-bit lane, the largest magnitude and the largest of the bits as integers.
    static void largest(const char* x, std::int64_t numel, __m512i& magnitude, __m512i& most) {
        const __m512i unsigned_bits = _mm512_set1_epi32(INT32_MAX);
        magnitude = _mm512_setzero_si512();
        most = _mm512_set1_epi32(INT32_MIN);
        for (std::int64_t i = 0; i < numel; i += 16) {
            const __m512i bits = _mm512_loadu_si512(x + 4 * i);
            magnitude = _mm512_max_epi32(magnitude, _mm512_and_si512(bits, unsigned_bits));
            most = _mm512_max_epi32(most, bits);
        }
    }
};

struct BFloat16 {
    static constexpr std::int64_t kBytes = 2;
    static constexpr Order kOrder = Order({0, 1, 2, 3, 16, 17, 18, 19}, 4);

    static Halves load(const char* x) {
        Halves halves;
        for (int i = 0; i < 2; ++i) {
            const __m512i bits = _mm512_loadu_si512(x + 64 * i);
            halves.even[i] = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
            halves.odd[i] = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x10000)));
        }
        return halves;
    }

    static void largest(const char* x, std::int64_t numel, __m512i& magnitude, __m512i& most) {
        const __m512i unsigned_bits = _mm512_set1_epi16(INT16_MAX);
        magnitude = _mm512_setzero_si512();
        most = _mm512_set1_epi16(INT16_MIN);
        for (std::int64_t i = 0; i < numel; i += 32) {
            const __m512i bits = _mm512_loadu_si512(x + 2 * i);
            magnitude = _mm512_max_epi16(magnitude, _mm512_and_si512(bits, unsigned_bits));
            most = _mm512_max_epi16(most, bits);
        }
        magnitude = widened(magnitude);
        most = widened(most);
    }

private:
    static __m512i widened(__m512i halves) {
        return _mm512_max_epi32(_mm512_slli_epi32(halves, 16),
                                _mm512_and_si512(halves, _mm512_set1_epi32(-0x10000)));
    }
};

__m512i sum(__m512i a, __m512i b) {
    return _mm512_add_epi32(a, b);
}

__m512i larger(__m512i a, __m512i b) {
    return _mm512_max_epi32(a, b);
}

// One number from the 32-bit lanes of each of four registers.
template <__m512i (*kJoin)(__m512i, __m512i)>
__m128i reduced(const __m512i (&lanes)[4]) {
    const __m512i first =
        kJoin(_mm512_unpacklo_epi32(lanes[0], lanes[1]), _mm512_unpackhi_epi32(lanes[0], lanes[1]));
    const __m512i second =
        kJoin(_mm512_unpacklo_epi32(lanes[2], lanes[3]), _mm512_unpackhi_epi32(lanes[2], lanes[3]));
    const __m512i quarters = kJoin(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m512i halves = kJoin(quarters, _mm512_shuffle_i64x2(quarters, quarters, 0x4e));
    return _mm512_castsi512_si128(kJoin(halves, _mm512_shuffle_i64x2(halves, halves, 0xb1)));
}

// Four times, without a loop: what is kept for each row stays in registers.
template <class Body>
__attribute__((always_inline)) inline void for_rows(const Body& body) {
    body(0);
    body(1);
    body(2);
    body(3);
}

// Four blocks of a multiple of 128 values side by side: each step of a search waits for the one before, and with four
// of them under way the processor has something to do meanwhile.
//
// With kBlock, which is then the blocks' size, loops are unrolled; 0 is any size.
template <class Source, std::int64_t kBlock>
class FourBlocks {
public:
    FourBlocks(const Search& search, const void* values, std::int64_t block)
        : search_(search), values_(static_cast<const char*>(values)), block_(kBlock != 0 ? kBlock : block) {}

    // Writes the bytes and scales of the blocks and returns true; or leaves them to others, if one of the blocks has a
    // value that is not finite or none but zeros.
    bool encode(std::uint8_t* out, float* scales) {
        if (!find_largest()) {
            return false;
        }
        quantize();
        write(best_steps(), out, scales);
        return true;
    }

private:
    const Search& search_;
    const char* values_;
    std::int64_t block_;
    alignas(16) float max_[4];
    // In 1/32768 of the largest value, of each chunk the even positions before the odd ones; and in 1/128.
    alignas(64) std::int16_t fine_[4 * kMostBlock];
    alignas(64) std::int8_t coarse_[4 * kMostBlock];

    bool find_largest() {
        __m512i magnitude[4];
        __m512i most[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            Source::largest(values_ + row * block_ * Source::kBytes, block_, magnitude[row], most[row]);
        });
        const __m128i magnitudes = reduced<larger>(magnitude);
        const __m128i unfit = _mm_or_si128(_mm_cmpeq_epi32(magnitudes, _mm_setzero_si128()),
                                           _mm_cmpgt_epi32(magnitudes, _mm_set1_epi32(0x7f7fffff)));
        const __m128i is_positive = _mm_cmpeq_epi32(magnitudes, reduced<larger>(most));
        const __m128i sign = _mm_andnot_si128(is_positive, _mm_set1_epi32(INT32_MIN));
        const __m128 bounded = _mm_max_ps(_mm_castsi128_ps(magnitudes), _mm_set1_ps(kSmallestMax));
        _mm_store_ps(max_, _mm_or_ps(bounded, _mm_castsi128_ps(sign)));
        return _mm_testz_si128(unfit, unfit) != 0;
    }

    void quantize() {
        static constexpr HighBytes kHighBytes;
        const __m512i high_bytes = _mm512_load_si512(kHighBytes.from);
        const __m512i half = _mm512_set1_epi16(128);
        const __m128 factors = _mm_div_ps(_mm_set1_ps(-32768.0F), _mm_load_ps(max_));
        alignas(16) float factor_of[4];
        _mm_store_ps(factor_of, factors);
        for (int row = 0; row < 4; ++row) {
            const __m512 factor = _mm512_set1_ps(factor_of[row]);
            const std::int64_t end = (row + 1) * block_;
            for (std::int64_t done = row * block_; done < end; done += kChunk) {
                const Halves x = Source::load(values_ + done * Source::kBytes);
                const __m512i even = _mm512_packs_epi32(rounded(x.even[0], factor), rounded(x.even[1], factor));
                const __m512i odd = _mm512_packs_epi32(rounded(x.odd[0], factor), rounded(x.odd[1], factor));
                _mm512_store_si512(fine_ + done, even);
                _mm512_store_si512(fine_ + done + kChunk / 2, odd);
                const __m512i coarse = _mm512_permutex2var_epi8(_mm512_adds_epi16(even, half), high_bytes,
                                                                _mm512_adds_epi16(odd, half));
                _mm512_store_si512(coarse_ + done, coarse);
            }
        }
    }

    static __m512i rounded(__m512 x, __m512 factor) {
        return _mm512_cvtps_epi32(_mm512_mul_ps(x, factor));
    }

    // Of each block, the step of least error; as indices.
    __m128i best_steps() const {
        __m128i best = _mm_set1_epi32(search_.start);
        __m128i least;
        errors<1>({best}, {&least});
        for (int i = 0; i < search_.num_distances; ++i) {
            const __m128i distance = _mm_set1_epi32(search_.distance[i]);
            const __m128i below = _mm_sub_epi32(best, distance);
            const __m128i above = _mm_add_epi32(best, distance);
            __m128i error_below;
            __m128i error_above;
            errors<2>({below, above}, {&error_below, &error_above});
            take_better(below, error_below, best, least);
            take_better(above, error_above, best, least);
        }
        return best;
    }

    static void take_better(__m128i tried, __m128i error, __m128i& best, __m128i& least) {
        const __mmask8 better = _mm_cmplt_epi32_mask(error, least);
        best = _mm_mask_mov_epi32(best, better, tried);
        least = _mm_mask_mov_epi32(least, better, error);
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
            const std::int8_t* coarse = coarse_ + row * block_;
            for (std::int64_t at = 0; at < block_; at += kChunk) {
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

    void write(__m128i steps, std::uint8_t* out, float* scales) const {
        alignas(16) std::int32_t step_of[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(step_of), steps);
        const __m512i order = _mm512_load_si512(Source::kOrder.from);
        const __m512i high_nibbles = _mm512_set1_epi8(-16);
        __m512i num[4];
        __m512i den[4];
        for_rows([&](int row) __attribute__((always_inline)) {
            const auto step = static_cast<std::int16_t>(search_.step[step_of[row]].reciprocal);
            const __m512i reciprocal = _mm512_set1_epi16(step);
            num[row] = den[row] = _mm512_setzero_si512();
            const std::int64_t end = (row + 1) * block_;
            for (std::int64_t done = row * block_; done < end; done += 2 * kChunk) {
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
        const __m128 unit = _mm_mul_ps(_mm_load_ps(max_), _mm_set1_ps(-1.0F / 128));
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

template <class Source>
bool encode_four(const Search& search, const void* values, std::int64_t block, std::uint8_t* out, float* scales) {
    if (block == 256) {
        return FourBlocks<Source, 256>(search, values, block).encode(out, scales);
    }
    return FourBlocks<Source, 0>(search, values, block).encode(out, scales);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
