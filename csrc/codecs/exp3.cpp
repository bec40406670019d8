// exp3 of bf16 values (docs/wire-format.md): blocks of 512, exponents as three bits below the block's base, and those
// that do not fit, the escapes, as they are.
#include "kernels/kernels.hpp"

namespace thinwire {

// The parts of a message from some block of 512 values on. Byte is char or const char.
template <class Byte>
struct Exp3Parts {
    Byte* bases;    // one byte for each block
    Byte* counts;   // two
    Byte* planes;   // 192
    Byte* rest;     // a byte for each value
    Byte* escapes;  // a byte for each escape
};

// `x` begins a block.
struct Exp3Kernels {
    std::int64_t (*count)(const void* x, std::int64_t numel);  // escapes
    // Returns the number of escapes, or -1 if there are more than `room`.
    std::int64_t (*encode)(const void* x, std::int64_t numel, const Exp3Parts<char>& parts, std::int64_t room);
    std::int64_t (*announced)(const void* counts, std::int64_t blocks);  // escapes
    // Reads as many escapes as the counts announce. Returns whether each block marks as many as it announces.
    bool (*decode)(const Exp3Parts<const char>& parts, std::int64_t numel, void* out);
};

}  // namespace thinwire

#ifdef THINWIRE_TARGET  // the loops, once for each instruction set

#include "kernels/masks.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kBlock = 512;
constexpr int kMasks = kBlock / 64;  // a bit for each value of a block
constexpr int kPlanes = 3 * kBlock / 8;
constexpr int kBases = 4;  // tried below a block's largest exponent
constexpr std::uint8_t kEscape = 7;

struct Bytes {
    alignas(64) std::uint8_t at[kBlock];
};

struct Base {
    std::uint8_t exponent;
    int escapes;
};

std::uint64_t load_mask(const char* from) {
    std::uint64_t mask;
    __builtin_memcpy(&mask, from, sizeof mask);
    return mask;
}

void store_mask(char* to, std::uint64_t mask) {
    __builtin_memcpy(to, &mask, sizeof mask);
}

std::uint64_t marks(const char* planes, int i) {
    return load_mask(planes + 8 * i) & load_mask(planes + 64 + 8 * i) & load_mask(planes + 128 + 8 * i);
}

#if defined(__AVX512VBMI2__)

struct Shuffles {
    alignas(64) std::uint8_t even[64];      // bytes 0, 2, ... of two vectors
    alignas(64) std::uint8_t odd[64];       // bytes 1, 3, ... of two vectors
    alignas(64) std::uint8_t twice[2][64];  // the lower and the upper half of a vector, each byte twice

    constexpr Shuffles() : even(), odd(), twice() {
        for (int i = 0; i < 64; ++i) {
            even[i] = static_cast<std::uint8_t>(2 * i);
            odd[i] = static_cast<std::uint8_t>(2 * i + 1);
            twice[0][i] = static_cast<std::uint8_t>(i / 2);
            twice[1][i] = static_cast<std::uint8_t>(32 + i / 2);
        }
    }
};

constexpr Shuffles kShuffles;

__m512i bytes(std::uint8_t value) {
    return _mm512_set1_epi8(static_cast<char>(value));
}

