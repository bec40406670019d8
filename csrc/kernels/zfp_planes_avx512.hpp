// The bit planes of zfp_planes.hpp for CPUs that look up 64 bytes in a table of 128 at once (AVX-512 VBMI): one byte
// for each block of a group, widened only where bits are joined to longer strings.
//
// Widening takes every second lane in turn, for a shift and a mask do that. So of the 8 vectors of 64-bit lanes that
// hold the payloads, vector s has the blocks s, s + 8, s + 16 and so on; Payloads::slot tells.
#pragma once

#include <immintrin.h>

#include "kernels/zfp_planes.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

struct ByteTables {
    // By n * 16 + nibble: the code; the next n * 16 with the code's length in the low four bits.
    alignas(64) std::uint8_t code[128] = {};
    alignas(64) std::uint8_t step[128] = {};
    // By the next seven bits of the stream, for n = 0 and for the others, each of which needs fewer of the seven:
    // the nibble, and its code's length << 4.
    alignas(64) std::uint8_t first[128] = {};
    alignas(64) std::uint8_t later[128] = {};
    alignas(16) std::uint8_t later_mask[16] = {0, 63, 31, 15, 15};
    alignas(16) std::uint8_t later_base[16] = {0, 64, 0, 32, 48};
    // By a nibble: the position after its highest one.
    alignas(16) std::uint8_t end[16] = {0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4};
    // By how far beyond the end: where a one is that was found at coefficient 3, see truncated().
    alignas(16) std::uint8_t last_one[16] = {8, 4, 2, 1};
    // Bytes 0 and 1 of the 32-bit lanes of two vectors: first all bytes 0, then all bytes 1.
    alignas(64) std::uint8_t split[64] = {};
    // The other way: four bytes each from [bytes 0, bytes 1] and [bytes 2, bytes 3], of lanes 0 to 15.
    alignas(64) std::uint8_t join[64] = {};

    constexpr ByteTables() {
        for (std::uint32_t i = 0; i < 5 * 16; ++i) {
            const std::uint32_t entry = kTables.encode[i];
            code[i] = static_cast<std::uint8_t>(entry);
            step[i] = static_cast<std::uint8_t>(entry >> 16 | (entry >> 8 & 255));
        }
        for (std::uint32_t bits = 0; bits < 128; ++bits) {
            first[bits] = narrow(kTables.decode[bits]);
            for (std::uint32_t n = 1; n <= 4; ++n) {
                later[later_base[n] + (bits & later_mask[n])] = narrow(kTables.decode[n * 128 + bits]);
            }
        }
        for (int i = 0; i < 64; ++i) {
            split[i] = static_cast<std::uint8_t>(i % 32 * 4 + i / 32);
            join[i] = static_cast<std::uint8_t>(i % 4 / 2 * 64 + i % 2 * 32 + i / 4);
        }
    }

private:
    static constexpr std::uint8_t narrow(std::uint32_t entry) {
        return static_cast<std::uint8_t>((entry & 15) | (entry >> 8 & 255) << 4);
    }
};

constexpr ByteTables kBytes;

__m512i load(const void* at) {
    return _mm512_load_si512(at);
}

__m512i load_16(const void* at) {
    return _mm512_broadcast_i32x4(_mm_load_si128(static_cast<const __m128i*>(at)));
}

__m512i bytes_of(int byte) {
    return _mm512_set1_epi8(static_cast<char>(byte));
}

