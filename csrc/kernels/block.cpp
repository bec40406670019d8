// Block quantisation (docs/wire-format.md). Rule numbers are those of that page.
#include "kernels/kernels.hpp"
#include "kernels/values.hpp"

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define THINWIRE_AVX512 1
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr float kSmallestMax = 0x1p-112F;
constexpr std::uint32_t kPoison = 0x7fc00000;

// ------------------------------------------------------------------------------------------------ largest value

Largest largest_of(const float* x, std::int64_t numel) {
    std::int32_t magnitude = 0;
    std::int32_t most = INT32_MIN;  // of the bits as integers: the positive values in their order
    for (std::int64_t i = 0; i < numel; ++i) {
        const std::int32_t bits = bits_of(x[i]);
        const std::int32_t absolute = bits & 0x7fffffff;
        magnitude = absolute > magnitude ? absolute : magnitude;
        most = bits > most ? bits : most;
    }
    return {magnitude, most == magnitude};
}

// Rule 2: what stands at the end of the range that has one code more.
float signed_max(const Largest& largest) {
    const float magnitude = value_of(largest.magnitude);
    const float bounded = magnitude < kSmallestMax ? kSmallestMax : magnitude;
    return largest.positive ? bounded : -bounded;
}

bool is_poisoned(const Largest& largest) {
    return largest.magnitude >= 0x7f800000;
}

// ------------------------------------------------------------------------------------------------ rounding

// x * factor rounded to nearest even and bounded. |x * factor| is at most 128, so adding 1.5 * 2^23 leaves the integer
// in the low bits, in two's complement.
void round_values(const float* x, std::int64_t numel, float factor, int levels, std::int8_t* codes) {
    constexpr float kShift = 12582912.0F;
    const auto most = static_cast<float>(levels - 1);
    std::int64_t i = 0;
#ifdef THINWIRE_AVX512
    const __m512 factors = _mm512_set1_ps(factor);
    const __m512 bound = _mm512_set1_ps(most);
    for (; i + 16 <= numel; i += 16) {
        const __m512 scaled = _mm512_min_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), factors), bound);
        const __m128i rounded = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(scaled));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), rounded);
    }
#endif
    for (; i < numel; ++i) {
        const float scaled = x[i] * factor;
        const float bounded = scaled > most ? most : scaled;
        codes[i] = static_cast<std::int8_t>(bits_of(bounded + kShift));
    }
}

std::uint32_t hash_of(std::uint32_t position, std::uint32_t seed) {
    std::uint32_t h = position * 0x9E3779B1U + seed;
    h ^= h >> 16;
    h *= 0x21F0AAADU;
    h ^= h >> 15;
    h *= 0x735A2D97U;
    return h ^ (h >> 15);
}

// Rule 5.
void round_at_random(const float* x, std::int64_t numel, float factor, int levels, std::uint32_t position,
                     std::uint32_t seed, std::int8_t* codes) {
    const auto most = static_cast<float>(levels);
    for (std::int64_t i = 0; i < numel; ++i) {
        const std::uint32_t hash = hash_of(position + static_cast<std::uint32_t>(i), seed);
        const float uniform = static_cast<float>(static_cast<std::int32_t>(hash >> 8)) * 0x1p-24F;
        const float shifted = x[i] * factor + uniform;
        // Truncation, mended below zero, is the floor; both are small.
        const auto truncated = static_cast<float>(static_cast<std::int32_t>(shifted));
        const float lower = truncated > shifted ? truncated - 1.0F : truncated;
        const float bounded = lower > most ? most : (lower < -most ? -most : lower);
        codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(bounded));
    }
}

// ------------------------------------------------------------------------------------------------ search

// Rule 4 for one width: what a threshold makes of each of the 256 eight-bit codes. Indexed by the code's byte.
struct Threshold {
    alignas(64) std::uint8_t error[256];
    alignas(64) std::int8_t code[256];
};