// Values to exponents, and with `rest` to signs and mantissas. Returns the largest exponent.
template <bool with_rest>
std::uint8_t split(const char* x, Bytes& exponents, char* rest) {
    constexpr int kSelect = 0xd8;  // the second operand where the third has ones, otherwise the first
    const __m512i even = _mm512_load_si512(kShuffles.even);
    const __m512i odd = _mm512_load_si512(kShuffles.odd);
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < kBlock; i += 64) {
        const __m512i a = _mm512_loadu_si512(x + 2 * i);
        const __m512i b = _mm512_loadu_si512(x + 2 * i + 64);
        const __m512i e = _mm512_permutex2var_epi8(_mm512_srli_epi16(a, 7), even, _mm512_srli_epi16(b, 7));
        _mm512_store_si512(exponents.at + i, e);
        largest = _mm512_max_epu8(largest, e);
        if constexpr (with_rest) {
            const __m512i lower = _mm512_permutex2var_epi8(a, even, b);
            const __m512i upper = _mm512_permutex2var_epi8(a, odd, b);
            _mm512_storeu_si512(rest + i, _mm512_ternarylogic_epi64(lower, upper, bytes(0x80), kSelect));
        }
    }
    const __m256i half = _mm256_max_epu8(_mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1));
    const __m128i quarter = _mm_max_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    // There is a minimum across words only: of complements, once both bytes of a word are the same.
    const __m128i complement = _mm_xor_si128(quarter, _mm_set1_epi8(-1));
    const __m128i least = _mm_minpos_epu16(_mm_min_epu8(complement, _mm_srli_epi16(complement, 8)));
    return static_cast<std::uint8_t>(~_mm_cvtsi128_si32(least));
}

// For each base that is tried, how many exponents are not among the seven that it serves.
void count_escapes(const Bytes& exponents, std::uint8_t largest, int (&escapes)[kBases]) {
    int served[kBases] = {};
    for (int i = 0; i < kBlock; i += 64) {
        const __m512i offsets = _mm512_sub_epi8(bytes(largest), _mm512_load_si512(exponents.at + i));
        for (std::uint8_t k = 0; k < kBases; ++k) {
            const __mmask64 serves = _mm512_cmplt_epu8_mask(_mm512_sub_epi8(offsets, bytes(k)), bytes(kEscape));
            served[k] += popcount(serves);
        }
    }
    for (int k = 0; k < kBases; ++k) {
        escapes[k] = kBlock - served[k];
    }
}

// Bit planes of the codes, and the escapes to `escapes`, where more may be written than they are.
void encode_block(const Bytes& exponents, std::uint8_t base, char* planes, std::uint8_t* escapes) {
    for (int i = 0; i < kMasks; ++i) {
        const __m512i e = _mm512_load_si512(exponents.at + 64 * i);
        const __m512i codes = _mm512_min_epu8(_mm512_sub_epi8(bytes(base), e), bytes(kEscape));
        const __mmask64 low = _mm512_test_epi8_mask(codes, bytes(1));
        const __mmask64 middle = _mm512_test_epi8_mask(codes, bytes(2));
        const __mmask64 high = _mm512_test_epi8_mask(codes, bytes(4));
        store_mask(planes + 8 * i, low);
        store_mask(planes + 64 + 8 * i, middle);
        store_mask(planes + 128 + 8 * i, high);
        const __mmask64 escaped = low & middle & high;
        // Compressing to a register and storing all of it is several times as fast as compressing to memory.
        _mm512_storeu_si512(escapes, _mm512_maskz_compress_epi8(escaped, e));
        escapes += popcount(escaped);
    }
}

void decode_block(std::uint8_t base, const char* planes, const std::uint64_t (&escaped)[kMasks], const char* rest,
                  const char* escapes, char* out) {
    constexpr int kOrSelected = 0xf8;  // the first operand or what the third selects of the second
    for (int i = 0; i < kMasks; ++i) {
        __m512i e = bytes(base);
        e = _mm512_mask_sub_epi8(e, load_mask(planes + 8 * i), e, bytes(1));
        e = _mm512_mask_sub_epi8(e, load_mask(planes + 64 + 8 * i), e, bytes(2));
        e = _mm512_mask_sub_epi8(e, load_mask(planes + 128 + 8 * i), e, bytes(4));
        // A load of no more than what is there.
        const int count = popcount(escaped[i]);
        const __m512i next =
            _mm512_maskz_loadu_epi8(_bzhi_u64(~std::uint64_t{0}, static_cast<unsigned>(count)), escapes);
        e = _mm512_mask_expand_epi8(e, escaped[i], next);
        escapes += count;
        const __m512i r = _mm512_loadu_si512(rest + 64 * i);
        for (int half = 0; half < 2; ++half) {
            const __m512i twice = _mm512_load_si512(kShuffles.twice[half]);
            const __m512i exponent = _mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaa, twice, e);
            _mm512_storeu_si512(
                out + 128 * i + 64 * half,
                _mm512_ternarylogic_epi64(_mm512_srli_epi16(exponent, 1), _mm512_permutexvar_epi8(twice, r),
                                          _mm512_set1_epi16(static_cast<short>(0x807f)), kOrSelected));
        }
    }
}

