// Block quantisation (docs/wire-format.md). Rule numbers are those of that page.
#include "kernels/block_rules.hpp"
#include "kernels/kernels.hpp"

namespace thinwire {

struct BlockKernels {
    // Whole blocks, the last of a message may be shorter; `position` is the place of x[0] in it.
    void (*encode)(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, std::int64_t position,
                   std::uint32_t seed, void* codes, void* scales);
    void (*decode)(const void* codes, const void* scales, std::int64_t numel, const BlockFormat& format, void* out,
                   DType dtype, bool add);
    // One scale for many parts: first the largest value of all parts, then the parts. Returns the scale.
    Largest (*largest)(const void* x, DType dtype, std::int64_t numel);
    float (*encode_part)(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format,
                         const Largest& largest, std::int64_t position, std::uint32_t seed, void* codes);
};

}  // namespace thinwire

#ifdef THINWIRE_TARGET  // the loops, once for each instruction set

#include "kernels/rotation.hpp"
#include "kernels/search.hpp"
#include "kernels/values.hpp"

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#include "kernels/search_avx512.hpp"
#define THINWIRE_AVX512 1
#else
#include "kernels/lanes.hpp"
#ifdef THINWIRE_LANES
#include "kernels/nibbles_lanes.hpp"
#include "kernels/search_lanes.hpp"
#endif
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

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

// x * factor rounded to nearest even and bounded. |x * factor| is at most 128, so adding kShift leaves the integer in
// the low bits, in two's complement.
void round_values(const float* x, std::int64_t numel, float factor, int levels, std::int8_t* codes) {
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
        // Not a choice between two floats: GCC keeps a branch for that, as one of them might trap.
        const float lower = truncated + static_cast<float>(-static_cast<std::int32_t>(truncated > shifted));
        const float below = lower > most ? most : lower;
        const float bounded = below < -most ? -most : below;
        codes[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(bounded));
    }
}

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
#elif defined(THINWIRE_LANES)
        done = numel / kNibbles * kNibbles;
        unpack_nibbles(in, done, codes);
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
        return block.poisoned ? value_of(kPoisonedScale) : 0.0F;
    }
    if (format.bits == 8) {  // codes of eight bits are the bytes of the wire
        return quantize(block.x, numel, format, block.largest, position, seed, reinterpret_cast<std::int8_t*>(out));
    }
    const float scale = format.search ? search_codes(format.bits, block.x, numel, signed_max(block.largest), codes)
                                      : quantize(block.x, numel, format, block.largest, position, seed, codes);
    pack_codes(codes, numel, format.bits, out);
    return scale;
}

// So many blocks are encoded together where that is possible.
constexpr int kTogether = 8;

#if defined(THINWIRE_AVX512) || defined(THINWIRE_LANES)

// Every step waits for the sums of the one before; with two under way the processor has something to do meanwhile.
template <class Source, std::int64_t kBlock>
void encode_two_fours(const char* values, std::int64_t block, std::uint8_t* out, float* scales) {
    FourBlocks<Source, kBlock> first(values, block);
    FourBlocks<Source, kBlock> second(values + 4 * block * Source::kBytes, block);
    first.measure();
    second.measure();
    first.round();
    second.round();
    first.search();
    second.search();
    first.write(out, scales);
    second.write(out + 2 * block, scales + 4);
}

// Eight blocks of int4 by the search of rule 4.
template <class Source>
void encode_eight_int4(const char* values, std::int64_t block, std::uint8_t* out, float* scales) {
    if (block == 256) {
        encode_two_fours<Source, 256>(values, block, out, scales);
    } else {
        encode_two_fours<Source, 0>(values, block, out, scales);
    }
}

template <class Source>
void encode_eight(const void* x, const BlockFormat& format, std::uint8_t* out, float* scales) {
    const auto* values = static_cast<const char*>(x);
    if (format.bits == 4) {
        encode_eight_int4<Source>(values, format.block, out, scales);
        return;
    }
    encode_four_int8<Source>(values, format.block, out, scales);
    encode_four_int8<Source>(values + 4 * format.block * Source::kBytes, format.block, out + 4 * format.block,
                             scales + 4);
}