constexpr int kMostThresholds = 64;

struct Search {
    int first;  // the least threshold that the search can reach
    int start;
    int num_distances;
    int distance[3];
    Threshold threshold[kMostThresholds];
};

constexpr int floor_div(int numerator, int denominator) {
    return numerator / denominator - (numerator % denominator < 0 ? 1 : 0);
}

void fill(Search& search, int bits) {
    const int levels = 1 << (bits - 1);
    const int unit = 256 / levels;
    search.start = 13 * unit / 16;
    search.num_distances = 0;
    int reach = 0;
    for (int part = 8; part <= 32; part *= 2) {
        if (unit >= part) {
            search.distance[search.num_distances++] = unit / part;
            reach += unit / part;
        }
    }
    search.first = search.start - reach;
    for (int step = 0; step <= 2 * reach; ++step) {
        const int threshold = search.first + step;
        for (int a = -128; a < 128; ++a) {
            int code = floor_div(4 * a + threshold, 2 * threshold);
            code = code < -levels ? -levels : (code > levels - 1 ? levels - 1 : code);
            int error = 2 * a - code * threshold;
            error = error < 0 ? -error : error;
            const auto at = static_cast<std::uint8_t>(a);
            search.threshold[step].error[at] = static_cast<std::uint8_t>(error > 127 ? 127 : error);
            search.threshold[step].code[at] = static_cast<std::int8_t>(code);
        }
    }
}

struct Searches {
    Search of_bits[4];  // 2 to 5
    Searches() {
        for (int bits = 2; bits <= 5; ++bits) {
            fill(of_bits[bits - 2], bits);
        }
    }
};

const Search& search_of(int bits) {
    static const Searches searches;
    return searches.of_bits[bits - 2];
}

struct Fit {
    std::int32_t num;  // sum of a * code
    std::int32_t den;  // sum of code * code
};

#ifdef THINWIRE_AVX512

// 256-entry tables live in four registers; `a` selects in both halves and its sign bit chooses.
struct Table {
    __m512i part[4];
    explicit Table(const void* memory) {
        for (int i = 0; i < 4; ++i) {
            part[i] = _mm512_load_si512(static_cast<const char*>(memory) + 64 * i);
        }
    }
    __m512i operator[](__m512i a) const {
        const __m512i positive = _mm512_permutex2var_epi8(part[0], a, part[1]);
        const __m512i negative = _mm512_permutex2var_epi8(part[2], a, part[3]);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(a), positive, negative);
    }
};

// `a` is completed with zeros to a multiple of 64.
class Errors {
public:
    Errors(const std::int8_t* a, std::int64_t numel) : a_(a), numel_(numel) {}

    std::int32_t operator()(const Threshold& threshold) const {
        const Table table(threshold.error);
        __m512i sum = _mm512_setzero_si512();
        for (std::int64_t i = 0; i < numel_; i += 64) {
            const __m512i error = table[_mm512_load_si512(a_ + i)];
            sum = _mm512_dpbusd_epi32(sum, error, error);  // errors are at most 127, so either sign will do
        }
        return _mm512_reduce_add_epi32(sum);
    }

    Fit fit(const Threshold& threshold, std::int8_t* codes) const {
        const Table table(threshold.code);
        const __m512i ones = _mm512_set1_epi8(1);
        const __m512i half = _mm512_set1_epi8(-128);
        __m512i product = _mm512_setzero_si512();
        __m512i plain = _mm512_setzero_si512();
        __m512i square = _mm512_setzero_si512();
        for (std::int64_t i = 0; i < numel_; i += 64) {
            const __m512i a = _mm512_load_si512(a_ + i);
            const __m512i code = table[a];
            const __m512i magnitude = _mm512_abs_epi8(code);
            // (a + 128) is unsigned, as the instruction wants it; the 128 are taken off at the end.
            product = _mm512_dpbusd_epi32(product, _mm512_xor_si512(a, half), code);
            plain = _mm512_dpbusd_epi32(plain, ones, code);
            square = _mm512_dpbusd_epi32(square, magnitude, magnitude);
            _mm512_store_si512(codes + i, code);
        }
        return {_mm512_reduce_add_epi32(product) - 128 * _mm512_reduce_add_epi32(plain),
                _mm512_reduce_add_epi32(square)};
    }

private:
    const std::int8_t* a_;
    std::int64_t numel_;
};

