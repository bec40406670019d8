// exp3: lossless, for bf16 values (docs/wire-format.md).
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire {

// The largest message for so many values.
std::int64_t exp3_wire_bytes(std::int64_t numel);

// Writes nothing beyond exp3_wire_bytes; returns the message's bytes. Throws std::invalid_argument if `capacity` is
// less than that.
std::int64_t exp3_encode(const void* x, std::int64_t numel, void* wire, std::int64_t capacity, int threads);

// The `numel` values of a message, widened or rounded to `dtype`; or added to what `out` holds, which must be float32.
// Other bytes may follow the message. Throws std::invalid_argument if it is truncated or corrupt; `out` may have been
// written to by then.
void exp3_decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, void* out, DType dtype, bool add,
                 int threads);

}  // namespace thinwire
