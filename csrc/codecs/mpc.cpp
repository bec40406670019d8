// MPC of 32-bit words (docs/wire-format.md): in chunks of 1024, differences of words that are `stride` places apart;
// their bits transposed in groups of 32; differences of those; and of these the words that are not zero.
#include "kernels/kernels.hpp"

namespace thinwire {

// `x` and `out` begin a chunk; `kept` are the residual words that are not zero, and what is returned is how many they
// are.
struct MpcKernels {
    std::int64_t (*count)(const void* x, std::int64_t nbytes, int stride);
    std::int64_t (*encode)(const void* x, std::int64_t nbytes, int stride, void* bitmap, void* kept);
    std::int64_t (*announced)(const void* bitmap, std::int64_t words);
    std::int64_t (*decode)(const void* bitmap, const void* kept, std::int64_t nbytes, int stride, void* out);
};

}  // namespace thinwire

#ifdef THINWIRE_TARGET  // the loops, once for each instruction set

#include "kernels/masks.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kChunk = 1024;
constexpr int kGroup = 32;
constexpr int kSlack = 16;  // words that may be written or read beyond those that count

// Words that are not zero, of one chunk.
struct Kept {
    alignas(64) std::uint32_t words[kChunk + kSlack];
    std::int64_t count;
};

std::uint32_t load_word(const char* from) {
    std::uint32_t word;
    __builtin_memcpy(&word, from, sizeof word);
    return word;
}

std::int64_t announced(const void* bitmap, std::int64_t words) {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < words; ++i) {
        count += popcount(load_word(static_cast<const char*>(bitmap) + 4 * i));
    }
    return count;
}

void store_word(char* to, std::uint32_t word) {
    __builtin_memcpy(to, &word, sizeof word);
}

#if defined(__AVX512VBMI__) && defined(__GFNI__)

struct Group {
    __m512i low;
    __m512i high;
};

// Bytes are brought to where each 64 bits are an 8 x 8 matrix, these are transposed, and their bytes brought to where
// they belong. Byte k of word j, and byte m of plane p, with j = 8 m + n and p = 31 - (8 k + i): bit i of one is bit n
// of the other. The transposition takes the bytes of a matrix in reverse order.
struct Routes {
    alignas(64) std::uint8_t words_to_matrices[64];      // words 0 to 15 or 16 to 31
    alignas(64) std::uint8_t matrices_to_planes[2][64];  // planes 0 to 15 and 16 to 31
    alignas(64) std::uint8_t planes_to_matrices[64];     // planes 0 to 15 or 16 to 31
    alignas(64) std::uint8_t matrices_to_words[2][64];   // words 0 to 15 and 16 to 31

    constexpr Routes() : words_to_matrices(), matrices_to_planes(), planes_to_matrices(), matrices_to_words() {
        const auto byte = [](int position) { return static_cast<std::uint8_t>(position); };
        for (int k = 0; k < 4; ++k) {
            for (int m = 0; m < 4; ++m) {
                for (int bit = 0; bit < 8; ++bit) {
                    const int word = 8 * m + bit;
                    const int plane = 31 - (8 * k + bit);
                    const int by_words = 8 * (2 * k + m % 2) + bit;
                    const int by_planes = 8 * (4 * (k % 2) + m) + bit;
                    words_to_matrices[by_words ^ 7] = byte(4 * (word % 16) + k);
                    matrices_to_planes[plane / 16][4 * (plane % 16) + m] = byte(64 * (m / 2) + by_words);
                    planes_to_matrices[by_planes ^ 7] = byte(4 * (plane % 16) + m);
                    matrices_to_words[word / 16][4 * (word % 16) + k] = byte(64 * (1 - k / 2) + by_planes);
                }
            }
        }
    }
};

constexpr Routes kRoutes;

__m512i route(const std::uint8_t (&bytes)[64]) {
    return _mm512_load_si512(bytes);
}