#else

// A block has at most 256 different codes, so errors are summed over those: plain loops that every compiler
// vectorises.
class Errors {
public:
    Errors(const std::int8_t* a, std::int64_t numel) : a_(a), numel_(numel) {
        for (std::int64_t i = 0; i < numel; ++i) {
            ++count_[static_cast<std::uint8_t>(a[i])];
        }
    }

    std::int32_t operator()(const Threshold& threshold) const {
        std::int32_t sum = 0;
        for (int at = 0; at < 256; ++at) {
            const auto error = static_cast<std::int16_t>(threshold.error[at]);
            sum += static_cast<std::int32_t>(static_cast<std::int16_t>(error * error)) * count_[at];
        }
        return sum;
    }

    Fit fit(const Threshold& threshold, std::int8_t* codes) const {
        Fit fit = {0, 0};
        for (int at = 0; at < 256; ++at) {
            const std::int32_t code = threshold.code[at];
            fit.num += static_cast<std::int8_t>(at) * code * count_[at];
            fit.den += code * code * count_[at];
        }
        for (std::int64_t i = 0; i < numel_; ++i) {
            codes[i] = threshold.code[static_cast<std::uint8_t>(a_[i])];
        }
        return fit;
    }

private:
    const std::int8_t* a_;
    std::int64_t numel_;
    std::int16_t count_[256] = {};
};

#endif

// Narrow codes of the block whose eight-bit codes are `a`; returns the scale.
float search_codes(const Search& search, const std::int8_t* a, std::int64_t numel, float max, std::int8_t* codes) {
    const Errors errors(a, numel);
    const auto error_at = [&](int threshold) { return errors(search.threshold[threshold - search.first]); };
    int best = search.start;
    std::int32_t least = error_at(best);
    for (int i = 0; i < search.num_distances; ++i) {
        const int below = best - search.distance[i];
        const int above = best + search.distance[i];
        const std::int32_t error_below = error_at(below);
        const std::int32_t error_above = error_at(above);
        if (error_below < least) {
            least = error_below;
            best = below;
        }
        if (error_above < least) {
            least = error_above;
            best = above;
        }
    }
    const Fit fit = errors.fit(search.threshold[best - search.first], codes);
    if (fit.den == 0) {
        return 0.0F;
    }
    return (max * (-1.0F / 128)) * (static_cast<float>(fit.num) / static_cast<float>(fit.den));
}

#ifdef THINWIRE_AVX512

// Four blocks of a multiple of 64 values side by side. Each step of a search waits for the one before; with four of
// them under way, the processor has something to do meanwhile, and one tree of additions serves four sums.
class FourBlocks {
public:
    FourBlocks(const Search& search, const std::int8_t* a, std::int64_t block)
        : search_(search), a_(a), block_(block) {}

    // Codes and scales of the blocks, as search_codes has them.
    void operator()(const float* max, std::int8_t* codes, float* scales) const {
        __m128i best = _mm_set1_epi32(search_.start);
        __m128i least = errors(best);
        for (int i = 0; i < search_.num_distances; ++i) {
            const __m128i distance = _mm_set1_epi32(search_.distance[i]);
            const __m128i below = _mm_sub_epi32(best, distance);
            const __m128i above = _mm_add_epi32(best, distance);
            take_better(below, errors(below), best, least);
            take_better(above, errors(above), best, least);
        }
        fit(best, max, codes, scales);
    }

private:
    const Search& search_;
    const std::int8_t* a_;
    std::int64_t block_;

