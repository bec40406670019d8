// ZFP at a fixed rate, one dimension, bit by bit as libzfp 1.0.1 writes it (docs/wire-format.md).
//
// Blocks of four values are coded in groups of 64: their bits are a whole number of 64-bit words for any rate. Within
// a group, values lie one array per place in the block, so that the loops below are vectors of blocks.
#include "kernels/kernels.hpp"

namespace thinwire {

struct ZfpKernels {
    void (*encode)(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire);
    void (*decode)(const void* wire, std::int64_t numel, int maxbits, void* out, DType dtype, bool add);
};

}  // namespace thinwire

#ifdef THINWIRE_TARGET  // the loops, once for each instruction set

#include "kernels/values.hpp"
#include "kernels/zfp_planes.hpp"
#ifdef __AVX512VBMI__
#include "kernels/zfp_planes_avx512.hpp"
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kBlock = 4;
constexpr int kGroupValues = kGroup * kBlock;
constexpr int kHeaderBits = 9;
constexpr int kMaxBits = 128;

constexpr std::uint32_t kInfinity = 0x7f800000;
constexpr std::uint32_t kNaN = 0x7fc00000;
constexpr std::uint32_t kNegabinary = 0xaaaaaaaa;

// A header is a bit that tells whether any value is not zero, and the block's exponent. Exponent 0 is not otherwise
// used: it marks blocks with a value that is not finite.
constexpr std::uint32_t kPoison = 1;

// Up to this exponent libzfp's scale overflows to infinity, and x86 turns every product into this integer.
constexpr std::uint32_t kLastOverflow = 29;
constexpr std::uint32_t kOverflow = 0x80000000;

struct Headers {
    alignas(64) std::uint32_t bits[kGroup];
};

// Arithmetic of 32-bit integers as libzfp's: it wraps, and shifts keep the sign.
std::uint32_t half(std::uint32_t value) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(value) >> 1);
}

std::uint32_t integer(float value) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(value));
}

// One step of a 4 x 4 bit transposition: swaps the bits of a that `mask` << shift selects with those of b at `mask`.
void swap_bits(std::uint32_t& a, std::uint32_t& b, int shift, std::uint32_t mask) {
    const std::uint32_t differ = (a >> shift ^ b) & mask;
    b ^= differ;
    a ^= differ << shift;
}

// Between four coefficients and the nibbles of their planes; its own inverse.
void transpose(std::uint32_t& a, std::uint32_t& b, std::uint32_t& c, std::uint32_t& d) {
    swap_bits(a, b, 1, 0x55555555);
    swap_bits(c, d, 1, 0x55555555);
    swap_bits(a, c, 2, 0x33333333);
    swap_bits(b, d, 2, 0x33333333);
}

// Values (kGroupValues of them) to headers and planes.
void analyse(const float* values, Headers& headers, Planes& planes) {
    for (int block = 0; block < kGroup; ++block) {
        std::uint32_t bits[kBlock];
        std::uint32_t largest = 0;
        for (int i = 0; i < kBlock; ++i) {
            bits[i] = __builtin_bit_cast(std::uint32_t, values[block * kBlock + i]);
            const std::uint32_t magnitude = bits[i] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        // libzfp's exponent is that of a fraction below one, and the least one for denormals.
        const std::uint32_t exponent = (largest >> 23) + 1;
        const bool finite = largest < kInfinity;
        const bool scaled = finite && exponent > kLastOverflow;
        const std::uint32_t otherwise = finite && largest != 0 ? kOverflow : 0;
        const std::uint32_t header = largest != 0 ? exponent << 1 | 1 : 0;
        headers.bits[block] = finite ? header : kPoison;

        // 2 ^ (30 - exponent): the largest value has 30 bits.
        const auto scale = __builtin_bit_cast(float, (scaled ? 157 + 127 - exponent : 127) << 23);
        std::uint32_t c[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            const std::uint32_t scaled_value = integer(__builtin_bit_cast(float, scaled ? bits[i] : 0) * scale);
            c[i] = scaled ? scaled_value : otherwise;
        }
        // libzfp's fwd_lift.
        c[0] = half(c[0] + c[3]);
        c[3] -= c[0];
        c[2] = half(c[2] + c[1]);
        c[1] -= c[2];
        c[0] = half(c[0] + c[2]);
        c[2] -= c[0];
        c[3] = half(c[3] + c[1]);
        c[1] -= c[3];
        c[3] += half(c[1]);
        c[1] -= half(c[3]);
        for (std::uint32_t& coefficient : c) {
            coefficient = (coefficient + kNegabinary) ^ kNegabinary;
        }
        transpose(c[0], c[1], c[2], c[3]);
        for (int i = 0; i < kBlock; ++i) {
            planes.words[i][block] = c[i];
        }
    }
}

// Headers and planes back to values.
void synthesise(const Headers& headers, const Planes& planes, float* values) {
    for (int block = 0; block < kGroup; ++block) {
        std::uint32_t c[kBlock];
        for (int i = 0; i < kBlock; ++i) {
            c[i] = planes.words[i][block];
        }
        transpose(c[0], c[1], c[2], c[3]);
        for (std::uint32_t& coefficient : c) {
            coefficient = (coefficient ^ kNegabinary) - kNegabinary;
        }
        // libzfp's inv_lift.
        c[1] += half(c[3]);
        c[3] -= half(c[1]);
        c[1] += c[3];
        c[3] = (c[3] << 1) - c[1];
        c[2] += c[0];
        c[0] = (c[0] << 1) - c[2];
        c[1] += c[2];
        c[2] = (c[2] << 1) - c[1];
        c[3] += c[0];
        c[0] = (c[0] << 1) - c[3];

        // 2 ^ (exponent - 30), which for small exponents is denormal, and zero below 2 ^ -149.
        const std::uint32_t header = headers.bits[block];
        const std::uint32_t exponent = header >> 1;
        const std::uint32_t normal = (exponent - 30) << 23;
        const std::uint32_t denormal = std::uint32_t{exponent >= 8} << ((exponent - 8) & 31);
        const auto scale = __builtin_bit_cast(float, exponent > 30 ? normal : denormal);
        const std::uint32_t poison = header == kPoison ? kNaN : 0;
        for (int i = 0; i < kBlock; ++i) {
            const float value = scale * static_cast<float>(static_cast<std::int32_t>(c[i]));
            // A poisoned block's values are zero up to here.
            values[block * kBlock + i] = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, value) | poison);
        }
    }
}