#else

#if defined(__AVX2__) && !defined(__AVX512BW__)  // where compilers do as well by themselves

// Bytes of words below 256: of `a`, then of `b`.
__m256i bytes_of(__m256i a, __m256i b) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8);
}

template <bool with_rest>
std::uint8_t split(const char* x, Bytes& exponents, char* rest) {
    const __m256i byte = _mm256_set1_epi16(0xff);
    const __m256i sign = _mm256_set1_epi16(0x80);
    const __m256i mantissa = _mm256_set1_epi16(0x7f);
    const auto rest_of = [&](__m256i words) {
        return _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(words, 8), sign), _mm256_and_si256(words, mantissa));
    };
    __m256i largest = _mm256_setzero_si256();
    for (int i = 0; i < kBlock; i += 32) {
        const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * i));
        const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * i + 32));
        const __m256i e =
            bytes_of(_mm256_and_si256(_mm256_srli_epi16(a, 7), byte), _mm256_and_si256(_mm256_srli_epi16(b, 7), byte));
        _mm256_store_si256(reinterpret_cast<__m256i*>(exponents.at + i), e);
        largest = _mm256_max_epu8(largest, e);
        if constexpr (with_rest) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest + i), bytes_of(rest_of(a), rest_of(b)));
        }
    }
    alignas(32) std::uint8_t lanes[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    std::uint8_t most = 0;
    for (const std::uint8_t lane : lanes) {
        most = lane > most ? lane : most;
    }
    return most;
}

#else

template <bool with_rest>
std::uint8_t split(const char* x, Bytes& exponents, char* rest) {
    alignas(64) std::uint16_t bits[kBlock];
    __builtin_memcpy(bits, x, sizeof bits);
    std::uint8_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
        const auto e = static_cast<std::uint8_t>(bits[i] >> 7);
        exponents.at[i] = e;
        largest = e > largest ? e : largest;
    }
    if constexpr (with_rest) {
        for (int i = 0; i < kBlock; ++i) {
            rest[i] = static_cast<char>((bits[i] >> 8 & 0x80) | (bits[i] & 0x7f));
        }
    }
    return largest;
}

#endif

void count_escapes(const Bytes& exponents, std::uint8_t largest, int (&escapes)[kBases]) {
    for (int k = 0; k < kBases; ++k) {
        const auto base = static_cast<std::uint8_t>(largest - k);
        int total = 0;
        for (int i = 0; i < kBlock; i += 128) {
            std::uint8_t count = 0;  // of so many at once, because a vector has most of such small counters
            for (int j = 0; j < 128; ++j) {
                const auto offset = static_cast<std::uint8_t>(base - exponents.at[i + j]);
                count = static_cast<std::uint8_t>(count + (offset >= kEscape));
            }
            total += count;
        }
        escapes[k] = total;
    }
}

// The lowest bit of each of 64 bytes.
std::uint64_t plane(const std::uint8_t* codes, int bit) {
    std::uint64_t mask = 0;
#if defined(__AVX2__)
    for (int i = 0; i < 64; i += 32) {
        const __m256i part = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i));
        const int bits = _mm256_movemask_epi8(_mm256_slli_epi16(part, 7 - bit));
        mask |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(bits)) << i;
    }
#elif defined(__SSE2__)
    for (int i = 0; i < 64; i += 16) {
        const __m128i part = _mm_load_si128(reinterpret_cast<const __m128i*>(codes + i));
        const int bits = _mm_movemask_epi8(_mm_slli_epi16(part, 7 - bit));
        mask |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(bits)) << i;
    }