    static void take_better(__m128i tried, __m128i error, __m128i& best, __m128i& least) {
        const __mmask8 better = _mm_cmplt_epi32_mask(error, least);
        best = _mm_mask_mov_epi32(best, better, tried);
        least = _mm_mask_mov_epi32(least, better, error);
    }

    // The sums of four registers' 32-bit lanes.
    static __m128i sums(const __m512i* lanes) {
        const __m512i first =
            _mm512_add_epi32(_mm512_unpacklo_epi32(lanes[0], lanes[1]), _mm512_unpackhi_epi32(lanes[0], lanes[1]));
        const __m512i second =
            _mm512_add_epi32(_mm512_unpacklo_epi32(lanes[2], lanes[3]), _mm512_unpackhi_epi32(lanes[2], lanes[3]));
        const __m512i all =
            _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
        const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    }

    const Threshold& threshold(const std::int32_t* thresholds, int row) const {
        return search_.threshold[thresholds[row] - search_.first];
    }

    __m128i errors(__m128i thresholds) const {
        alignas(16) std::int32_t threshold_of[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(threshold_of), thresholds);
        __m512i sum[4];
        for (int row = 0; row < 4; ++row) {
            const Table table(threshold(threshold_of, row).error);
            const std::int8_t* a = a_ + row * block_;
            // Two sums of their own, so that one addition need not wait for the other.
            __m512i even = _mm512_setzero_si512();
            __m512i odd = _mm512_setzero_si512();
            std::int64_t i = 0;
            for (; i + 256 <= block_; i += 256) {
                const __m512i error_0 = table[_mm512_load_si512(a + i)];
                const __m512i error_1 = table[_mm512_load_si512(a + i + 64)];
                const __m512i error_2 = table[_mm512_load_si512(a + i + 128)];
                const __m512i error_3 = table[_mm512_load_si512(a + i + 192)];
                even = _mm512_dpbusd_epi32(even, error_0, error_0);
                odd = _mm512_dpbusd_epi32(odd, error_1, error_1);
                even = _mm512_dpbusd_epi32(even, error_2, error_2);
                odd = _mm512_dpbusd_epi32(odd, error_3, error_3);
            }
            for (; i < block_; i += 64) {
                const __m512i error = table[_mm512_load_si512(a + i)];
                even = _mm512_dpbusd_epi32(even, error, error);
            }
            sum[row] = _mm512_add_epi32(even, odd);
        }
        return sums(sum);
    }

    void fit(__m128i thresholds, const float* max, std::int8_t* codes, float* scales) const {
        alignas(16) std::int32_t threshold_of[4];
        _mm_store_si128(reinterpret_cast<__m128i*>(threshold_of), thresholds);
        const __m512i ones = _mm512_set1_epi8(1);
        const __m512i sign = _mm512_set1_epi8(-128);
        __m512i product[4];
        __m512i plain[4];
        __m512i square[4];
        for (int row = 0; row < 4; ++row) {
            const Table table(threshold(threshold_of, row).code);
            product[row] = plain[row] = square[row] = _mm512_setzero_si512();
            for (std::int64_t i = 0; i < block_; i += 64) {
                const __m512i a = _mm512_load_si512(a_ + row * block_ + i);
                const __m512i code = table[a];
                const __m512i magnitude = _mm512_abs_epi8(code);
                product[row] = _mm512_dpbusd_epi32(product[row], _mm512_xor_si512(a, sign), code);
                plain[row] = _mm512_dpbusd_epi32(plain[row], ones, code);
                square[row] = _mm512_dpbusd_epi32(square[row], magnitude, magnitude);
                _mm512_store_si512(codes + row * block_ + i, code);
            }
        }
        const __m128i num = _mm_sub_epi32(sums(product), _mm_slli_epi32(sums(plain), 7));
        const __m128i den = sums(square);
        const __m128 unit = _mm_mul_ps(_mm_loadu_ps(max), _mm_set1_ps(-1.0F / 128));
        const __m128 scale = _mm_mul_ps(unit, _mm_div_ps(_mm_cvtepi32_ps(num), _mm_cvtepi32_ps(den)));
        _mm_storeu_ps(scales, _mm_maskz_mov_ps(_mm_test_epi32_mask(den, den), scale));
    }
};