// Byte q of all words, as one vector for each q.
void split_bytes(const std::uint32_t* words, __m512i* bytes) {
    const __m512i a = load(words);
    const __m512i b = load(words + 16);
    const __m512i c = load(words + 32);
    const __m512i d = load(words + 48);
    const __m512i split = load(kBytes.split);
    const __m512i split_high = _mm512_add_epi8(split, bytes_of(2));
    const __m512i ab = _mm512_permutex2var_epi8(a, split, b);
    const __m512i cd = _mm512_permutex2var_epi8(c, split, d);
    const __m512i ab_high = _mm512_permutex2var_epi8(a, split_high, b);
    const __m512i cd_high = _mm512_permutex2var_epi8(c, split_high, d);
    bytes[0] = _mm512_shuffle_i64x2(ab, cd, 0x44);
    bytes[1] = _mm512_shuffle_i64x2(ab, cd, 0xee);
    bytes[2] = _mm512_shuffle_i64x2(ab_high, cd_high, 0x44);
    bytes[3] = _mm512_shuffle_i64x2(ab_high, cd_high, 0xee);
}

void join_bytes(const __m512i* bytes, std::uint32_t* words) {
    const __m512i join = load(kBytes.join);
    const __m512i join_next = _mm512_add_epi8(join, bytes_of(16));
    for (int half = 0; half < 2; ++half) {
        const __m512i low =
            half == 0 ? _mm512_shuffle_i64x2(bytes[0], bytes[1], 0x44) : _mm512_shuffle_i64x2(bytes[0], bytes[1], 0xee);
        const __m512i high =
            half == 0 ? _mm512_shuffle_i64x2(bytes[2], bytes[3], 0x44) : _mm512_shuffle_i64x2(bytes[2], bytes[3], 0xee);
        _mm512_store_si512(words + 32 * half, _mm512_permutex2var_epi8(low, join, high));
        _mm512_store_si512(words + 32 * half + 16, _mm512_permutex2var_epi8(low, join_next, high));
    }
}

// Lanes of twice the width, from the even ones and from the odd ones.
__m512i even_8(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi16(0xff));
}
__m512i odd_8(__m512i v) {
    return _mm512_srli_epi16(v, 8);
}
__m512i even_16(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi32(0xffff));
}
__m512i odd_16(__m512i v) {
    return _mm512_srli_epi32(v, 16);
}
__m512i even_32(__m512i v) {
    return _mm512_and_si512(v, _mm512_set1_epi64(0xffffffff));
}
__m512i odd_32(__m512i v) {
    return _mm512_srli_epi64(v, 32);
}

// Byte s of every 64-bit lane.
template <int s>
__m512i byte_64(__m512i v) {
    return _mm512_and_si512(_mm512_srli_epi64(v, 8 * s), _mm512_set1_epi64(0xff));
}

__m512i either(__m512i a, __m512i b) {
    return _mm512_or_si512(a, b);
}

// Payloads are longer than 64 bits if `wide`. Shifts by more than a lane's width, and by less than zero, give zero.
template <int s, bool wide>
void append(__m512i code, __m512i filled, __m512i* low, __m512i* high) {
    const __m512i at = byte_64<s>(filled);
    low[s] = either(low[s], _mm512_sllv_epi64(code, at));
    if constexpr (wide) {
        const __m512i width = _mm512_set1_epi64(64);
        high[s] = either(high[s], either(_mm512_sllv_epi64(code, _mm512_sub_epi64(at, width)),
                                         _mm512_srlv_epi64(code, _mm512_sub_epi64(width, at))));
    }
}

template <int s, bool wide>
__m512i from(__m512i used, const __m512i* low, const __m512i* high) {
    const __m512i at = byte_64<s>(used);
    __m512i bits = _mm512_srlv_epi64(low[s], at);
    if constexpr (wide) {
        const __m512i width = _mm512_set1_epi64(64);
        bits = either(bits, either(_mm512_srlv_epi64(high[s], _mm512_sub_epi64(at, width)),
                                   _mm512_sllv_epi64(high[s], _mm512_sub_epi64(width, at))));
    }
    return bits;
}