#else
    for (int i = 0; i < 64; i += 8) {
        std::uint64_t part;
        __builtin_memcpy(&part, codes + i, sizeof part);
        mask |= (part >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56 << i;
    }
#endif
    return mask;
}

void encode_block(const Bytes& exponents, std::uint8_t base, char* planes, std::uint8_t* escapes) {
    Bytes codes;
    for (int i = 0; i < kBlock; ++i) {
        const auto offset = static_cast<std::uint8_t>(base - exponents.at[i]);
        codes.at[i] = offset < kEscape ? offset : kEscape;
    }
    for (int i = 0; i < kMasks; ++i) {
        for (int bit = 0; bit < 3; ++bit) {
            store_mask(planes + 64 * bit + 8 * i, plane(codes.at + 64 * i, bit));
        }
        for (std::uint64_t escaped = marks(planes, i); escaped != 0; escaped &= escaped - 1) {
            *escapes++ = exponents.at[64 * i + __builtin_ctzll(escaped)];
        }
    }
}

#if defined(__AVX2__)

// A byte for each of 32 bits: all ones where the bit is set.
__m256i spread(const char* bits) {
    std::int32_t mask;
    __builtin_memcpy(&mask, bits, sizeof mask);
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201U));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(mask), byte_of);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit_of), bit_of);
}

void subtract_codes(std::uint8_t base, const char* planes, Bytes& exponents) {
    for (int i = 0; i < kBlock; i += 32) {
        const __m256i high = spread(planes + 128 + i / 8);
        const __m256i upper = _mm256_add_epi8(_mm256_add_epi8(high, high), spread(planes + 64 + i / 8));
        const __m256i all = _mm256_add_epi8(_mm256_add_epi8(upper, upper), spread(planes + i / 8));
        _mm256_store_si256(reinterpret_cast<__m256i*>(exponents.at + i),
                           _mm256_add_epi8(_mm256_set1_epi8(static_cast<char>(base)), all));
    }
}

#elif defined(__SSSE3__)

// A byte for each of 16 bits: all ones where the bit is set.
__m128i spread(const char* bits) {
    std::uint16_t mask;
    __builtin_memcpy(&mask, bits, sizeof mask);
    const __m128i byte_of = _mm_set_epi64x(0x0101010101010101, 0);
    const __m128i bit_of = _mm_set1_epi64x(static_cast<long long>(0x8040201008040201U));
    const __m128i bytes = _mm_shuffle_epi8(_mm_cvtsi32_si128(mask), byte_of);
    return _mm_cmpeq_epi8(_mm_and_si128(bytes, bit_of), bit_of);
}

void subtract_codes(std::uint8_t base, const char* planes, Bytes& exponents) {
    for (int i = 0; i < kBlock; i += 16) {
        const __m128i high = spread(planes + 128 + i / 8);
        const __m128i upper = _mm_add_epi8(_mm_add_epi8(high, high), spread(planes + 64 + i / 8));
        const __m128i all = _mm_add_epi8(_mm_add_epi8(upper, upper), spread(planes + i / 8));
        _mm_store_si128(reinterpret_cast<__m128i*>(exponents.at + i),
                        _mm_add_epi8(_mm_set1_epi8(static_cast<char>(base)), all));
    }
}

#else

// By a byte of a plane: its bits, one a byte.
struct Spread {
    std::uint64_t bits[256];

    constexpr Spread() : bits() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int bit = 0; bit < 8; ++bit) {
                bits[byte] |= static_cast<std::uint64_t>(byte >> bit & 1) << 8 * bit;
            }
        }
    }
};

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
constexpr Spread kSpread;

