// Arithmetic of sizes, for code that is compiled once.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire {

// No product of a count of values below this with a small number overflows.
constexpr std::int64_t kMostValues = std::int64_t{1} << 55;

constexpr std::int64_t bytes_of(DType dtype) {
    return dtype == DType::float32 ? 4 : 2;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}

// The least multiple of `granule` that is `least` or more.
constexpr std::int64_t multiple(std::int64_t granule, std::int64_t least) {
    return ceil_div(least, granule) * granule;
}

// Parts of a message begin at multiples of 16 bytes.
constexpr std::int64_t aligned(std::int64_t nbytes) {
    return multiple(16, nbytes);
}

}  // namespace thinwire