// In each 64 bits, bit i of byte n becomes bit 7 - n of byte i.
__m512i transpose_matrices(__m512i x) {
    return _mm512_gf2p8affine_epi64_epi8(_mm512_set1_epi64(static_cast<long long>(0x8040201008040201U)), x, 0);
}

Group transpose(const Group& words) {
    const __m512i gather = route(kRoutes.words_to_matrices);
    const __m512i a = transpose_matrices(_mm512_permutexvar_epi8(gather, words.low));
    const __m512i b = transpose_matrices(_mm512_permutexvar_epi8(gather, words.high));
    return {_mm512_permutex2var_epi8(a, route(kRoutes.matrices_to_planes[0]), b),
            _mm512_permutex2var_epi8(a, route(kRoutes.matrices_to_planes[1]), b)};
}

// Words less their predecessors; that of the first is the last of `before`.
Group differences(const Group& x, __m512i before) {
    return {_mm512_sub_epi32(x.low, _mm512_alignr_epi32(x.low, before, 15)),
            _mm512_sub_epi32(x.high, _mm512_alignr_epi32(x.high, x.low, 15))};
}

// Sixteen words from word `at` of a chunk on, less those `stride` places before them.
__m512i differences(const char* x, int at, int stride) {
    const __m512i words = _mm512_loadu_si512(x + 4 * at);
    const int missing = stride - at;  // so many words have none before them
    if (missing >= 16) {
        return words;
    }
    const auto there = static_cast<__mmask16>(missing > 0 ? 0xffffu << missing : 0xffffu);
    return _mm512_sub_epi32(words, _mm512_maskz_loadu_epi32(there, x + 4 * (at - stride)));
}

// Residuals of the full groups among a chunk's words: the bits of those that are not zero, and these words.
template <bool write>
void encode_groups(const char* x, int groups, int stride, char* bitmap, Kept& kept) {
    __m512i before = _mm512_setzero_si512();
    for (int group = 0; group < groups; ++group) {
        Group words;
        if (stride == 1) {  // the words before are in registers
            const Group loaded = {_mm512_loadu_si512(x + 128 * group), _mm512_loadu_si512(x + 128 * group + 64)};
            words = differences(loaded, before);
            before = loaded.high;
        } else {
            words = {differences(x, kGroup * group, stride), differences(x, kGroup * group + 16, stride)};
        }
        const Group residual = differences(transpose(words), _mm512_setzero_si512());
        const __mmask16 low = _mm512_test_epi32_mask(residual.low, residual.low);
        const __mmask16 high = _mm512_test_epi32_mask(residual.high, residual.high);
        if constexpr (write) {
            store_word(bitmap + 4 * group, low | static_cast<std::uint32_t>(high) << 16);
            // Compressing to a register and storing all of it is several times as fast as compressing to memory.
            _mm512_storeu_si512(kept.words + kept.count, _mm512_maskz_compress_epi32(low, residual.low));
            kept.count += popcount(low);
            _mm512_storeu_si512(kept.words + kept.count, _mm512_maskz_compress_epi32(high, residual.high));
            kept.count += popcount(high);
        } else {
            kept.count += popcount(low | static_cast<std::uint32_t>(high) << 16);
        }
    }
}

__m512i expand(std::uint32_t mask, const char*& kept) {
    // A load of no more than what is there.
    const int count = popcount(mask);
    const __m512i words = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), kept);
    kept += 4 * count;
    return _mm512_maskz_expand_epi32(static_cast<__mmask16>(mask), words);
}

__m512i last(__m512i x) {
    return _mm512_permutexvar_epi32(_mm512_set1_epi32(15), x);
}

// Decoding is one long chain of dependent instructions, so several groups are decoded side by side: their halves are
// the elements of an array, and each function is one step for all of them.

template <int distance, int n>
void add_shifted(__m512i (&halves)[n]) {
    for (__m512i& x : halves) {
        x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, _mm512_setzero_si512(), 16 - distance));
    }
}