void subtract_codes(std::uint8_t base, const char* planes, Bytes& exponents) {
    const auto spread = [&](int i) { return kSpread.bits[static_cast<std::uint8_t>(planes[i])]; };
    for (int i = 0; i < kBlock / 8; ++i) {
        const std::uint64_t codes = spread(i) | spread(64 + i) << 1 | spread(128 + i) << 2;
        __builtin_memcpy(exponents.at + 8 * i, &codes, sizeof codes);
    }
    for (std::uint8_t& exponent : exponents.at) {
        exponent = static_cast<std::uint8_t>(base - exponent);
    }
}

#endif

void decode_block(std::uint8_t base, const char* planes, const std::uint64_t (&escaped)[kMasks], const char* rest,
                  const char* escapes, char* out) {
    Bytes exponents;
    subtract_codes(base, planes, exponents);
    for (int i = 0; i < kMasks; ++i) {
        for (std::uint64_t left = escaped[i]; left != 0; left &= left - 1) {
            exponents.at[64 * i + __builtin_ctzll(left)] = static_cast<std::uint8_t>(*escapes++);
        }
    }
    alignas(64) std::uint16_t bits[kBlock];
    for (int i = 0; i < kBlock; ++i) {
        const auto r = static_cast<std::uint8_t>(rest[i]);
        bits[i] = static_cast<std::uint16_t>((r & 0x80) << 8 | exponents.at[i] << 7 | (r & 0x7f));
    }
    __builtin_memcpy(out, bits, sizeof bits);
}

#endif

// The base with the fewest escapes among exponents of which the last `padding` are zeros that do not count.
Base choose(const Bytes& exponents, std::uint8_t largest, int padding) {
    int escapes[kBases];
    count_escapes(exponents, largest, escapes);
    Base best = {0, kBlock + 1};
    for (int k = 0; k < kBases && k <= largest; ++k) {
        const auto base = static_cast<std::uint8_t>(largest - k);
        const int count = escapes[k] - (base >= kEscape ? padding : 0);
        if (count < best.escapes) {
            best = {base, count};
        }
    }
    return best;
}

// A block of `count` values, completed with zeros.
struct Padded {
    alignas(64) char values[2 * kBlock];

    Padded(const char* x, std::int64_t count) {
        __builtin_memset(values, 0, sizeof values);
        __builtin_memcpy(values, x, static_cast<std::size_t>(2 * count));
    }
};

void store_count(char* to, int escapes) {
    const auto count = static_cast<std::uint16_t>(escapes);
    __builtin_memcpy(to, &count, sizeof count);
}

int load_count(const char* from) {
    std::uint16_t count;
    __builtin_memcpy(&count, from, sizeof count);
    return count;
}

std::int64_t total_escapes(const void* x, std::int64_t numel) {
    const auto* from = static_cast<const char*>(x);
    std::int64_t total = 0;
    Bytes exponents;
    std::int64_t at = 0;
    for (; at + kBlock <= numel; at += kBlock) {
        const std::uint8_t largest = split<false>(from + 2 * at, exponents, nullptr);
        total += choose(exponents, largest, 0).escapes;
    }
    if (at < numel) {
        const Padded padded(from + 2 * at, numel - at);
        const std::uint8_t largest = split<false>(padded.values, exponents, nullptr);
        total += choose(exponents, largest, static_cast<int>(at + kBlock - numel)).escapes;
    }
    return total;
}