// Encodes kTogether whole blocks and returns true, or leaves them to encode_block.
bool encode_together(const void* x, DType dtype, const BlockFormat& format, std::uint8_t* out, float* scales) {
    const bool is_fit = format.bits == 8 || (format.bits == 4 && format.search);
    if (!is_fit || format.stochastic || format.block % 128 != 0) {
        return false;
    }
    if (dtype == DType::bfloat16 && !format.hadamard) {
        encode_eight<BFloat16>(x, format, out, scales);
        return true;
    }
#ifdef THINWIRE_LANES
    if (dtype == DType::float16 && !format.hadamard) {
        encode_eight<Float16>(x, format, out, scales);
        return true;
    }
#endif
    alignas(64) float widened[kTogether * kMostBlock];
    const float* values = load_values(x, kTogether * format.block, dtype, widened);
    if (format.hadamard) {
        for (std::int64_t at = 0; at < kTogether * format.block; at += format.block) {
            rotate(values + at, format.block, widened + at);  // all of a poisoned block turns into Inf and NaN
        }
        values = widened;
    }
    encode_eight<Float32>(values, format, out, scales);
    return true;
}

#else

bool encode_together(const void*, DType, const BlockFormat&, std::uint8_t*, float*) {
    return false;
}

#endif

template <bool kAdd>
void scale_codes(const std::int8_t* codes, std::int64_t numel, float scale, float* out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        const float value = static_cast<float>(codes[i]) * scale;
        out[i] = kAdd ? out[i] + value : value;
    }
}

// By a scale that is finite, as no product is NaN then.
void scale_codes_to_bf16(const std::int8_t* codes, std::int64_t numel, float scale, std::uint16_t* out) {
    for (std::int64_t i = 0; i < numel; ++i) {
        out[i] = bf16_of_number(static_cast<float>(codes[i]) * scale);
    }
}

// Codes of four bits, by a scale that is finite, to 16 bits: sixteen values are all that there are. Returns how many
// values are done.
std::int64_t decode_nibbles(const std::uint8_t* in, std::int64_t numel, float scale, void* out, DType dtype) {
#ifdef THINWIRE_LANES
    std::int8_t codes[16];
    float scaled[16];
    std::uint16_t values[16];
    for (int i = 0; i < 16; ++i) {
        codes[i] = static_cast<std::int8_t>(i < 8 ? i : i - 16);
    }
    scale_codes<false>(codes, 16, scale, scaled);
    store_values(scaled, 16, values, dtype, false);
    const std::int64_t done = numel / kNibbles * kNibbles;
    look_up_nibbles(in, done, values, out);
    return done;
#else
    (void)in, (void)numel, (void)scale, (void)out, (void)dtype;
    return 0;
#endif
}

// `codes` are those of `numel` values, in bytes.
void decode_codes(const std::int8_t* codes, std::int64_t numel, float scale, void* out, DType dtype, bool add) {
    alignas(64) float values[kMostBlock];
    const bool is_finite = (bits_of(scale) & 0x7fffffff) < 0x7f800000;
    if (dtype == DType::float32 && is_aligned<float>(out)) {
        if (add) {
            scale_codes<true>(codes, numel, scale, static_cast<float*>(out));
        } else {
            scale_codes<false>(codes, numel, scale, static_cast<float*>(out));
        }
    } else if (dtype == DType::bfloat16 && is_finite && is_aligned<std::uint16_t>(out)) {
        scale_codes_to_bf16(codes, numel, scale, static_cast<std::uint16_t*>(out));
    } else {
        scale_codes<false>(codes, numel, scale, values);
        if (dtype == DType::float16 && is_finite) {
            narrow_numbers_to_fp16(values, numel, out);
        } else {
            store_values(values, numel, out, dtype, add);
        }
    }
}

void decode_values(const std::uint8_t* in, std::int64_t numel, const BlockFormat& format, float scale, void* out,
                   DType dtype, bool add) {
    alignas(64) std::int8_t unpacked[kMostBlock];
    const bool is_rotated = format.hadamard && numel == format.block;
    if (format.bits == 4 && !is_rotated && dtype != DType::float32 && (bits_of(scale) & 0x7fffffff) < 0x7f800000) {
        const std::int64_t done = decode_nibbles(in, numel, scale, out, dtype);
        in += done / 2;
        out = offset(out, dtype, done);
        numel -= done;
    }
    const std::int8_t* codes = unpacked;
    if (format.bits == 8) {
        codes = reinterpret_cast<const std::int8_t*>(in);
    } else {
        unpack_codes(in, numel, format.bits, unpacked);
    }
    if (is_rotated) {
        alignas(64) float values[kMostBlock];
        rotate_back(codes, numel, scale, values);
        store_values(values, numel, out, dtype, add);
    } else {
        decode_codes(codes, numel, scale, out, dtype, add);
    }
}