#endif

// ------------------------------------------------------------------------------------------------ packing

void pack_codes(const std::int8_t* codes, std::int64_t numel, int bits, std::uint8_t* out) {
    if (bits == 8) {
        for (std::int64_t i = 0; i < numel; ++i) {
            out[i] = static_cast<std::uint8_t>(codes[i]);
        }
        return;
    }
    std::int64_t done = 0;
    if (bits == 4) {
#ifdef THINWIRE_AVX512
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i weights = _mm512_set1_epi16(0x1001);  // 1 for the even values, 16 for the odd ones
        for (; done + 64 <= numel; done += 64) {
            const __m512i code = _mm512_and_si512(_mm512_loadu_si512(codes + done), nibble);
            const __m256i pairs = _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(code, weights));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + done / 2), pairs);
        }
#endif
        for (; done + 2 <= numel; done += 2) {
            out[done / 2] = static_cast<std::uint8_t>((codes[done] & 15) | (codes[done + 1] << 4));
        }
    }
    const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
    for (; done < numel; done += 8) {  // eight values fill a whole number of bytes
        const std::int64_t count = numel - done < 8 ? numel - done : 8;
        std::uint64_t group = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            group |= (static_cast<std::uint64_t>(codes[done + i]) & mask) << (bits * i);
        }
        const std::int64_t nbytes = (count * bits + 7) / 8;
        for (std::int64_t i = 0; i < nbytes; ++i) {
            out[done * bits / 8 + i] = static_cast<std::uint8_t>(group >> (8 * i));
        }
    }
}

void unpack_codes(const std::uint8_t* in, std::int64_t numel, int bits, std::int8_t* codes) {
    if (bits == 4) {
        std::int64_t done = 0;
#ifdef THINWIRE_AVX512
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i extended =
            _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1));
        for (; done + 64 <= numel; done += 64) {
            const __m512i pairs =
                _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + done / 2)));
            const __m512i split = _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16(pairs, 4)), nibble);
            _mm512_storeu_si512(codes + done, _mm512_shuffle_epi8(extended, split));
        }
#endif
        for (; done + 2 <= numel; done += 2) {
            const auto pair = static_cast<std::int8_t>(in[done / 2]);
            codes[done] = static_cast<std::int8_t>(static_cast<std::int8_t>(pair << 4) >> 4);
            codes[done + 1] = static_cast<std::int8_t>(pair >> 4);
        }
        if (done < numel) {
            codes[done] = static_cast<std::int8_t>(static_cast<std::int8_t>(in[done / 2] << 4) >> 4);
        }
        return;
    }
    const int shift = 64 - bits;
    for (std::int64_t done = 0; done < numel; done += 8) {
        const std::int64_t count = numel - done < 8 ? numel - done : 8;
        const std::int64_t nbytes = (count * bits + 7) / 8;
        std::uint64_t group = 0;
        for (std::int64_t i = 0; i < nbytes; ++i) {
            group |= static_cast<std::uint64_t>(in[done * bits / 8 + i]) << (8 * i);
        }
        for (std::int64_t i = 0; i < count; ++i) {
            const auto high = static_cast<std::int64_t>((group >> (bits * i)) << shift);
            codes[done + i] = static_cast<std::int8_t>(high >> shift);
        }
    }
}

// ------------------------------------------------------------------------------------------------ rotation

float sign_of(std::uint32_t position) {
    return ((position * 0x9E3779B1U + 0x7F4A7C15U) >> 31) != 0 ? -1.0F : 1.0F;
}

