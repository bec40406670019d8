// What every way to encode a block has in common (docs/wire-format.md). Included by codecs/block.cpp and its headers.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire {

// intN:BLOCK and intN:tensor. A block is at most kMostBlock values, so that one fits the first-level cache.
constexpr std::int64_t kMostBlock = 8192;

struct BlockFormat {
    int bits;            // 2 to 8
    std::int64_t block;  // values a scale serves, a multiple of 8
    bool search;         // the scale of least squared error, for 5 bits and fewer
    bool hadamard;       // blocks are rotated; `block` is a power of two
    bool stochastic;
};

// The largest magnitude among values, as the bits of an fp32 without sign (infinities and NaN above all others), and
// whether a value without minus sign has it.
struct Largest {
    std::int32_t magnitude;
    bool positive;
};

}  // namespace thinwire

#ifdef THINWIRE_TARGET
namespace thinwire::THINWIRE_TARGET {
namespace {

// Rule 1: the scale of a block with a value that is not finite.
constexpr std::uint32_t kPoisonedScale = 0x7fc00000;

// Rule 2: a block with a smaller maximum is quantised as if this were it, so that no reciprocal overflows.
constexpr float kSmallestMax = 0x1p-112F;

// Four times, without a loop: what is kept for each row stays in registers.
template <class Body>
__attribute__((always_inline)) inline void for_rows(const Body& body) {
    body(0);
    body(1);
    body(2);
    body(3);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
#endif