// The mask of the low `count` bits, for any count.
std::uint64_t mask_of(int count) {
    return count <= 0 ? 0 : ~std::uint64_t{0} >> (count < 64 ? 64 - count : 0);
}

// Headers and payloads to `maxbits` words.
void pack(const Headers& headers, const Payloads& payloads, int maxbits, std::uint64_t* words) {
    const std::uint64_t low_mask = mask_of(maxbits - kHeaderBits);
    const std::uint64_t high_mask = mask_of(maxbits - kHeaderBits - 64);
    std::uint64_t word = 0;
    int filled = 0;
    const auto put = [&](std::uint64_t bits, int count) {
        word |= bits << filled;
        filled += count;
        if (filled >= 64) {
            *words++ = word;
            filled -= 64;
            // Shifted twice, because a shift by 64 is undefined.
            word = bits >> (count - filled - 1) >> 1;
        }
    };
    for (int block = 0; block < kGroup; ++block) {
        const std::uint64_t low = payloads.low[Payloads::slot(block)] & low_mask;
        const std::uint64_t high = payloads.high[Payloads::slot(block)] & high_mask;
        put(headers.bits[block] | low << kHeaderBits, maxbits < 64 ? maxbits : 64);
        if (maxbits > 64) {
            put(high << kHeaderBits | low >> (64 - kHeaderBits), maxbits - 64);
        }
    }
}

// `maxbits` words, and two more that may be read, to headers and payloads.
void unpack(const std::uint64_t* words, int maxbits, Headers& headers, Payloads& payloads) {
    const std::uint64_t low_mask = mask_of(maxbits - kHeaderBits);
    const std::uint64_t high_mask = mask_of(maxbits - kHeaderBits - 64);
    const auto word_at = [&](int offset) {
        // Shifted twice, because a shift by 64 is undefined.
        return words[offset / 64] >> offset % 64 | words[offset / 64 + 1] << 1 << (63 - offset % 64);
    };
    for (int block = 0; block < kGroup; ++block) {
        const std::uint64_t low = word_at(block * maxbits);
        const std::uint64_t high = maxbits > 64 ? word_at(block * maxbits + 64) : 0;
        const auto header = static_cast<std::uint32_t>(low & mask_of(kHeaderBits));
        headers.bits[block] = header;
        // A payload counts only behind a header that announces values.
        const std::uint64_t announced = (header & 1) != 0 && header != kPoison ? ~std::uint64_t{0} : 0;
        payloads.low[Payloads::slot(block)] = (low >> kHeaderBits | high << (64 - kHeaderBits)) & low_mask & announced;
        payloads.high[Payloads::slot(block)] = high >> kHeaderBits & high_mask & announced;
    }
}

