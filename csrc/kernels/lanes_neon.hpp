// The operations of lanes.hpp with NEON.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/lanes.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kWidth = 16;

using Lanes = uint8x16_t;
using Floats = float32x4_t;

Lanes load_lanes(const void* from) {
    return vld1q_u8(static_cast<const std::uint8_t*>(from));
}

void store_lanes(void* to, Lanes lanes) {
    vst1q_u8(static_cast<std::uint8_t*>(to), lanes);
}

Lanes zeros() {
    return vdupq_n_u8(0);
}

Lanes all_bytes(int value) {
    return vdupq_n_u8(static_cast<std::uint8_t>(value));
}

int16x8_t words(Lanes a) {
    return vreinterpretq_s16_u8(a);
}

int8x16_t signed_bytes(Lanes a) {
    return vreinterpretq_s8_u8(a);
}

Lanes lanes(int16x8_t a) {
    return vreinterpretq_u8_s16(a);
}

Lanes lanes(int8x16_t a) {
    return vreinterpretq_u8_s8(a);
}

Lanes all_words(int value) {
    return lanes(vdupq_n_s16(static_cast<std::int16_t>(value)));
}

Lanes all_numbers(std::int32_t value) {
    return vreinterpretq_u8_s32(vdupq_n_s32(value));
}

Floats all_floats(float value) {
    return vdupq_n_f32(value);
}

// ------------------------------------------------------------------------------------------------ rounding

// x * factor, rounded to nearest even, as words with saturation: those of `a` before those of `b`.
Lanes rounded_words(Floats a, Floats b, Floats factor) {
    return lanes(
        vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(vmulq_f32(a, factor))), vcvtnq_s32_f32(vmulq_f32(b, factor))));
}

// Words as bytes with saturation, in the same order.
Lanes bytes_of(Lanes a, Lanes b) {
    return lanes(vqmovn_high_s16(vqmovn_s16(words(a)), words(b)));
}

// ------------------------------------------------------------------------------------------------ words and bytes

// a * b / 2^15, rounded, halves upwards.
Lanes rounded_products(Lanes a, Lanes b) {
    return lanes(vqrdmulhq_s16(words(a), words(b)));
}

Lanes magnitudes_of_bytes(Lanes a) {
    return lanes(vabsq_s8(signed_bytes(a)));
}

Lanes smaller_bytes(Lanes a, Lanes b) {
    return vminq_u8(a, b);
}

// `value`, plus one where a byte of `a` is negative.
Lanes one_more_where_negative(int value, Lanes a) {
    return vsraq_n_u8(all_bytes(value), a, 7);
}

// Bytes between two numbers.
Lanes limited_bytes(Lanes a, int least, int most) {
    return lanes(vmaxq_s8(vminq_s8(signed_bytes(a), signed_bytes(all_bytes(most))), signed_bytes(all_bytes(least))));
}

// ------------------------------------------------------------------------------------------------ sums

// Sums of products of bytes of which one is below 128, in 16 bits: as many steps as keep each below 2^15.
Lanes add_products(Lanes sums, Lanes a, Lanes b) {
    const uint16x8_t low = vmlal_u8(vreinterpretq_u16_u8(sums), vget_low_u8(a), vget_low_u8(b));
    return vreinterpretq_u8_u16(vmlal_high_u8(low, a, b));
}

// Sums of 16 bits, each below 2^15, added to others of 32 bits.
Lanes add_sums(Lanes total, Lanes sums) {
    return vreinterpretq_u8_u32(vpadalq_u16(vreinterpretq_u32_u8(total), vreinterpretq_u16_u8(sums)));
}

// Bytes added to sums of 32 bits.
Lanes add_bytes(Lanes total, Lanes bytes) {
    return vreinterpretq_u8_u32(vpadalq_u16(vreinterpretq_u32_u8(total), vpaddlq_u8(bytes)));
}

Lanes sum(Lanes a, Lanes b) {
    return vreinterpretq_u8_u32(vaddq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

Lanes larger(Lanes a, Lanes b) {
    return vreinterpretq_u8_s32(vmaxq_s32(vreinterpretq_s32_u8(a), vreinterpretq_s32_u8(b)));
}

Lanes larger_unsigned(Lanes a, Lanes b) {
    return vreinterpretq_u8_u32(vmaxq_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

// 32 or 64 bits of both in turn: those of the lower halves, and those of the upper ones.
template <Lanes (*kJoin)(Lanes, Lanes)>
Lanes joined_singles(Lanes a, Lanes b) {
    return kJoin(vreinterpretq_u8_u32(vzip1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))),
                 vreinterpretq_u8_u32(vzip2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b))));
}

