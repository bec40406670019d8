// MPC: lossless, for words of 32 bits (docs/wire-format.md).
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire {

// The largest message for so many bytes.
std::int64_t mpc_wire_bytes(std::int64_t nbytes);

// Writes nothing beyond the message; returns its bytes. Throws std::invalid_argument if `capacity` is less than
// mpc_wire_bytes.
std::int64_t mpc_encode(const void* x, std::int64_t nbytes, void* wire, std::int64_t capacity, int threads);

// The `numel` values of a message of `encoded` ones, rounded to `dtype`; or added to what `out` holds, which must be
// float32. Other bytes may follow the message. Throws std::invalid_argument if it is truncated or corrupt.
void mpc_decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, DType encoded, void* out, DType dtype,
                bool add, int threads);

}  // namespace thinwire
