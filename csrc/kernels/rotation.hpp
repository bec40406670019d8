// The rotation of a block (docs/wire-format.md, rule 6): signs, and a Walsh-Hadamard transform, whose order of
// butterflies is part of the format. Included by block.cpp only.
#pragma once

#include <cstdint>

#include "kernels/values.hpp"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

// As many as a register of the target holds: compilers take wider vectors apart, number by number.
#if defined(__AVX512F__)
#define THINWIRE_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
constexpr int kLanes = 16;
#elif defined(__AVX2__)
#define THINWIRE_LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
constexpr int kLanes = 8;
#else
#define THINWIRE_LANE_NUMBERS 0, 1, 2, 3
constexpr int kLanes = 4;
#endif

using Vector = float __attribute__((vector_size(4 * kLanes)));
using Bits = std::uint32_t __attribute__((vector_size(4 * kLanes)));

template <int... kNumbers>
struct LaneNumbers {};

Vector load_vector(const float* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

void store_vector(float* to, Vector value) {
    __builtin_memcpy(to, &value, sizeof value);
}

// ------------------------------------------------------------------------------------------------ signs

constexpr std::uint32_t kSignFactor = 0x9E3779B1U;
constexpr std::uint32_t kSignOffset = 0x7F4A7C15U;

float sign_of(std::uint32_t position) {
    return ((position * kSignFactor + kSignOffset) >> 31) != 0 ? -1.0F : 1.0F;
}

// The signs of one vector after another.
class Signs {
public:
    Vector apply(Vector value) {
        const Bits changed = __builtin_bit_cast(Bits, value) ^ (hash_ & 0x80000000U);
        hash_ += static_cast<std::uint32_t>(kLanes) * kSignFactor;
        return __builtin_bit_cast(Vector, changed);
    }

private:
    Bits hash_ = Bits{THINWIRE_LANE_NUMBERS} * kSignFactor + kSignOffset;
};

// ------------------------------------------------------------------------------------------------ transform

// partner + value in the lower lane of a pair, partner - value in the upper one.
template <int kDistance, int... kNumbers>
Vector combined(Vector value, LaneNumbers<kNumbers...>) {
    const Vector partner = __builtin_shufflevector(value, value, (kNumbers ^ kDistance)...);
#if defined(__FMA__)  // the products are exact
    constexpr Vector kSigns = {((kNumbers & kDistance) != 0 ? -1.0F : 1.0F)...};
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(value, kSigns, partner);
#else
    return _mm256_fmadd_ps(value, kSigns, partner);
#endif
#else
    constexpr Bits kUpper = {((kNumbers & kDistance) != 0 ? 0x80000000U : 0U)...};
    return partner + __builtin_bit_cast(Vector, __builtin_bit_cast(Bits, value) ^ kUpper);
#endif
}

// The butterflies within a vector.
template <int kDistance = 1>
Vector combined(Vector value) {
    if constexpr (kDistance == kLanes) {
        return value;
    } else {
        return combined<2 * kDistance>(combined<kDistance>(value, LaneNumbers<THINWIRE_LANE_NUMBERS>{}));
    }
}

void combine(Vector& upper, Vector& lower) {
    const Vector sum = upper + lower;
    lower = upper - lower;
    upper = sum;
}

void combine_four(Vector (&x)[4]) {
    combine(x[0], x[1]);
    combine(x[2], x[3]);
    combine(x[0], x[2]);
    combine(x[1], x[3]);
}

// Butterflies at `distance` and at twice that.
void combine_twice(float* x, std::int64_t block, std::int64_t distance) {
    for (std::int64_t four = 0; four < block; four += 4 * distance) {
        for (std::int64_t i = four; i < four + distance; i += kLanes) {
            Vector values[4];
            for (int k = 0; k < 4; ++k) {
                values[k] = load_vector(x + i + k * distance);
            }
            combine_four(values);
            for (int k = 0; k < 4; ++k) {
                store_vector(x + i + k * distance, values[k]);
            }
        }
    }
}

void combine_once(float* x, std::int64_t block, std::int64_t distance) {
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

// The unnormalised transform of a block of at least 4 * kLanes values, which load(at) gives from place `at` on, a
// vector at a time and in their order.
template <class Load>
void transform(const Load& load, std::int64_t block, float* out) {
    for (std::int64_t at = 0; at < block; at += 4 * kLanes) {
        Vector values[4];
        for (int k = 0; k < 4; ++k) {
            values[k] = combined(load(at + k * kLanes));
        }
        combine_four(values);
        for (int k = 0; k < 4; ++k) {
            store_vector(out + at + k * kLanes, values[k]);
        }
    }
    std::int64_t distance = 4 * kLanes;
    for (; 4 * distance <= block; distance *= 4) {
        combine_twice(out, block, distance);
    }
    if (distance < block) {
        combine_once(out, block, distance);
    }
}

// The same of a small block, in place.
void transform_small(float* x, std::int64_t block) {
    for (std::int64_t distance = 1; distance < block; distance *= 2) {
        combine_once(x, block, distance);
    }
}

// ------------------------------------------------------------------------------------------------ both ways

// `rotated` may be `x`.
void rotate(const float* x, std::int64_t block, float* rotated) {
    const float factor = 1.0F / static_cast<float>(block);
    if (block < 4 * kLanes) {
        for (std::int64_t i = 0; i < block; ++i) {
            rotated[i] = x[i] * factor * sign_of(static_cast<std::uint32_t>(i));
        }
        transform_small(rotated, block);
        return;
    }
    Signs signs;
    transform([&](std::int64_t at) { return signs.apply(load_vector(x + at) * factor); }, block, rotated);
}

void rotate_back(const std::int8_t* codes, std::int64_t block, float scale, float* out) {
    for (std::int64_t i = 0; i < block; ++i) {
        out[i] = static_cast<float>(codes[i]);
    }
    if (block < 4 * kLanes) {
        transform_small(out, block);
        for (std::int64_t i = 0; i < block; ++i) {
            out[i] = out[i] * sign_of(static_cast<std::uint32_t>(i)) * scale;
        }
        return;
    }
    transform([&](std::int64_t at) { return load_vector(out + at); }, block, out);
    Signs signs;
    for (std::int64_t at = 0; at < block; at += kLanes) {
        store_vector(out + at, signs.apply(load_vector(out + at)) * scale);
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