// Each word becomes the sum of those of its group up to it.
template <int n>
void sums(__m512i (&halves)[n]) {
    add_shifted<1>(halves);
    add_shifted<2>(halves);
    add_shifted<4>(halves);
    add_shifted<8>(halves);
    for (int i = 0; i < n; i += 2) {
        halves[i + 1] = _mm512_add_epi32(halves[i + 1], last(halves[i]));
    }
}

template <int n>
void transpose_back(__m512i (&halves)[n]) {
    const __m512i gather = route(kRoutes.planes_to_matrices);
    for (__m512i& x : halves) {
        x = transpose_matrices(_mm512_permutexvar_epi8(gather, x));
    }
    for (int i = 0; i < n; i += 2) {
        const __m512i low = _mm512_permutex2var_epi8(halves[i], route(kRoutes.matrices_to_words[0]), halves[i + 1]);
        halves[i + 1] = _mm512_permutex2var_epi8(halves[i], route(kRoutes.matrices_to_words[1]), halves[i + 1]);
        halves[i] = low;
    }
}

// The words of so many groups, or their differences; each element of `before` is the word before them, and then the
// last one.
template <int groups, bool differences>
void decode_several(const char* bitmap, const char*& kept, __m512i& before, char* out) {
    __m512i halves[2 * groups];
    for (int i = 0; i < groups; ++i) {
        const std::uint32_t mask = load_word(bitmap + 4 * i);
        halves[2 * i] = expand(mask & 0xffff, kept);
        halves[2 * i + 1] = expand(mask >> 16, kept);
    }
    sums(halves);
    transpose_back(halves);
    if constexpr (differences) {
        for (int i = 0; i < 2 * groups; ++i) {
            _mm512_storeu_si512(out + 64 * i, halves[i]);
        }
        return;
    }
    sums(halves);
    for (int i = 0; i < groups; ++i) {
        _mm512_storeu_si512(out + 128 * i, _mm512_add_epi32(halves[2 * i], before));
        _mm512_storeu_si512(out + 128 * i + 64, _mm512_add_epi32(halves[2 * i + 1], before));
        before = _mm512_add_epi32(before, last(halves[2 * i + 1]));
    }
}

// The words of a chunk's full groups, or their differences.
template <bool differences>
void decode_groups(const char* bitmap, int groups, const char*& kept, char* out) {
    constexpr int kSeveral = 4;
    const char* next = kept;  // not the reference: it might change with every store to `out`
    __m512i before = _mm512_setzero_si512();
    int group = 0;
    for (; group + kSeveral <= groups; group += kSeveral) {
        decode_several<kSeveral, differences>(bitmap + 4 * group, next, before, out + 128 * group);
    }
    for (; group < groups; ++group) {
        decode_several<1, differences>(bitmap + 4 * group, next, before, out + 128 * group);
    }
    kept = next;
}

#else

// One step of the transposition, between words whose index differs in its highest bit: a plane's index is the
// complement of a bit's, so the upper halves of a and b become the one and the lower halves the other. Results are
// interleaved, which brings the next lower bit of the index to the top; after five steps all are back in place.
template <int shift, std::uint32_t lower>
void transpose_step(const std::uint32_t* from, std::uint32_t* to) {
    for (int i = 0; i < kGroup / 2; ++i) {
        const std::uint32_t a = from[i];
        const std::uint32_t b = from[i + kGroup / 2];
        to[2 * i] = (a >> shift & lower) | (b & ~lower);
        to[2 * i + 1] = (a & lower) | (b << shift & ~lower);
    }
}

template <int shift, std::uint32_t lower>
void transpose_back_step(const std::uint32_t* from, std::uint32_t* to) {
    for (int i = 0; i < kGroup / 2; ++i) {
        const std::uint32_t a = from[i];
        const std::uint32_t b = from[i + kGroup / 2];
        to[2 * i] = (b & lower) | (a << shift & ~lower);
        to[2 * i + 1] = (a & ~lower) | (b >> shift & lower);
    }
}