// libzfp's fill of a block that ends early.
void pad(float* values, std::int64_t count) {
    float* block = values + count / kBlock * kBlock;
    switch (count % kBlock) {
        case 1:
            block[1] = block[0];
            [[fallthrough]];
        case 2:
            block[2] = block[1];
            [[fallthrough]];
        case 3:
            block[3] = block[0];
            break;
        default:
            break;
    }
}

std::int64_t wire_bytes(std::int64_t values, int maxbits) {
    return ((values + kBlock - 1) / kBlock * maxbits + 63) / 64 * 8;
}

void encode(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire) {
    auto* to = static_cast<char*>(wire);
    const auto budget = static_cast<std::uint32_t>(maxbits - kHeaderBits);
    alignas(64) float widened[kGroupValues] = {};
    alignas(64) std::uint64_t words[kMaxBits];
    Headers headers;
    Planes planes;
    Payloads payloads;
    for (std::int64_t first = 0; first < numel; first += kGroupValues) {
        const std::int64_t count = numel - first < kGroupValues ? numel - first : kGroupValues;
        const float* values = load_values(offset(x, dtype, first), count, dtype, widened);
        if (count < kGroupValues) {
            alignas(64) float last[kGroupValues] = {};
            copy(last, values, 4 * count);
            pad(last, count);
            analyse(last, headers, planes);
        } else {
            analyse(values, headers, planes);
        }
#ifdef __AVX512VBMI__
        encode_planes_avx512(planes, budget, payloads);
#else
        encode_planes(planes, budget, payloads);
#endif
        pack(headers, payloads, maxbits, words);
        const std::int64_t written = wire_bytes(count, maxbits);
        copy(to, words, written);
        to += written;
    }
}

void decode(const void* wire, std::int64_t numel, int maxbits, void* out, DType dtype, bool add) {
    const auto* from = static_cast<const char*>(wire);
    const auto budget = static_cast<std::uint32_t>(maxbits - kHeaderBits);
    alignas(64) float values[kGroupValues];
    alignas(64) std::uint64_t words[kMaxBits + 2] = {};
    Headers headers;
    Planes planes;
    Payloads payloads;
    for (std::int64_t first = 0; first < numel; first += kGroupValues) {
        const std::int64_t count = numel - first < kGroupValues ? numel - first : kGroupValues;
        const std::int64_t read = wire_bytes(count, maxbits);
        copy(words, from, read);
        from += read;
        unpack(words, maxbits, headers, payloads);
#ifdef __AVX512VBMI__
        decode_planes_avx512(payloads, budget, planes);
#else
        decode_planes(payloads, budget, planes);
#endif
        synthesise(headers, planes, values);
        store_values(values, count, offset(out, dtype, first), dtype, add);
    }
}

}  // namespace

extern const ZfpKernels kZfp = {.encode = encode, .decode = decode};

}  // namespace thinwire::THINWIRE_TARGET

#else  // messages

#include <stdexcept>
#include <string>

#include "codec_kinds.hpp"
#include "sizes.hpp"
#include "target.hpp"

namespace thinwire {

THINWIRE_KERNELS(ZfpKernels, kZfp, kernels)

namespace {

class Zfp final : public FixedFormat {
public:
    explicit Zfp(int block_bits) : block_bits_(block_bits) {}

    std::int64_t wire_bytes(std::int64_t numel) const override {
        return ceil_div(ceil_div(numel, 4) * block_bits_, 64) * 8;
    }

    std::int64_t granule() const override {
        return 256;  // 64 blocks of any number of bits are whole 64-bit words
    }

    void encode_range(const void* x, DType dtype, std::int64_t first, std::int64_t count, std::int64_t, char* wire,
                      std::uint32_t) const override {
        kernels().encode(x, dtype, count, block_bits_, wire + first / 4 * block_bits_ / 8);
    }

    void decode_range(const char* wire, std::int64_t first, std::int64_t count, std::int64_t, void* out, DType dtype,
                      bool add) const override {
        kernels().decode(wire + first / 4 * block_bits_ / 8, count, block_bits_, out, dtype, add);
    }

private:
    const int block_bits_;
};

// The bits of a block of four values.
std::unique_ptr<const FixedFormat> make(std::span<const std::int64_t> parameters) {
    check_parameters("zfp", parameters, 1);
    if (parameters[0] < 9 || parameters[0] > 128) {
        throw std::invalid_argument("a zfp block takes 9 to 128 bits, not " + std::to_string(parameters[0]));
    }
    return std::make_unique<Zfp>(static_cast<int>(parameters[0]));
}

Parameters draw(const Draw& number) {
    return {number(9, 128)};
}

}  // namespace

namespace codecs {
extern const CodecKind zfp = {"zfp", make, nullptr, draw};
}

}  // namespace thinwire

#endif