// Unnormalised Walsh-Hadamard transform in place. The order of the butterflies is part of the format.
void transform(float* x, std::int64_t block) {
    using Vector = float __attribute__((vector_size(64)));
    using Bits = std::int32_t __attribute__((vector_size(64)));
    constexpr std::int32_t kSign = INT32_MIN;
    std::int64_t distance = 1;
    if (block >= 16) {
        // Within a vector: every lane takes its partner, the upper lane of a pair with its own sign changed.
        constexpr Bits kPartner[4] = {{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14},
                                      {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13},
                                      {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11},
                                      {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}};
        constexpr Bits kUpper[4] = {{0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign, 0, kSign},
                                    {0, 0, kSign, kSign, 0, 0, kSign, kSign, 0, 0, kSign, kSign, 0, 0, kSign, kSign},
                                    {0, 0, 0, 0, kSign, kSign, kSign, kSign, 0, 0, 0, 0, kSign, kSign, kSign, kSign},
                                    {0, 0, 0, 0, 0, 0, 0, 0, kSign, kSign, kSign, kSign, kSign, kSign, kSign, kSign}};
        for (std::int64_t i = 0; i < block; i += 16) {
            Vector value;
            __builtin_memcpy(&value, x + i, sizeof value);
            for (int stage = 0; stage < 4; ++stage) {
                const Vector partner = __builtin_shuffle(value, kPartner[stage]);
                value = partner + reinterpret_cast<Vector>(reinterpret_cast<Bits>(value) ^ kUpper[stage]);
            }
            __builtin_memcpy(x + i, &value, sizeof value);
        }
        distance = 16;
    }
    for (; distance < block; distance *= 2) {
        for (std::int64_t pair = 0; pair < block; pair += 2 * distance) {
            float* __restrict upper = x + pair;
            float* __restrict lower = x + pair + distance;
            for (std::int64_t i = 0; i < distance; ++i) {
                const float sum = upper[i] + lower[i];
                lower[i] = upper[i] - lower[i];
                upper[i] = sum;
            }
        }
    }
}

void rotate(const float* x, std::int64_t block, float* rotated) {
    const float factor = 1.0F / static_cast<float>(block);
    for (std::int64_t i = 0; i < block; ++i) {
        rotated[i] = x[i] * factor * sign_of(static_cast<std::uint32_t>(i));
    }
    transform(rotated, block);
}

// ------------------------------------------------------------------------------------------------ a block

// The codes of values whose largest is known. Returns the scale.
float quantize(const float* x, std::int64_t numel, const BlockFormat& format, const Largest& largest,
               std::int64_t position, std::uint32_t seed, std::int8_t* codes) {
    if (format.stochastic) {
        const int levels = (1 << (format.bits - 1)) - 1;
        const float magnitude = value_of(largest.magnitude);
        const float bounded = magnitude < kSmallestMax ? kSmallestMax : magnitude;
        round_at_random(x, numel, static_cast<float>(levels) / bounded, levels, static_cast<std::uint32_t>(position),
                        seed, codes);
        return bounded / static_cast<float>(levels);
    }
    const float max = signed_max(largest);
    const int levels = 1 << (format.bits - 1);
    round_values(x, numel, static_cast<float>(-levels) / max, levels, codes);
    return max * (-1.0F / static_cast<float>(levels));
}

struct Block {
    const float* x;  // rotated, if the format says so
    Largest largest;
    bool poisoned;
};

// `widened` has room for the block.
Block load_block(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, float* widened) {
    const float* values = load_values(x, numel, dtype, widened);
    const Largest largest = largest_of(values, numel);
    if (is_poisoned(largest) || !format.hadamard || numel != format.block) {
        return {values, largest, is_poisoned(largest)};
    }
    rotate(values, numel, widened);
    return {widened, largest_of(widened, numel), false};
}