void transpose(const std::uint32_t* words, std::uint32_t* planes) {
    alignas(64) std::uint32_t other[kGroup];
    transpose_step<16, 0x0000ffff>(words, planes);
    transpose_step<8, 0x00ff00ff>(planes, other);
    transpose_step<4, 0x0f0f0f0f>(other, planes);
    transpose_step<2, 0x33333333>(planes, other);
    transpose_step<1, 0x55555555>(other, planes);
}

void transpose_back(const std::uint32_t* planes, std::uint32_t* words) {
    alignas(64) std::uint32_t other[kGroup];
    transpose_back_step<16, 0x0000ffff>(planes, words);
    transpose_back_step<8, 0x00ff00ff>(words, other);
    transpose_back_step<4, 0x0f0f0f0f>(other, words);
    transpose_back_step<2, 0x33333333>(words, other);
    transpose_back_step<1, 0x55555555>(other, words);
}

#if defined(__AVX2__)

// By a mask of eight words: the places of those it selects, then anything.
struct Selections {
    alignas(64) std::uint8_t places[256][8];
    alignas(64) std::uint8_t ranks[256][8];  // by place: how many selected ones are before it

    constexpr Selections() : places(), ranks() {
        for (int mask = 0; mask < 256; ++mask) {
            int count = 0;
            for (int place = 0; place < 8; ++place) {
                ranks[mask][place] = static_cast<std::uint8_t>(count);
                if (mask >> place & 1) {
                    places[mask][count++] = static_cast<std::uint8_t>(place);
                }
            }
        }
    }
};

constexpr Selections kSelections;

__m256i load_eight(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

__m256i indices(const std::uint8_t (&bytes)[8]) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}

// The bits of those words of a group that are not zero, and these words to `kept`.
std::uint32_t keep(const std::uint32_t* residual, std::uint32_t* kept) {
    std::uint32_t mask = 0;
    for (int i = 0; i < kGroup; i += 8) {
        const __m256i words = load_eight(residual + i);
        const __m256i zeros = _mm256_cmpeq_epi32(words, _mm256_setzero_si256());
        const auto part = ~static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zeros))) & 0xff;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(kept),
                            _mm256_permutevar8x32_epi32(words, indices(kSelections.places[part])));
        kept += popcount(part);
        mask |= part << i;
    }
    return mask;
}

// The reverse; `kept` may be read eight words beyond its end.
void spread(std::uint32_t mask, const std::uint32_t* kept, std::uint32_t* residual) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < kGroup; i += 8) {
        const std::uint32_t part = mask >> i & 0xff;
        const __m256i words = _mm256_permutevar8x32_epi32(load_eight(kept), indices(kSelections.ranks[part]));
        const __m256i selected = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(part)), bits);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(residual + i),
                            _mm256_and_si256(words, _mm256_cmpeq_epi32(selected, bits)));
        kept += popcount(part);
    }
}

#else

std::uint32_t keep(const std::uint32_t* residual, std::uint32_t* kept) {
    std::uint32_t mask = 0;
    int count = 0;
    for (int i = 0; i < kGroup; ++i) {
        const std::uint32_t word = residual[i];
        const int there = word != 0;
        kept[count] = word;
        count += there;
        mask |= static_cast<std::uint32_t>(there) << i;
    }
    return mask;
}

void spread(std::uint32_t mask, const std::uint32_t* kept, std::uint32_t* residual) {
    for (int i = 0; i < kGroup; ++i) {
        const std::uint32_t bit = mask >> i & 1;
        residual[i] = *kept & (0 - bit);
        kept += bit;
    }
}

#endif

// What follows goes over the whole chunk step by step: a vector that is read soon after its parts were written, in
// other parts, has to wait for the cache.
struct Words {
    alignas(64) std::uint32_t at[kChunk];
};