std::int64_t encode(const void* x, std::int64_t numel, const Exp3Parts<char>& parts, std::int64_t room) {
    const auto* from = static_cast<const char*>(x);
    std::int64_t total = 0;
    Bytes exponents;
    alignas(64) std::uint8_t escapes[kBlock + 64];
    const auto encode = [&](std::int64_t block, Base base) {
        if (base.escapes > room - total) {
            return false;
        }
        parts.bases[block] = static_cast<char>(base.exponent);
        store_count(parts.counts + 2 * block, base.escapes);
        encode_block(exponents, base.exponent, parts.planes + kPlanes * block, escapes);
        __builtin_memcpy(parts.escapes + total, escapes, static_cast<std::size_t>(base.escapes));
        total += base.escapes;
        return true;
    };
    std::int64_t at = 0;
    for (; at + kBlock <= numel; at += kBlock) {
        const std::uint8_t largest = split<true>(from + 2 * at, exponents, parts.rest + at);
        if (!encode(at / kBlock, choose(exponents, largest, 0))) {
            return -1;
        }
    }
    if (at < numel) {
        const auto count = static_cast<std::size_t>(numel - at);
        const Padded padded(from + 2 * at, numel - at);
        char rest[kBlock];
        const std::uint8_t largest = split<true>(padded.values, exponents, rest);
        __builtin_memcpy(parts.rest + at, rest, count);
        const Base base = choose(exponents, largest, kBlock - static_cast<int>(count));
        __builtin_memset(exponents.at + count, base.exponent, kBlock - count);  // whose code is 0
        if (!encode(at / kBlock, base)) {
            return -1;
        }
    }
    return total;
}

std::int64_t announced(const void* counts, std::int64_t blocks) {
    std::int64_t total = 0;
    for (std::int64_t block = 0; block < blocks; ++block) {
        total += load_count(static_cast<const char*>(counts) + 2 * block);
    }
    return total;
}

bool decode(const Exp3Parts<const char>& parts, std::int64_t numel, void* out) {
    auto* to = static_cast<char*>(out);
    const char* next = parts.escapes;
    for (std::int64_t at = 0; at < numel; at += kBlock) {
        const std::int64_t block = at / kBlock;
        const std::int64_t count = numel - at < kBlock ? numel - at : kBlock;
        const char* planes = parts.planes + kPlanes * block;
        const auto base = static_cast<std::uint8_t>(parts.bases[block]);
        std::uint64_t escaped[kMasks];
        int marked = 0;
        for (int i = 0; i < kMasks; ++i) {
            const std::int64_t inside = count - 64 * i;
            const std::uint64_t beyond = inside >= 64 ? 0 : ~std::uint64_t{0} << (inside > 0 ? inside : 0);
            escaped[i] = marks(planes, i) & ~beyond;
            marked += popcount(escaped[i]);
        }
        if (marked != load_count(parts.counts + 2 * block)) {
            return false;
        }
        if (count == kBlock) {
            decode_block(base, planes, escaped, parts.rest + at, next, to + 2 * at);
        } else {
            char rest[kBlock] = {};
            char values[2 * kBlock];
            __builtin_memcpy(rest, parts.rest + at, static_cast<std::size_t>(count));
            decode_block(base, planes, escaped, rest, next, values);
            __builtin_memcpy(to + 2 * at, values, static_cast<std::size_t>(2 * count));
        }
        next += marked;
    }
    return true;
}

}  // namespace

extern const Exp3Kernels kExp3 = {.count = total_escapes, .encode = encode, .announced = announced, .decode = decode};

}  // namespace thinwire::THINWIRE_TARGET

#else  // messages and threads

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "codec_kinds.hpp"
#include "message.hpp"
#include "pool.hpp"
#include "segments.hpp"
#include "target.hpp"

namespace thinwire {

THINWIRE_KERNELS(Exp3Kernels, kExp3, kernels)

namespace {

constexpr std::uint32_t kCoded = 0x33505845;
constexpr std::uint32_t kRaw = 0x30505845;
constexpr std::uint32_t kMagics[] = {kCoded, kRaw};
constexpr DType kDTypes[] = {DType::bfloat16};

constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kPlaneBytes = 3 * kBlock / 8;

// What is counted at once: offsets of escapes are known for each segment.
constexpr std::int64_t kSegment = 64 * kBlock;

// A part of the values that are converted while they are in the first-level cache.
constexpr std::int64_t kPiece = 8 * kBlock;

void check_dtype(DType dtype) {
    if (dtype != DType::bfloat16) {
        throw std::invalid_argument("exp3 encodes bfloat16 only");
    }
}

std::int64_t padded(std::int64_t nbytes) {
    return ceil_div(nbytes, 4) * 4;
}

// Sizes of the parts of a coded message.
struct Layout {
    std::int64_t numel;