float encode_block(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, std::int64_t position,
                   std::uint32_t seed, std::uint8_t* out) {
    alignas(64) float widened[kMostBlock];
    alignas(64) std::int8_t codes[kMostBlock];
    const Block block = load_block(x, dtype, numel, format, widened);
    if (block.poisoned || block.largest.magnitude == 0) {
        zero(out, (numel * format.bits + 7) / 8);
        return block.poisoned ? value_of(kPoison) : 0.0F;
    }
    if (format.bits == 8) {  // codes of eight bits are the bytes of the wire
        return quantize(block.x, numel, format, block.largest, position, seed, reinterpret_cast<std::int8_t*>(out));
    }
    const float scale = quantize(block.x, numel, format, block.largest, position, seed, codes);
    pack_codes(codes, numel, format.bits, out);
    return scale;
}

// Up to four blocks whose scales are searched for; only the last may be shorter.
void encode_searched(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, std::uint8_t* out,
                     char* scales) {
    alignas(64) float widened[kMostBlock];
    alignas(64) std::int8_t a[4 * kMostBlock];
    alignas(64) std::int8_t codes[4 * kMostBlock];
    const Search& search = search_of(format.bits);
    const std::int64_t row = (format.block + 63) / 64 * 64;
    float max[4];
    float scale[4];
    bool poisoned[4];
    int num_blocks = 0;
    for (std::int64_t at = 0; at < numel; at += format.block, ++num_blocks) {
        const std::int64_t count = numel - at < format.block ? numel - at : format.block;
        const Block block = load_block(offset(x, dtype, at), dtype, count, format, widened);
        const bool rounds = !block.poisoned && block.largest.magnitude != 0;
        std::int8_t* codes_of_8 = a + num_blocks * row;
        poisoned[num_blocks] = block.poisoned;
        max[num_blocks] = signed_max(block.largest);
        if (rounds) {
            round_values(block.x, count, -128.0F / max[num_blocks], 128, codes_of_8);
        }
        zero(codes_of_8 + (rounds ? count : 0), row - (rounds ? count : 0));
    }
#ifdef THINWIRE_AVX512
    const bool together = num_blocks == 4 && row == format.block;
    if (together) {
        FourBlocks(search, a, row)(max, codes, scale);
    }
#else
    const bool together = false;
#endif
    for (int i = 0; i < num_blocks; ++i) {
        const std::int64_t at = i * format.block;
        const std::int64_t count = numel - at < format.block ? numel - at : format.block;
        if (!together) {
            scale[i] = search_codes(search, a + i * row, row, max[i], codes + i * row);
        }
        pack_codes(codes + i * row, count, format.bits, out + at * format.bits / 8);
        const float written = poisoned[i] ? value_of(kPoison) : scale[i];
        copy(scales + 4 * i, &written, sizeof written);
    }
}

template <bool kAdd>
void scale_codes(const std::int8_t* codes, std::int64_t numel, float scale, float* out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        const float value = static_cast<float>(codes[i]) * scale;
        out[i] = kAdd ? out[i] + value : value;
    }
}

void scale_codes_to_bf16(const std::int8_t* codes, std::int64_t numel, float scale, std::uint16_t* out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        out[i] = bf16_of(static_cast<float>(codes[i]) * scale);
    }
}

void decode_rotated(const std::int8_t* codes, std::int64_t block, float scale, float* out) {
    for (std::int64_t i = 0; i < block; ++i) {
        out[i] = static_cast<float>(codes[i]);
    }
    transform(out, block);
    for (std::int64_t i = 0; i < block; ++i) {
        out[i] = out[i] * sign_of(static_cast<std::uint32_t>(i)) * scale;
    }
}