// Each word (a multiple of 4 of them) becomes the sum of those up to it.
void sums(const std::uint32_t* words, int count, char* out) {
#if defined(__SSE2__)
    __m128i before = _mm_setzero_si128();
    for (int i = 0; i < count; i += 4) {
        __m128i x = _mm_load_si128(reinterpret_cast<const __m128i*>(words + i));
        x = _mm_add_epi32(x, _mm_slli_si128(x, 4));
        x = _mm_add_epi32(x, _mm_slli_si128(x, 8));
        x = _mm_add_epi32(x, before);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 4 * i), x);
        before = _mm_shuffle_epi32(x, 0xff);
    }
#else
    std::uint32_t before = 0;
    for (int i = 0; i < count; ++i) {
        before += words[i];
        store_word(out + 4 * i, before);
    }
#endif
}

template <bool write>
void encode_groups(const char* x, int groups, int stride, char* bitmap, Kept& kept) {
    if (groups == 0) {
        return;
    }
    const int count = groups * kGroup;
    Words words;
    Words planes;
    for (int i = 0; i < stride; ++i) {
        words.at[i] = load_word(x + 4 * i);
    }
    for (int i = stride; i < count; ++i) {
        words.at[i] = load_word(x + 4 * i) - load_word(x + 4 * (i - stride));
    }
    for (int i = 0; i < count; i += kGroup) {
        transpose(words.at + i, planes.at + i);
    }
    for (int i = 0; i < count; i += kGroup) {
        words.at[i] = planes.at[i];
        for (int j = 1; j < kGroup; ++j) {
            words.at[i + j] = planes.at[i + j] - planes.at[i + j - 1];
        }
    }
    if constexpr (write) {
        for (int group = 0; group < groups; ++group) {
            const std::uint32_t mask = keep(words.at + kGroup * group, kept.words + kept.count);
            store_word(bitmap + 4 * group, mask);
            kept.count += popcount(mask);
        }
    } else {
        int there = 0;
        for (int i = 0; i < count; ++i) {
            there += words.at[i] != 0;
        }
        kept.count += there;
    }
}

template <bool differences>
void decode_groups(const char* bitmap, int groups, const char*& kept, char* out) {
    // A copy, for the sake of loops that read beyond a group's last word.
    Kept local;
    local.count = announced(bitmap, groups);
    __builtin_memcpy(local.words, kept, static_cast<std::size_t>(4 * local.count));
    __builtin_memset(local.words + local.count, 0, 4 * kSlack);
    kept += 4 * local.count;

    const int count = groups * kGroup;
    Words planes;
    Words words;
    const std::uint32_t* next = local.words;
    for (int group = 0; group < groups; ++group) {
        const std::uint32_t mask = load_word(bitmap + 4 * group);
        spread(mask, next, planes.at + kGroup * group);
        next += popcount(mask);
    }
    for (int i = 0; i < count; i += kGroup) {
        sums(planes.at + i, kGroup, reinterpret_cast<char*>(planes.at + i));
    }
    for (int i = 0; i < count; i += kGroup) {
        transpose_back(planes.at + i, words.at + i);
    }
    if constexpr (differences) {
        __builtin_memcpy(out, words.at, static_cast<std::size_t>(4 * count));
    } else {
        sums(words.at, count, out);
    }
}

#endif

// A chunk of at most kChunk words.
template <bool write>
void encode_chunk(const char* x, int words, int stride, char* bitmap, Kept& kept) {
    kept.count = 0;
    const int groups = words / kGroup;
    encode_groups<write>(x, groups, stride, bitmap, kept);
    const int done = groups * kGroup;
    if (done == words) {
        return;
    }
    std::uint32_t mask = 0;
    for (int i = done; i < words; ++i) {
        const std::uint32_t word = load_word(x + 4 * i);
        const std::uint32_t before = i < stride ? 0 : load_word(x + 4 * (i - stride));
        if (word != before) {
            mask |= 1u << (i - done);
            kept.words[kept.count++] = word - before;
        }
    }
    if constexpr (write) {
        store_word(bitmap + 4 * groups, mask);
    }
}