    std::int64_t blocks() const {
        return ceil_div(numel, kBlock);
    }
    std::int64_t bases() const {
        return padded(blocks());
    }
    std::int64_t counts() const {
        return padded(2 * blocks());
    }
    std::int64_t planes() const {
        return kPlaneBytes * blocks();
    }
    std::int64_t rest() const {
        return padded(numel);
    }
    std::int64_t before_escapes() const {
        return bases() + counts() + planes() + rest();
    }
    std::int64_t raw() const {
        return padded(2 * numel);
    }

    template <class Byte>
    Exp3Parts<Byte> parts(Byte* body) const {
        return {body, body + bases(), body + bases() + counts(), body + bases() + counts() + planes(),
                body + before_escapes()};
    }
};

// The parts from a value that begins a block on, of which `escapes` are before it.
template <class Byte>
Exp3Parts<Byte> from_value(const Exp3Parts<Byte>& parts, std::int64_t value, std::int64_t escapes) {
    const std::int64_t block = value / kBlock;
    return {parts.bases + block, parts.counts + 2 * block, parts.planes + kPlaneBytes * block, parts.rest + value,
            parts.escapes + escapes};
}

void zero_to(char* from, char* end) {
    std::fill(from, end, char{0});
}

// Writes all parts but the zeros that complete them. Returns the number of escapes, or -1 if there are more than
// `room`; a part may have been written by then.
std::int64_t encode_coded(const void* x, std::int64_t numel, const Exp3Parts<char>& parts, std::int64_t room,
                          const Segments& segments) {
    const auto* from = static_cast<const char*>(x);
    const Exp3Kernels& use = kernels();
    if (segments.threads <= 1) {
        return use.encode(from, numel, parts, room);
    }
    const auto starts =
        segments.offsets([&](std::int64_t first, std::int64_t count) { return use.count(from + 2 * first, count); });
    if (starts.back() > room) {
        return -1;
    }
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.before(begin);
        const std::int64_t before = starts[static_cast<std::size_t>(begin)];
        use.encode(from + 2 * first, segments.before(end) - first, from_value(parts, first, before),
                   starts[static_cast<std::size_t>(end)] - before);
    });
    return starts.back();
}

void decode_raw(const Message& message, std::int64_t numel, void* out, DType dtype, bool add,
                const Segments& segments) {
    if (message.body_bytes != Layout{numel}.raw()) {
        throw std::invalid_argument("exp3: " + std::to_string(numel) + " values are " + std::to_string(2 * numel) +
                                    " bytes, the message holds " + std::to_string(message.body_bytes));
    }
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.before(begin);
        const std::int64_t count = segments.before(end) - first;
        const char* from = message.body + 2 * first;
        char* to = static_cast<char*>(out) + first * bytes_of(dtype);
        if (dtype == DType::bfloat16) {
            std::memcpy(to, from, static_cast<std::size_t>(2 * count));
        } else {
            value_kernels().cast(from, DType::bfloat16, count, to, dtype, add);
        }
    });
}

class Exp3 final : public LosslessFormat {
public:
    std::span<const std::uint32_t> magics() const override {
        return kMagics;
    }
    std::span<const DType> dtypes() const override {
        return kDTypes;
    }
    std::int64_t wire_bytes(std::int64_t numel, DType) const override {
        return numel == 0 ? 0 : kHeaderBytes + Layout{numel}.raw();
    }

