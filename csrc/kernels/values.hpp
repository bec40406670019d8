// Values of the three dtypes, one at a time and many. Included by kernels only: everything has internal linkage, see
// kernels.hpp.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace thinwire::THINWIRE_TARGET {
namespace {

[[maybe_unused]] std::int32_t bits_of(float value) {
    return __builtin_bit_cast(std::int32_t, value);
}

[[maybe_unused]] float value_of(std::int32_t bits) {
    return __builtin_bit_cast(float, bits);
}

[[maybe_unused]] float value_of(std::uint32_t bits) {
    return __builtin_bit_cast(float, bits);
}

// To nearest even, of what is not NaN.
[[maybe_unused]] std::uint16_t bf16_of_number(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// To nearest even; NaN stays NaN.
[[maybe_unused]] std::uint16_t bf16_of(float value) {
    return (bits_of(value) & 0x7fffffff) > 0x7f800000 ? std::uint16_t{0x7fc0} : bf16_of_number(value);
}

// fp16 in and out. ARM converts in hardware. x86 does so in vectors alone (F16C, below): compilers call their library
// for one value or, like Clang 14, have no _Float16 there, so these are bits and exact products instead (Maratyszcza,
// FP16).
#ifdef __aarch64__

[[maybe_unused]] float float_of_fp16(std::uint16_t half) {
    return static_cast<float>(__builtin_bit_cast(__fp16, half));
}

// To nearest even.
[[maybe_unused]] std::uint16_t fp16_of(float value) {
    return __builtin_bit_cast(std::uint16_t, static_cast<__fp16>(value));
}

#else

// By bits: between two floats GCC keeps a branch, as one of them might trap, and does not vectorise the loop around it.
[[maybe_unused]] std::uint32_t bits_if(bool condition, std::uint32_t a, std::uint32_t b) {
    const std::uint32_t mask = 0 - static_cast<std::uint32_t>(condition);
    return (mask & a) | (~mask & b);
}

[[maybe_unused]] float float_of_fp16(std::uint16_t half) {
    constexpr std::uint32_t kSmallestNormal = 0x400U << 17;
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half) << 17;  // without the sign
    // The exponent is moved by 224, which makes Inf and NaN of fp16 those of fp32, then by -112.
    const float normal = value_of((magnitude >> 4) + (0xe0U << 23)) * 0x1p-112F;
    const float denormal = value_of((magnitude >> 17) | (126U << 23)) - 0.5F;
    return value_of(sign | bits_if(magnitude < kSmallestNormal, __builtin_bit_cast(std::uint32_t, denormal),
                                   __builtin_bit_cast(std::uint32_t, normal)));
}

// To nearest even.
[[maybe_unused]] std::uint16_t fp16_of(float value) {
    const auto bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t magnitude = bits << 1;
    // Values beyond the range become Inf here. Adding a power of two whose last place is that of the fp16 rounds.
    const float bounded = (value_of(bits & 0x7fffffffU) * 0x1p112F) * 0x1p-110F;
    const std::uint32_t exponent = magnitude & 0xff000000U;
    const std::uint32_t bias = exponent < 0x71000000U ? 0x71000000U : exponent;
    const auto sum = __builtin_bit_cast(std::uint32_t, value_of((bias >> 1) + 0x07800000U) + bounded);
    const std::uint32_t rounded = ((sum >> 13) & 0x7c00U) + (sum & 0x0fffU);
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000U) | bits_if(magnitude > 0xff000000U, 0x7e00U, rounded));
}

#endif

template <class T>
bool is_aligned(const void* memory) {
    return reinterpret_cast<std::uintptr_t>(memory) % alignof(T) == 0;
}

[[maybe_unused]] void copy(void* to, const void* from, std::int64_t nbytes) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(nbytes));
}

[[maybe_unused]] void zero(void* to, std::int64_t nbytes) {
    __builtin_memset(to, 0, static_cast<std::size_t>(nbytes));
}

[[maybe_unused]] std::int64_t item_bytes(DType dtype) {
    return dtype == DType::float32 ? 4 : 2;
}