void decode_chunk(const char* bitmap, int words, int stride, const char*& kept, char* out) {
    const int groups = words / kGroup;
    const int done = groups * kGroup;
    if (stride == 1) {
        decode_groups<false>(bitmap, groups, kept, out);
    } else {
        decode_groups<true>(bitmap, groups, kept, out);
        for (int i = stride; i < done; ++i) {
            store_word(out + 4 * i, load_word(out + 4 * i) + load_word(out + 4 * (i - stride)));
        }
    }
    if (done == words) {
        return;
    }
    const std::uint32_t mask = load_word(bitmap + 4 * groups);
    for (int i = done; i < words; ++i) {
        std::uint32_t word = i < stride ? 0 : load_word(out + 4 * (i - stride));
        if (mask >> (i - done) & 1) {
            word += load_word(kept);
            kept += 4;
        }
        store_word(out + 4 * i, word);
    }
}

// A last chunk that ends within a word, completed with zeros.
struct Completed {
    alignas(64) char bytes[4 * kChunk];
    int words;

    Completed(const char* x, std::int64_t nbytes) : words(static_cast<int>((nbytes + 3) / 4)) {
        store_word(bytes + 4 * (words - 1), 0);
        __builtin_memcpy(bytes, x, static_cast<std::size_t>(nbytes));
    }
};

// Calls fn(first byte, words) for each chunk of whole words; returns the bytes they have.
template <class Fn>
std::int64_t for_chunks(std::int64_t nbytes, const Fn& fn) {
    const std::int64_t whole = nbytes % 4 == 0 ? nbytes : nbytes / (4 * kChunk) * (4 * kChunk);
    for (std::int64_t at = 0; at < whole; at += 4 * kChunk) {
        fn(at, static_cast<int>(whole - at < 4 * kChunk ? (whole - at) / 4 : kChunk));
    }
    return whole;
}

std::int64_t count_kept(const void* x, std::int64_t nbytes, int stride) {
    const auto* from = static_cast<const char*>(x);
    std::int64_t count = 0;
    Kept kept;
    const std::int64_t whole = for_chunks(nbytes, [&](std::int64_t at, int words) {
        encode_chunk<false>(from + at, words, stride, nullptr, kept);
        count += kept.count;
    });
    if (whole < nbytes) {
        const Completed completed(from + whole, nbytes - whole);
        encode_chunk<false>(completed.bytes, completed.words, stride, nullptr, kept);
        count += kept.count;
    }
    return count;
}

std::int64_t encode_chunks(const void* x, std::int64_t nbytes, int stride, void* bitmap, void* kept) {
    const auto* from = static_cast<const char*>(x);
    auto* bits = static_cast<char*>(bitmap);
    auto* to = static_cast<char*>(kept);
    std::int64_t count = 0;
    Kept local;
    const auto encode = [&](const char* chunk, std::int64_t at, int words) {
        encode_chunk<true>(chunk, words, stride, bits + at / kGroup, local);
        __builtin_memcpy(to + 4 * count, local.words, static_cast<std::size_t>(4 * local.count));
        count += local.count;
    };
    const std::int64_t whole = for_chunks(nbytes, [&](std::int64_t at, int words) { encode(from + at, at, words); });
    if (whole < nbytes) {
        const Completed completed(from + whole, nbytes - whole);
        encode(completed.bytes, whole, completed.words);
    }
    return count;
}

