// The kernels of `delta` (docs/wire-format.md): one block, on one thread.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire {

// The numbers are those of messages.
enum class DeltaType : int { float32 = 0, bfloat16 = 1, float16 = 2, float8_e4m3 = 3, float8_e5m2 = 4 };

constexpr int kDeltaTypes = 5;

// Classes whose places are found 64 at a time.
constexpr int kMostCommon = 12;

struct DeltaChange {
    std::uint32_t rank;  // in its class
    std::uint32_t step;  // as a word
};

// Memory for the work on one block, of which little is touched where little changes. Each part has a number for each
// value, rounded up to 64, and for 64 more, unless it says otherwise.
struct DeltaRoom {
    std::uint64_t* flags;  // a bit for each value, and for 128 more
    std::uint64_t* masks;  // kMostCommon bits for each value
    std::uint8_t* classes;
    DeltaChange* changes;   // kMostCommon + 2 for each value
    std::int64_t stride;    // of the parts of `changes`
    std::uint32_t* places;  // of changed values, class by class
    std::uint32_t* sizes;   // of their steps
    std::uint32_t* big;     // ranks of steps above one among the changes of their class
    std::uint32_t* others;  // places of values of classes that are not common, first in their order,
    std::uint32_t* sorted;  // then class by class
};

struct DeltaKernels {
    std::uint64_t (*checksum)(const void* bytes, std::int64_t nbytes);
    // The bytes of a block's message, which has fewer than `limit` and has room for 8 more; otherwise -1.
    std::int64_t (*encode)(DeltaType type, const void* before, const void* after, std::int64_t numel,
                           const DeltaRoom& room, char* to, std::int64_t limit);
    // Returns whether these bytes, which 8 zeros follow, are the message of a block of such an old tensor.
    bool (*apply)(DeltaType type, const void* before, std::int64_t numel, const char* body, std::int64_t nbytes,
                  const DeltaRoom& room, void* after);
};

}  // namespace thinwire