[[maybe_unused]] const void* offset(const void* x, DType dtype, std::int64_t values) {
    return static_cast<const char*>(x) + values * item_bytes(dtype);
}

[[maybe_unused]] void* offset(void* x, DType dtype, std::int64_t values) {
    return static_cast<char*>(x) + values * item_bytes(dtype);
}

[[maybe_unused]] void widen_bf16(const void* x, std::int64_t numel, float* out) {
    if (is_aligned<std::uint16_t>(x)) {
        const auto* halves = static_cast<const std::uint16_t*>(x);
        for (std::int64_t i = 0; i < numel; ++i) {
            out[i] = value_of(static_cast<std::uint32_t>(halves[i]) << 16);
        }
        return;
    }
    for (std::int64_t i = 0; i < numel; ++i) {
        std::uint16_t half;
        __builtin_memcpy(&half, static_cast<const char*>(x) + 2 * i, 2);
        out[i] = value_of(static_cast<std::uint32_t>(half) << 16);
    }
}

[[maybe_unused]] void widen_fp16(const void* x, std::int64_t numel, float* out) {
    const auto* in = static_cast<const char*>(x);
    std::int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= numel; i += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i));
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(halves));
    }
#endif
    for (; i < numel; ++i) {
        std::uint16_t half;
        __builtin_memcpy(&half, in + 2 * i, 2);
        out[i] = float_of_fp16(half);
    }
}

// Of numbers; NaN becomes some NaN.
[[maybe_unused]] void narrow_numbers_to_fp16(const float* x, std::int64_t numel, void* out) {
    auto* to = static_cast<char*>(out);
    std::int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= numel; i += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), halves);
    }
#endif
    for (; i < numel; ++i) {
        const std::uint16_t half = fp16_of(x[i]);
        __builtin_memcpy(to + 2 * i, &half, 2);
    }
}

[[maybe_unused]] void narrow_to_fp16(const float* x, std::int64_t numel, void* out) {
    constexpr std::uint16_t kNaN = 0x7e00;
    narrow_numbers_to_fp16(x, numel, out);
    std::int32_t is_any_nan = 0;
    for (std::int64_t i = 0; i < numel; ++i) {
        is_any_nan |= x[i] != x[i] ? 1 : 0;
    }
    for (std::int64_t i = 0; is_any_nan != 0 && i < numel; ++i) {
        if (x[i] != x[i]) {
            __builtin_memcpy(static_cast<char*>(out) + 2 * i, &kNaN, 2);
        }
    }
}

// The values as fp32: where they are, if they are that already and aligned, otherwise in `widened`.
[[maybe_unused]] const float* load_values(const void* x, std::int64_t numel, DType dtype, float* widened) {
    switch (dtype) {
        case DType::float32:
            if (is_aligned<float>(x)) {
                return static_cast<const float*>(x);
            }
            copy(widened, x, 4 * numel);
            break;
        case DType::bfloat16:
            widen_bf16(x, numel, widened);
            break;
        case DType::float16:
            widen_fp16(x, numel, widened);
            break;
    }
    return widened;
}

// Values to `out`, rounded to its dtype; with `add`, which is for fp32 alone, added to it.
[[maybe_unused]] void store_values(const float* x, std::int64_t numel, void* out, DType dtype, bool add) {
    auto* to = static_cast<char*>(out);
    switch (dtype) {
        case DType::float32:
            for (std::int64_t i = 0; i < numel; ++i) {
                float value = x[i];
                if (add) {
                    float before;
                    __builtin_memcpy(&before, to + 4 * i, 4);
                    value = before + value;
                }
                __builtin_memcpy(to + 4 * i, &value, 4);
            }
            break;
        case DType::bfloat16:
            for (std::int64_t i = 0; i < numel; ++i) {
                const std::uint16_t half = bf16_of(x[i]);
                __builtin_memcpy(to + 2 * i, &half, 2);
            }
            break;
        case DType::float16:
            narrow_to_fp16(x, numel, out);
            break;
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