template <bool wide>
void encode_bytes(const Planes& planes, std::uint32_t budget, Payloads& payloads) {
    const __m512i low_nibble = bytes_of(15);
    const __m512i code_a = load(kBytes.code);
    const __m512i code_b = load(kBytes.code + 64);
    const __m512i step_a = load(kBytes.step);
    const __m512i step_b = load(kBytes.step + 64);
    const __m512i full = bytes_of(static_cast<int>(budget));
    __m512i bytes[4][4];
    for (int j = 0; j < 4; ++j) {
        split_bytes(planes.words[j], bytes[j]);
    }
    __m512i state = _mm512_setzero_si512();
    __m512i filled = _mm512_setzero_si512();
    __m512i low[8] = {};
    __m512i high[8] = {};
    for (int p = 7; p >= 0 && _mm512_cmplt_epu8_mask(filled, full) != 0; --p) {
        __m512i code[4];
        __m512i length[4];
        for (int j = 3; j >= 0; --j) {
            const __m512i pair = bytes[j][p / 2];
            const __m512i nibble = _mm512_and_si512(p % 2 == 0 ? pair : _mm512_srli_epi16(pair, 4), low_nibble);
            const __m512i index = either(state, nibble);
            const __m512i step = _mm512_permutex2var_epi8(step_a, index, step_b);
            code[j] = _mm512_permutex2var_epi8(code_a, index, code_b);
            length[j] = _mm512_and_si512(step, low_nibble);
            state = _mm512_andnot_si512(low_nibble, step);
        }
        const auto pair_even = [&](int a, int b) {
            return either(even_8(code[a]), _mm512_sllv_epi16(even_8(code[b]), even_8(length[a])));
        };
        const auto pair_odd = [&](int a, int b) {
            return either(odd_8(code[a]), _mm512_sllv_epi16(odd_8(code[b]), odd_8(length[a])));
        };
        const __m512i upper = _mm512_add_epi8(length[3], length[2]);
        const __m512i lower = _mm512_add_epi8(length[1], length[0]);
        const __m512i pairs[2][3] = {{pair_even(3, 2), pair_even(1, 0), even_8(upper)},
                                     {pair_odd(3, 2), pair_odd(1, 0), odd_8(upper)}};
        __m512i four[4];
        for (int r = 0; r < 2; ++r) {
            const __m512i(&pair)[3] = pairs[r];
            four[r] = either(even_16(pair[0]), _mm512_sllv_epi32(even_16(pair[1]), even_16(pair[2])));
            four[r + 2] = either(odd_16(pair[0]), _mm512_sllv_epi32(odd_16(pair[1]), odd_16(pair[2])));
        }
        append<0, wide>(even_32(four[0]), filled, low, high);
        append<1, wide>(even_32(four[1]), filled, low, high);
        append<2, wide>(even_32(four[2]), filled, low, high);
        append<3, wide>(even_32(four[3]), filled, low, high);
        append<4, wide>(odd_32(four[0]), filled, low, high);
        append<5, wide>(odd_32(four[1]), filled, low, high);
        append<6, wide>(odd_32(four[2]), filled, low, high);
        append<7, wide>(odd_32(four[3]), filled, low, high);
        filled = _mm512_add_epi8(filled, _mm512_add_epi8(upper, lower));
    }
    for (int s = 0; s < 8; ++s) {
        _mm512_store_si512(payloads.low + 8 * s, low[s]);
        _mm512_store_si512(payloads.high + 8 * s, high[s]);
    }
}