    std::int64_t encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t capacity,
                        int threads) const override {
        check_dtype(dtype);
        check_values("exp3", numel);
        check_capacity("exp3", wire_bytes(numel, dtype), capacity);
        if (numel == 0) {
            return 0;
        }
        const Layout layout{numel};
        const Segments segments{numel, kSegment, useful_threads(2 * numel, threads)};
        auto* to = static_cast<char*>(wire);
        char* body = to + kHeaderBytes;
        const Exp3Parts<char> parts = layout.parts(body);
        const std::int64_t room = layout.raw() - 4 - layout.before_escapes();  // a multiple of 4: padding fits as well
        const std::int64_t escapes = room < 0 ? -1 : encode_coded(x, numel, parts, room, segments);
        if (escapes < 0) {
            parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
                const std::int64_t first = 2 * segments.before(begin);
                std::memcpy(body + first, static_cast<const char*>(x) + first,
                            static_cast<std::size_t>(2 * segments.before(end) - first));
            });
            zero_to(body + 2 * numel, body + layout.raw());
            write_header(kRaw, wire_bytes(numel, dtype), to);
            return wire_bytes(numel, dtype);
        }
        char* end = parts.escapes + padded(escapes);
        zero_to(parts.bases + layout.blocks(), parts.counts);
        zero_to(parts.counts + 2 * layout.blocks(), parts.planes);
        zero_to(parts.rest + numel, parts.escapes);
        zero_to(parts.escapes + escapes, end);
        write_header(kCoded, end - to, to);
        return end - to;
    }

    void decode(const void* wire, std::int64_t nbytes, std::int64_t numel, DType encoded, void* out, DType dtype,
                bool add, int threads) const override {
        check_dtype(encoded);
        check_values("exp3", numel);
        check_add("exp3", dtype, add);
        if (numel == 0) {
            return;
        }
        const Layout layout{numel};
        const Segments segments{numel, kSegment, useful_threads(2 * numel, threads)};
        const Message message = read_message("exp3", kMagics, wire, nbytes);
        if (message.magic == kRaw) {
            decode_raw(message, numel, out, dtype, add, segments);
            return;
        }
        const std::int64_t there = message.body_bytes - layout.before_escapes();
        if (there < 0) {
            throw std::invalid_argument("exp3: " + std::to_string(numel) + " values need " +
                                        std::to_string(layout.before_escapes()) + " bytes and escapes, " +
                                        std::to_string(message.body_bytes) + " are there");
        }
        const Exp3Kernels& use = kernels();
        const Exp3Parts<const char> parts = layout.parts(message.body);
        const auto starts = segments.offsets([&](std::int64_t first, std::int64_t count) {
            return use.announced(from_value(parts, first, 0).counts, ceil_div(count, kBlock));
        });
        if (padded(starts.back()) != there) {
            throw std::invalid_argument("exp3: " + std::to_string(starts.back()) + " escapes are announced, " +
                                        std::to_string(there) + " bytes of them are there");
        }
        const auto decode_part = [&](const Exp3Parts<const char>& from, std::int64_t count, void* to) {
            if (!use.decode(from, count, to)) {
                throw std::invalid_argument("exp3: a block marks more or fewer escapes than it announces");
            }
        };
        parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t first = segments.before(begin);
            const std::int64_t stop = segments.before(end);
            std::int64_t escapes = starts[static_cast<std::size_t>(begin)];
            if (dtype == DType::bfloat16) {
                decode_part(from_value(parts, first, escapes), stop - first, static_cast<char*>(out) + 2 * first);
                return;
            }
            alignas(64) char piece[2 * kPiece];
            for (std::int64_t at = first; at < stop; at += kPiece) {
                const std::int64_t here = std::min(kPiece, stop - at);
                const Exp3Parts<const char> from = from_value(parts, at, escapes);
                decode_part(from, here, piece);
                value_kernels().cast(piece, DType::bfloat16, here, static_cast<char*>(out) + at * bytes_of(dtype),
                                     dtype, add);
                escapes += use.announced(from.counts, ceil_div(here, kBlock));
            }
        });
    }
};

std::unique_ptr<const LosslessFormat> make(std::span<const std::int64_t> parameters) {
    check_parameters("exp3", parameters, 0);
    return std::make_unique<Exp3>();
}

Parameters draw(const Draw&) {
    return {};
}

}  // namespace

namespace codecs {
extern const CodecKind exp3 = {"exp3", nullptr, make, draw};
}

}  // namespace thinwire

#endif