// ------------------------------------------------------------------------------------------------ the kernels

void encode_blocks(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, std::int64_t position,
                   std::uint32_t seed, void* codes, void* scales) {
    const std::int64_t step = kTogether * format.block;
    for (std::int64_t first = 0; first < numel; first += step) {
        const std::int64_t end = numel - first < step ? numel : first + step;
        auto* out = static_cast<std::uint8_t*>(codes) + first * format.bits / 8;
        float scale_of[kTogether];
        const bool done = end == first + step && encode_together(offset(x, dtype, first), dtype, format, out, scale_of);
        int num_blocks = 0;
        for (std::int64_t at = first; at < end; at += format.block, ++num_blocks) {
            if (!done) {
                const std::int64_t count = end - at < format.block ? end - at : format.block;
                scale_of[num_blocks] = encode_block(offset(x, dtype, at), dtype, count, format, position + at, seed,
                                                    out + (at - first) * format.bits / 8);
            }
        }
        copy(static_cast<char*>(scales) + first / format.block * 4, scale_of, 4 * num_blocks);
    }
}

void decode_blocks(const void* codes, const void* scales, std::int64_t numel, const BlockFormat& format, void* out,
                   DType dtype, bool add) {
    const auto* in = static_cast<const std::uint8_t*>(codes);
    for (std::int64_t at = 0; at < numel; at += format.block) {
        const std::int64_t count = numel - at < format.block ? numel - at : format.block;
        float scale;
        copy(&scale, static_cast<const char*>(scales) + at / format.block * 4, sizeof scale);
        decode_values(in + at * format.bits / 8, count, format, scale, offset(out, dtype, at), dtype, add);
    }
}

