// Bit planes of ZFP blocks: four coefficients of 32 bits, from the most significant plane down.
//
// A plane is a nibble, one bit per coefficient. Of the planes before it is known how many coefficients, n, have had a
// one bit; those come as they are. Then, until none is left: a bit that tells whether any further coefficient has its
// first one here, and if so, zeros up to that coefficient and a one (left out for the last, which it must be). That is
// all the state there is, so one step from (n, nibble) to (code, length, n) is a look-up.
#pragma once

#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kGroup = 64;  // blocks that are coded together

// The longest code of a plane: n = 0 and four ones.
constexpr int kMaxCode = 7;

// What follows the 9 bits of a block's header, LSB first, for every block of a group.
struct Payloads {
    alignas(64) std::uint64_t low[kGroup];
    alignas(64) std::uint64_t high[kGroup];

    // Where a block's are.
    static constexpr int slot(int block) {
#ifdef __AVX512VBMI__
        return block % 8 * 8 + block / 8;
#else
        return block;
#endif
    }
};

// Nibbles of all planes of a group: plane 4 * p + j of block b is bits 4 * p.. of words[j][b].
struct Planes {
    alignas(64) std::uint32_t words[4][kGroup];
};

// The look-ups. Entries are wide, so that loops over blocks become gathers; n stands in them in the place where the
// next index needs it.
struct Tables {
    // By n * 16 + nibble: the code, its length << 8, and the next n * 16 << 16.
    alignas(64) std::uint32_t encode[5 * 16] = {};
    // By n * 128 + the next seven bits of the stream: the nibble, its code's length << 8, and the next n * 128 << 16.
    alignas(64) std::uint32_t decode[5 * 128] = {};

    constexpr Tables() {
        for (std::uint32_t n = 0; n <= 4; ++n) {
            for (std::uint32_t nibble = 0; nibble < 16; ++nibble) {
                enter(n, nibble);
            }
        }
    }

private:
    constexpr void enter(std::uint32_t n, std::uint32_t nibble) {
        std::uint32_t code = nibble & ((1u << n) - 1);
        std::uint32_t length = n;
        std::uint32_t at = n;
        while (at < 4) {
            const std::uint32_t any = nibble >> at != 0;
            code |= any << length++;
            if (!any) {
                break;
            }
            while (at < 3) {
                const std::uint32_t bit = nibble >> at & 1;
                code |= bit << length++;
                if (bit) {
                    break;
                }
                ++at;
            }
            ++at;
        }
        encode[n * 16 + nibble] = code | length << 8 | at * 16 << 16;
        for (std::uint32_t rest = 0; rest < 1u << (kMaxCode - length); ++rest) {
            decode[n * 128 + (rest << length | code)] = nibble | length << 8 | at * 128 << 16;
        }
    }
};

constexpr Tables kTables;

// Where a payload ends amid a plane, the decoder of libzfp takes missing bits for zeros, with one exception: when the
// end comes while it looks for the coefficient of an announced one, the one is where it stopped looking. Zeros in the
// place of the missing bits make that search run on to coefficient 3, and each step it takes too far is one bit
// `beyond` the end.
std::uint32_t truncated(std::uint32_t nibble, std::uint32_t beyond) {
    return (nibble & 7) | (nibble & 8) >> (beyond < 31 ? beyond : 31);
}

std::uint32_t most(std::uint32_t a, std::uint32_t b) {
    return a > b ? a : b;
}

std::uint32_t least(std::uint32_t a, std::uint32_t b) {
    return a < b ? a : b;
}

// Encodes the planes of a group in at most `budget` bits a block; the bits from there on are anything.
[[maybe_unused]] void encode_planes(const Planes& planes, std::uint32_t budget, Payloads& payloads) {
    alignas(64) std::uint32_t state[kGroup] = {};  // n * 16
    alignas(64) std::uint32_t filled[kGroup] = {};
    for (int block = 0; block < kGroup; ++block) {
        payloads.low[block] = payloads.high[block] = 0;
    }
    std::uint32_t least_filled = 0;
    for (int p = 28; p >= 0 && least_filled < budget; p -= 4) {
        // Four planes have at most 28 bits; they join the payload together.
        alignas(64) std::uint32_t codes[kGroup] = {};
        alignas(64) std::uint32_t lengths[kGroup] = {};
        for (int j = 3; j >= 0; --j) {
            for (int block = 0; block < kGroup; ++block) {
                const std::uint32_t entry = kTables.encode[state[block] | (planes.words[j][block] >> p & 15)];
                codes[block] |= (entry & 255) << lengths[block];
                lengths[block] += entry >> 8 & 255;
                state[block] = entry >> 16;
            }
        }
        least_filled = ~0u;
        for (int block = 0; block < kGroup; ++block) {
            const std::uint64_t code = codes[block];
            // Where the payload is full already, what is beyond its end does not matter.
            const std::uint64_t at = filled[block];
            const std::uint64_t here = code << (at & 63);
            const std::uint64_t spilled = code >> 1 >> (63 - (at & 63));
            payloads.low[block] |= at < 64 ? here : 0;
            payloads.high[block] |= at < 64 ? spilled : here;
            filled[block] = least(filled[block] + lengths[block], budget);
            least_filled = least(least_filled, filled[block]);
        }
    }
}

// Decodes payloads that are zero from bit `budget` on, and uses them up.
[[maybe_unused]] void decode_planes(Payloads& payloads, std::uint32_t budget, Planes& planes) {
    alignas(64) std::uint32_t state[kGroup] = {};  // n * 128
    alignas(64) std::uint32_t used[kGroup] = {};
    for (int j = 0; j < 4; ++j) {
        for (int block = 0; block < kGroup; ++block) {
            planes.words[j][block] = 0;
        }
    }
    std::uint32_t least_used = 0;
    for (int p = 28; p >= 0 && least_used < budget; p -= 4) {
        alignas(64) std::uint32_t window[kGroup];
        alignas(64) std::uint32_t before[kGroup];
        for (int block = 0; block < kGroup; ++block) {
            window[block] = static_cast<std::uint32_t>(payloads.low[block]);
            before[block] = used[block];
        }
        for (int j = 3; j >= 0; --j) {
            for (int block = 0; block < kGroup; ++block) {
                const std::uint32_t entry = kTables.decode[state[block] | (window[block] & 127)];
                const std::uint32_t length = entry >> 8 & 255;
                window[block] >>= length;
                used[block] += length;
                const std::uint32_t beyond = most(used[block], budget) - budget;
                planes.words[j][block] |= truncated(entry & 15, beyond) << p;
                state[block] = entry >> 16;
            }
        }
        least_used = ~0u;
        for (int block = 0; block < kGroup; ++block) {
            const std::uint64_t length = used[block] - before[block];
            payloads.low[block] = payloads.low[block] >> length | payloads.high[block] << 1 << (63 - length);
            payloads.high[block] >>= length;
            least_used = least(least_used, used[block]);
        }
    }
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
