// A checksum of 64 bits (docs/wire-format.md, Deltas), as fast as memory is read. Included by kernels only.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

using Four = std::uint32_t __attribute__((vector_size(16)));

// 16 lanes.
struct Lanes {
    Four fours[4];

    void mix(const char* stripe) {
        for (int i = 0; i < 4; ++i) {
            Four words;
            __builtin_memcpy(&words, stripe + 16 * i, sizeof words);
            const Four sum = fours[i] + words * 0x85ebca77U;
            fours[i] = (sum << 13 | sum >> 19) * 0x9e3779b1U;
        }
    }
};

std::uint64_t checksum(const void* bytes, std::int64_t nbytes) {
    constexpr std::int64_t kStripe = sizeof(Lanes);
    const auto* at = static_cast<const char*>(bytes);
    Lanes lanes;
    for (unsigned i = 0; i < 4; ++i) {
        lanes.fours[i] = Four{4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4} * 0x9e3779b1U;
    }
    std::int64_t left = nbytes;
    for (; left >= kStripe; left -= kStripe, at += kStripe) {
        lanes.mix(at);
    }
    if (left > 0) {
        char last[kStripe] = {};
        __builtin_memcpy(last, at, static_cast<std::size_t>(left));
        lanes.mix(last);
    }
    auto folded = static_cast<std::uint64_t>(nbytes);
    for (const Four four : lanes.fours) {
        for (int i = 0; i < 4; i += 2) {
            folded = (folded ^ (four[i] | std::uint64_t{four[i + 1]} << 32)) * 0x9fb21c651e98df25U;
            folded ^= folded >> 32;
        }
    }
    return folded;
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