void decode_values(const std::uint8_t* in, std::int64_t numel, const BlockFormat& format, float scale, void* out,
                   DType dtype, bool add) {
    alignas(64) std::int8_t unpacked[kMostBlock];
    alignas(64) float values[kMostBlock];
    const std::int8_t* codes = unpacked;
    if (format.bits == 8) {
        codes = reinterpret_cast<const std::int8_t*>(in);
    } else {
        unpack_codes(in, numel, format.bits, unpacked);
    }
    if (format.hadamard && numel == format.block) {
        decode_rotated(codes, numel, scale, values);
        store_values(values, numel, out, dtype, add);
    } else if (dtype == DType::float32 && is_aligned<float>(out)) {
        if (add) {
            scale_codes<true>(codes, numel, scale, static_cast<float*>(out));
        } else {
            scale_codes<false>(codes, numel, scale, static_cast<float*>(out));
        }
    } else if (dtype == DType::bfloat16 && is_aligned<std::uint16_t>(out)) {
        scale_codes_to_bf16(codes, numel, scale, static_cast<std::uint16_t*>(out));
    } else {
        scale_codes<false>(codes, numel, scale, values);
        store_values(values, numel, out, dtype, add);
    }
}

}  // namespace

// ------------------------------------------------------------------------------------------------ the kernels

void block_encode(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, std::int64_t position,
                  std::uint32_t seed, void* codes, void* scales) {
    auto* out = static_cast<std::uint8_t*>(codes);
    auto* scale_at = static_cast<char*>(scales);
    const std::int64_t step = format.search ? 4 * format.block : format.block;
    for (std::int64_t at = 0; at < numel; at += step) {
        const std::int64_t count = numel - at < step ? numel - at : step;
        const void* values = offset(x, dtype, at);
        std::uint8_t* to = out + at * format.bits / 8;
        if (format.search) {
            encode_searched(values, dtype, count, format, to, scale_at + at / format.block * 4);
        } else {
            const float scale = encode_block(values, dtype, count, format, position + at, seed, to);
            copy(scale_at + at / format.block * 4, &scale, sizeof scale);
        }
    }
}

void block_decode(const void* codes, const void* scales, std::int64_t numel, const BlockFormat& format, void* out,
                  DType dtype, bool add) {
    const auto* in = static_cast<const std::uint8_t*>(codes);
    for (std::int64_t at = 0; at < numel; at += format.block) {
        const std::int64_t count = numel - at < format.block ? numel - at : format.block;
        float scale;
        copy(&scale, static_cast<const char*>(scales) + at / format.block * 4, sizeof scale);
        decode_values(in + at * format.bits / 8, count, format, scale, offset(out, dtype, at), dtype, add);
    }
}

Largest block_largest(const void* x, DType dtype, std::int64_t numel) {
    alignas(64) float widened[kMostBlock];
    Largest largest = {0, false};
    for (std::int64_t at = 0; at < numel; at += kMostBlock) {
        const std::int64_t count = numel - at < kMostBlock ? numel - at : kMostBlock;
        const Largest part = largest_of(load_values(offset(x, dtype, at), count, dtype, widened), count);
        if (part.magnitude > largest.magnitude) {
            largest = part;
        } else if (part.magnitude == largest.magnitude) {
            largest.positive |= part.positive;
        }
    }
    return largest;
}

float block_encode_part(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format,
                        const Largest& largest, std::int64_t position, std::uint32_t seed, void* codes) {
    auto* out = static_cast<std::uint8_t*>(codes);
    if (is_poisoned(largest) || largest.magnitude == 0) {
        zero(out, (numel * format.bits + 7) / 8);
        return is_poisoned(largest) ? value_of(kPoison) : 0.0F;
    }
    alignas(64) float widened[kMostBlock];
    alignas(64) std::int8_t rounded[kMostBlock];
    float scale = 0.0F;
    for (std::int64_t at = 0; at < numel; at += kMostBlock) {
        const std::int64_t count = numel - at < kMostBlock ? numel - at : kMostBlock;
        const float* values = load_values(offset(x, dtype, at), count, dtype, widened);
        scale = quantize(values, count, format, largest, position + at, seed, rounded);
        pack_codes(rounded, count, format.bits, out + at * format.bits / 8);
    }
    return scale;
}

}  // namespace thinwire::THINWIRE_TARGET