std::int64_t decode_chunks(const void* bitmap, const void* kept, std::int64_t nbytes, int stride, void* out) {
    const auto* bits = static_cast<const char*>(bitmap);
    const auto* from = static_cast<const char*>(kept);
    auto* to = static_cast<char*>(out);
    const std::int64_t whole = for_chunks(
        nbytes, [&](std::int64_t at, int words) { decode_chunk(bits + at / kGroup, words, stride, from, to + at); });
    if (whole < nbytes) {
        alignas(64) char chunk[4 * kChunk];
        decode_chunk(bits + whole / kGroup, static_cast<int>((nbytes - whole + 3) / 4), stride, from, chunk);
        __builtin_memcpy(to + whole, chunk, static_cast<std::size_t>(nbytes - whole));
    }
    return (from - static_cast<const char*>(kept)) / 4;
}

}  // namespace

extern const MpcKernels kMpc = {
    .count = count_kept, .encode = encode_chunks, .announced = announced, .decode = decode_chunks};

}  // namespace thinwire::THINWIRE_TARGET

#else  // messages and threads

#include <algorithm>
#include <stdexcept>
#include <string>

#include "codec_kinds.hpp"
#include "message.hpp"
#include "pool.hpp"
#include "segments.hpp"
#include "target.hpp"

namespace thinwire {

THINWIRE_KERNELS(MpcKernels, kMpc, kernels)

namespace {

constexpr int kMostStride = 32;
// "MPC" and the stride, from "1" on.
constexpr std::uint32_t kMagic = 0x3043504d;
constexpr DType kDTypes[] = {DType::float32, DType::bfloat16, DType::float16};

constexpr std::int64_t kChunkBytes = 4 * 1024;
constexpr std::int64_t kBytesPerBitmapWord = 4 * 32;

// What is counted at once: offsets of residual words are known for each segment.
constexpr std::int64_t kSegmentBytes = 16 * kChunkBytes;

// A part of the values that are converted while they are in the first-level cache.
constexpr std::int64_t kPieceBytes = 4 * kChunkBytes;

std::int64_t bitmap_words(std::int64_t nbytes) {
    return ceil_div(nbytes, kBytesPerBitmapWord);
}

// Where in the bitmap a segment starts that begins at this byte.
std::int64_t bitmap_at(std::int64_t first) {
    return 4 * (first / kBytesPerBitmapWord);
}

class Mpc final : public LosslessFormat {
public:
    explicit Mpc(int stride) : stride_(stride), magic_{kMagic + (static_cast<std::uint32_t>(stride) << 24)} {}

    std::span<const std::uint32_t> magics() const override {
        return magic_;
    }
    std::span<const DType> dtypes() const override {
        return kDTypes;
    }
    std::int64_t wire_bytes(std::int64_t numel, DType dtype) const override;
    std::int64_t encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t capacity,
                        int threads) const override;
    void decode(const void* wire, std::int64_t wire_nbytes, std::int64_t numel, DType encoded, void* out, DType dtype,
                bool add, int threads) const override;

private:
    int stride_;
    std::uint32_t magic_[1];
};

std::int64_t Mpc::wire_bytes(std::int64_t numel, DType dtype) const {
    const std::int64_t nbytes = numel * bytes_of(dtype);
    return nbytes == 0 ? 0 : kHeaderBytes + 4 * (bitmap_words(nbytes) + ceil_div(nbytes, 4));
}

std::int64_t Mpc::encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t capacity,
                         int threads) const {
    check_values("mpc", numel);
    check_capacity("mpc", wire_bytes(numel, dtype), capacity);
    if (numel == 0) {
        return 0;
    }
    const std::int64_t nbytes = numel * bytes_of(dtype);
    const auto* from = static_cast<const char*>(x);
    auto* to = static_cast<char*>(wire);
    char* bitmap = to + kHeaderBytes;
    char* kept = bitmap + 4 * bitmap_words(nbytes);
    const MpcKernels& use = kernels();
    const Segments segments{nbytes, kSegmentBytes, useful_threads(nbytes, threads)};
    std::int64_t count = 0;
    if (segments.threads <= 1) {
        count = use.encode(from, nbytes, stride_, bitmap, kept);
    } else {
        const auto starts = segments.offsets(
            [&](std::int64_t first, std::int64_t here) { return use.count(from + first, here, stride_); });
        count = starts.back();
        parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t first = segments.before(begin);
            use.encode(from + first, segments.before(end) - first, stride_, bitmap + bitmap_at(first),
                       kept + 4 * starts[static_cast<std::size_t>(begin)]);
        });
    }
    const std::int64_t size = kept + 4 * count - to;
    write_header(magic_[0], size, to);
    return size;
}

