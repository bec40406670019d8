// What every way to encode a block has in common (docs/wire-format.md). Included by block.cpp and its headers.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

// Rule 1: the scale of a block with a value that is not finite.
constexpr std::uint32_t kPoisonedScale = 0x7fc00000;

// Rule 2: a block with a smaller maximum is quantised as if this were it, so that no reciprocal overflows.
constexpr float kSmallestMax = 0x1p-112F;

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