template <bool wide>
void decode_bytes(const Payloads& payloads, std::uint32_t budget, Planes& planes) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low_nibble = bytes_of(15);
    const __m512i first_a = load(kBytes.first);
    const __m512i first_b = load(kBytes.first + 64);
    const __m512i later_a = load(kBytes.later);
    const __m512i later_b = load(kBytes.later + 64);
    const __m512i later_mask = load_16(kBytes.later_mask);
    const __m512i later_base = load_16(kBytes.later_base);
    const __m512i ends = load_16(kBytes.end);
    const __m512i last_one = load_16(kBytes.last_one);
    const __m512i full = bytes_of(static_cast<int>(budget));
    __m512i low[8];
    __m512i high[8];
    for (int s = 0; s < 8; ++s) {
        low[s] = load(payloads.low + 8 * s);
        high[s] = wide ? load(payloads.high + 8 * s) : zero;
    }
    __m512i n = zero;
    __m512i used = zero;
    __m512i bytes[4][4] = {};
    for (int p = 7; p >= 0 && _mm512_cmplt_epu8_mask(used, full) != 0; --p) {
        // The next 28 bits at least, of blocks r, r + 4, r + 8 and so on.
        const auto window_of = [](__m512i even, __m512i odd) {
            return _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
        };
        __m512i window[4] = {window_of(from<0, wide>(used, low, high), from<4, wide>(used, low, high)),
                             window_of(from<1, wide>(used, low, high), from<5, wide>(used, low, high)),
                             window_of(from<2, wide>(used, low, high), from<6, wide>(used, low, high)),
                             window_of(from<3, wide>(used, low, high), from<7, wide>(used, low, high))};
        for (int j = 3; j >= 0; --j) {
            __m512i bits = _mm512_mask_blend_epi8(0x2222222222222222, window[0], _mm512_slli_epi32(window[1], 8));
            bits = _mm512_mask_blend_epi8(0x4444444444444444, bits, _mm512_slli_epi32(window[2], 16));
            bits = _mm512_mask_blend_epi8(0x8888888888888888, bits, _mm512_slli_epi32(window[3], 24));

            const __m512i index =
                either(_mm512_and_si512(bits, _mm512_shuffle_epi8(later_mask, n)), _mm512_shuffle_epi8(later_base, n));
            const __m512i later = _mm512_permutex2var_epi8(later_a, index, later_b);
            const __m512i first = _mm512_permutex2var_epi8(first_a, bits, first_b);
            const __m512i found = _mm512_mask_mov_epi8(later, _mm512_testn_epi8_mask(n, n), first);

            const __m512i length = _mm512_and_si512(_mm512_srli_epi16(found, 4), low_nibble);
            used = _mm512_add_epi8(used, length);
            const __m512i moved = _mm512_shuffle_epi8(last_one, _mm512_subs_epu8(used, full));
            const __m512i last = bytes_of(8);
            const __m512i nibble = _mm512_and_si512(found, low_nibble);
            const __m512i mended = _mm512_mask_mov_epi8(nibble, _mm512_test_epi8_mask(found, last),
                                                        either(_mm512_andnot_si512(last, nibble), moved));
            n = _mm512_max_epu8(n, _mm512_shuffle_epi8(ends, nibble));
            bytes[j][p / 2] = p % 2 == 0 ? either(bytes[j][p / 2], mended) : _mm512_slli_epi16(mended, 4);

            const __m512i byte = _mm512_set1_epi32(0xff);
            window[0] = _mm512_srlv_epi32(window[0], _mm512_and_si512(length, byte));
            window[1] = _mm512_srlv_epi32(window[1], _mm512_and_si512(_mm512_srli_epi32(length, 8), byte));
            window[2] = _mm512_srlv_epi32(window[2], _mm512_and_si512(_mm512_srli_epi32(length, 16), byte));
            window[3] = _mm512_srlv_epi32(window[3], _mm512_srli_epi32(length, 24));
        }
    }
    for (int j = 0; j < 4; ++j) {
        join_bytes(bytes[j], planes.words[j]);
    }
}

void encode_planes_avx512(const Planes& planes, std::uint32_t budget, Payloads& payloads) {
    budget <= 64 ? encode_bytes<false>(planes, budget, payloads) : encode_bytes<true>(planes, budget, payloads);
}

void decode_planes_avx512(const Payloads& payloads, std::uint32_t budget, Planes& planes) {
    budget <= 64 ? decode_bytes<false>(payloads, budget, planes) : decode_bytes<true>(payloads, budget, planes);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