void Mpc::decode(const void* wire, std::int64_t wire_nbytes, std::int64_t numel, DType encoded, void* out, DType dtype,
                 bool add, int threads) const {
    check_values("mpc", numel);
    check_add("mpc", dtype, add);
    if (numel == 0) {
        return;
    }
    const std::int64_t nbytes = numel * bytes_of(encoded);
    const std::int64_t words = ceil_div(nbytes, 4);
    const std::int64_t bitmap_bytes = 4 * bitmap_words(nbytes);
    const Message message = read_message("mpc", magic_, wire, wire_nbytes);
    if (message.body_bytes < bitmap_bytes) {
        throw std::invalid_argument("mpc: " + std::to_string(words) + " words need a bitmap of " +
                                    std::to_string(bitmap_bytes / 4) + ", " + std::to_string(message.body_bytes / 4) +
                                    " are there");
    }
    const MpcKernels& use = kernels();
    const Segments segments{nbytes, kSegmentBytes, useful_threads(nbytes, threads)};
    const char* bitmap = message.body;
    const char* kept = bitmap + bitmap_bytes;
    const auto starts = segments.offsets([&](std::int64_t first, std::int64_t here) {
        return use.announced(bitmap + bitmap_at(first), bitmap_words(here));
    });
    const std::int64_t there = (message.body_bytes - bitmap_bytes) / 4;
    // The last word of the bitmap may have bits for words that do not exist.
    const auto last = static_cast<unsigned char>(bitmap[(words - 1) / 8]);
    const bool beyond = last >> ((words - 1) % 8 + 1) != 0 ||
                        std::any_of(bitmap + (words - 1) / 8 + 1, kept, [](char byte) { return byte != 0; });
    if (starts.back() != there || beyond) {
        throw std::invalid_argument("mpc: the bitmap announces " + std::to_string(starts.back()) + " words of " +
                                    std::to_string(words) + ", " + std::to_string(there) + " are there");
    }
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.before(begin);
        const std::int64_t stop = segments.before(end);
        const char* bits = bitmap + bitmap_at(first);
        const char* next = kept + 4 * starts[static_cast<std::size_t>(begin)];
        if (encoded == dtype && !add) {
            use.decode(bits, next, stop - first, stride_, static_cast<char*>(out) + first);
            return;
        }
        alignas(64) char piece[kPieceBytes];
        for (std::int64_t at = first; at < stop; at += kPieceBytes) {
            const std::int64_t here = std::min(kPieceBytes, stop - at);
            next += 4 * use.decode(bits + bitmap_at(at - first), next, here, stride_, piece);
            value_kernels().cast(piece, encoded, here / bytes_of(encoded),
                                 static_cast<char*>(out) + at / bytes_of(encoded) * bytes_of(dtype), dtype, add);
        }
    });
}

std::unique_ptr<const LosslessFormat> make(std::span<const std::int64_t> parameters) {
    check_parameters("mpc", parameters, 1);
    const std::int64_t stride = parameters[0];
    if (stride < 1 || stride > kMostStride) {
        throw std::invalid_argument("mpc: a stride of " + std::to_string(stride) + " words");
    }
    return std::make_unique<Mpc>(static_cast<int>(stride));
}

Parameters draw(const Draw& draw) {
    return {draw(0, 1) == 0 ? 1 : draw(1, kMostStride)};
}

}  // namespace

namespace codecs {
extern const CodecKind mpc = {"mpc", nullptr, make, draw};
}

}  // namespace thinwire

#endif