Lanes lower_halves(Lanes a, Lanes b) {
    return vreinterpretq_u8_u64(vzip1q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

Lanes upper_halves(Lanes a, Lanes b) {
    return vreinterpretq_u8_u64(vzip2q_u64(vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b)));
}

// One number from the 32-bit lanes of each of four registers.
template <Lanes (*kJoin)(Lanes, Lanes)>
Ints4 reduced(const Lanes (&lanes)[4]) {
    const Lanes first = joined_singles<kJoin>(lanes[0], lanes[1]);
    const Lanes second = joined_singles<kJoin>(lanes[2], lanes[3]);
    return __builtin_bit_cast(Ints4, kJoin(lower_halves(first, second), upper_halves(first, second)));
}

// ------------------------------------------------------------------------------------------------ sources

// kWidth values in four parts, in their order. in_order and pairs_in_order are for instruction sets on which another
// order is cheaper.
struct Parts {
    Floats part[4];
};

struct AnySource {
    static Lanes in_order(Lanes bytes) {
        return bytes;
    }

    static Lanes pairs_in_order(Lanes bytes) {
        return bytes;
    }
};

struct Float32 : AnySource {
    static constexpr std::int64_t kBytes = 4;

    static Parts load(const char* x) {
        return {{four(x), four(x + 16), four(x + 32), four(x + 48)}};
    }

    // Per 32-bit lane, the largest of the bits as signed and as unsigned integers.
    static void largest(const char* x, std::int64_t numel, Lanes& most, Lanes& most_unsigned) {
        most = vreinterpretq_u8_s32(vdupq_n_s32(INT32_MIN));
        most_unsigned = zeros();
        for (std::int64_t i = 0; i < numel; i += 4) {
            const Lanes bits = load_lanes(x + 4 * i);
            most = larger(most, bits);
            most_unsigned = larger_unsigned(most_unsigned, bits);
        }
    }

    static Floats4 widened(Ints4 bits) {
        return __builtin_bit_cast(Floats4, bits);
    }

private:
    static Floats four(const char* x) {
        return vreinterpretq_f32_u8(load_lanes(x));
    }
};

// What dtypes of 16 bits have in common.
struct SixteenBits : AnySource {
    static constexpr std::int64_t kBytes = 2;

    static void largest(const char* x, std::int64_t numel, Lanes& most, Lanes& most_unsigned) {
        int16x8_t largest = vdupq_n_s16(INT16_MIN);
        uint16x8_t largest_unsigned = vdupq_n_u16(0);
        for (std::int64_t i = 0; i < numel; i += 8) {
            const Lanes bits = load_lanes(x + 2 * i);
            largest = vmaxq_s16(largest, words(bits));
            largest_unsigned = vmaxq_u16(largest_unsigned, vreinterpretq_u16_u8(bits));
        }
        most = larger(even(lanes(largest)), odd(lanes(largest)));
        const Lanes bits = vreinterpretq_u8_u16(largest_unsigned);
        most_unsigned = larger_unsigned(even(bits), odd(bits));
    }

protected:
    // The words at even or odd positions in the upper halves of 32 bits, above zeros.
    static Lanes even(Lanes bits) {
        return vreinterpretq_u8_u32(vshlq_n_u32(vreinterpretq_u32_u8(bits), 16));
    }

    static Lanes odd(Lanes bits) {
        return vreinterpretq_u8_u32(vandq_u32(vreinterpretq_u32_u8(bits), vdupq_n_u32(0xffff0000)));
    }
};

struct BFloat16 : SixteenBits {
    static Parts load(const char* x) {
        const uint16x8_t first = vreinterpretq_u16_u8(load_lanes(x));
        const uint16x8_t second = vreinterpretq_u16_u8(load_lanes(x + 16));
        return {{lower(first), upper(first), lower(second), upper(second)}};
    }

    static Floats4 widened(Ints4 bits) {
        return __builtin_bit_cast(Floats4, bits);
    }

private:
    static Floats lower(uint16x8_t bits) {
        return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
    }

    static Floats upper(uint16x8_t bits) {
        return vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
    }
};

struct Float16 : SixteenBits {
    static Parts load(const char* x) {
        const float16x8_t first = vreinterpretq_f16_u8(load_lanes(x));
        const float16x8_t second = vreinterpretq_f16_u8(load_lanes(x + 16));
        return {{vcvt_f32_f16(vget_low_f16(first)), vcvt_high_f32_f16(first), vcvt_f32_f16(vget_low_f16(second)),
                 vcvt_high_f32_f16(second)}};
    }

    static Floats4 widened(Ints4 bits) {
        Floats4 values;
        for (int i = 0; i < 4; ++i) {
            values[i] = float_of_fp16(static_cast<std::uint16_t>(bits[i] >> 16));
        }
        return values;
    }
};

// ------------------------------------------------------------------------------------------------ nibbles

// The pairs of two vectors of codes.
template <class Source>
Lanes packed_nibbles(Lanes first, Lanes second) {
    return vsliq_n_u8(vuzp1q_u8(first, second), vuzp2q_u8(first, second), 4);
}

Lanes low_nibbles(Lanes bytes) {
    return vandq_u8(bytes, all_bytes(15));
}

Lanes high_nibbles(Lanes bytes) {
    return vshrq_n_u8(bytes, 4);
}

// A table of sixteen bytes for looked_up.
Lanes table_of(const void* bytes) {
    return load_lanes(bytes);
}

Lanes looked_up(Lanes table, Lanes nibbles) {
    return vqtbl1q_u8(table, nibbles);
}

// The lower or the upper half of both, byte by byte or word by word in turn.
Lanes lower_bytes(Lanes a, Lanes b) {
    return vzip1q_u8(a, b);
}

Lanes upper_bytes(Lanes a, Lanes b) {
    return vzip2q_u8(a, b);
}

Lanes lower_words(Lanes a, Lanes b) {
    return lanes(vzip1q_s16(words(a), words(b)));
}

Lanes upper_words(Lanes a, Lanes b) {
    return lanes(vzip2q_s16(words(a), words(b)));
}

template <int kParts>
void store_in_turn(void* to, const Lanes (&parts)[kParts]) {
    for (int i = 0; i < kParts; ++i) {
        store_lanes(static_cast<char*>(to) + 16 * i, parts[i]);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