Largest largest_in(const void* x, DType dtype, std::int64_t numel) {
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

float encode_part(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, const Largest& largest,
                  std::int64_t position, std::uint32_t seed, void* codes) {
    auto* out = static_cast<std::uint8_t*>(codes);
    if (is_poisoned(largest) || largest.magnitude == 0) {
        zero(out, (numel * format.bits + 7) / 8);
        return is_poisoned(largest) ? value_of(kPoisonedScale) : 0.0F;
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

}  // namespace

extern const BlockKernels kBlock = {
    .encode = encode_blocks, .decode = decode_blocks, .largest = largest_in, .encode_part = encode_part};

}  // namespace thinwire::THINWIRE_TARGET

#else  // messages and threads

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "codec_kinds.hpp"
#include "pool.hpp"
#include "sizes.hpp"
#include "target.hpp"

namespace thinwire {

THINWIRE_KERNELS(BlockKernels, kBlock, kernels)

namespace {

Largest larger(const Largest& a, const Largest& b) {
    if (a.magnitude != b.magnitude) {
        return a.magnitude > b.magnitude ? a : b;
    }
    return {a.magnitude, a.positive || b.positive};
}

// A scale for each block: any whole blocks are a range.
class PerBlock : public FixedFormat {
public:
    explicit PerBlock(const BlockFormat& format) : format_(format) {}

    std::int64_t wire_bytes(std::int64_t numel) const final {
        return aligned(scales_at(numel) + 4 * num_scales(numel));
    }

    std::int64_t granule() const final {
        return format_.block;
    }

    // The bytes between the codes and the scales, and after the scales.
    void pad(std::int64_t numel, char* wire) const final {
        if (numel == 0) {
            return;
        }
        const std::int64_t code_bytes = ceil_div(numel * format_.bits, 8);
        const std::int64_t end = scales_at(numel) + 4 * num_scales(numel);
        std::memset(wire + code_bytes, 0, static_cast<std::size_t>(scales_at(numel) - code_bytes));
        std::memset(wire + end, 0, static_cast<std::size_t>(wire_bytes(numel) - end));
    }

    void encode_range(const void* x, DType dtype, std::int64_t first, std::int64_t count, std::int64_t numel,
                      char* wire, std::uint32_t seed) const override {
        kernels().encode(x, dtype, count, format_, first, seed, codes_at(wire, first),
                         wire + scales_at(numel) + first / format_.block * 4);
    }

    void decode_range(const char* wire, std::int64_t first, std::int64_t count, std::int64_t numel, void* out,
                      DType dtype, bool add) const override {
        kernels().decode(codes_at(wire, first), wire + scales_at(numel) + first / format_.block * 4, count, format_,
                         out, dtype, add);
    }

protected:
    const BlockFormat format_;

    std::int64_t scales_at(std::int64_t numel) const {
        return aligned(ceil_div(numel * format_.bits, 8));
    }

    template <class Byte>
    Byte* codes_at(Byte* wire, std::int64_t first) const {
        return wire + first * format_.bits / 8;
    }

private:
    virtual std::int64_t num_scales(std::int64_t numel) const {
        return ceil_div(numel, format_.block);
    }
};

// One scale for the message, which depends on every value.
class PerTensor final : public PerBlock {
public:
    using PerBlock::PerBlock;

    bool needs_all_values() const override {
        return true;
    }

    void encode_whole(const void* x, DType dtype, std::int64_t numel, char* wire, std::uint32_t seed,
                      int threads) const override {
        const auto at = [&](std::int64_t first) { return static_cast<const char*>(x) + first * bytes_of(dtype); };
        Largest largest = {0, false};
        std::mutex mutex;
        for_pieces(numel, kPiece, threads, [&](std::int64_t first, std::int64_t count) {
            const Largest part = kernels().largest(at(first), dtype, count);
            const std::lock_guard lock(mutex);
            largest = larger(largest, part);
        });
        for_pieces(numel, kPiece, threads, [&](std::int64_t first, std::int64_t count) {
            const float scale =
                kernels().encode_part(at(first), dtype, count, format_, largest, first, seed, codes_at(wire, first));
            if (first == 0) {
                std::memcpy(wire + scales_at(numel), &scale, sizeof scale);
            }
        });
    }

    void decode_range(const char* wire, std::int64_t first, std::int64_t count, std::int64_t numel, void* out,
                      DType dtype, bool add) const override {
        for (std::int64_t at = 0; at < count; at += kMostBlock) {
            kernels().decode(codes_at(wire, first + at), wire + scales_at(numel), std::min(kMostBlock, count - at),
                             format_, static_cast<char*>(out) + at * bytes_of(dtype), dtype, add);
        }
    }

private:
    std::int64_t num_scales(std::int64_t numel) const override {
        return std::min<std::int64_t>(numel, 1);
    }
};

// bits, block (0: one scale for the message), and whether the scale is searched for, blocks are rotated, and values
// are rounded at random.
std::unique_ptr<const FixedFormat> make(std::span<const std::int64_t> parameters) {
    check_parameters("block", parameters, 5);
    const std::int64_t bits = parameters[0];
    const std::int64_t block = parameters[1];
    const bool search = parameters[2] != 0;
    const bool hadamard = parameters[3] != 0;
    const bool stochastic = parameters[4] != 0;
    const bool power_of_two = (block & (block - 1)) == 0;
    if (bits < 2 || bits > 8 || block < 0 || block > kMostBlock || block % 8 != 0 || (search && bits > 5) ||
        (block == 0 && (search || hadamard)) || (hadamard && !power_of_two) || (search && stochastic)) {
        throw std::invalid_argument("no block format has " + std::to_string(bits) + " bits in blocks of " +
                                    std::to_string(block) + " with these options");
    }
    const BlockFormat format = {static_cast<int>(bits), block == 0 ? kMostBlock : block, search, hadamard, stochastic};
    if (block == 0) {
        return std::make_unique<PerTensor>(format);
    }
    return std::make_unique<PerBlock>(format);
}

Parameters draw(const Draw& number) {
    const std::int64_t bits = number(2, 8);
    const bool stochastic = number(0, 1) != 0;
    const bool search = bits <= 5 && !stochastic;
    switch (number(0, 3)) {
        case 0:
            return {bits, 0, 0, 0, stochastic};
        case 1:
            return {bits, 8 * number(1, kMostBlock / 8), search, 0, stochastic};
        case 2:
            return {bits, 8 * number(1, 40), search, 0, stochastic};
        default:
            return {bits, std::int64_t{8} << number(0, 10), search, number(0, 1), stochastic};
    }
}

}  // namespace

namespace codecs {
extern const CodecKind block = {"block", make, nullptr, draw};
}

}  // namespace thinwire

#endif
