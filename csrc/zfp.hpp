// ZFP at a fixed rate, one dimension (docs/wire-format.md).
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire {

// The exact size of the wire: blocks of 4 values, `maxbits` bits each, up to a multiple of 8 bytes.
std::int64_t zfp_wire_bytes(std::int64_t numel, int maxbits);

// Both throw std::invalid_argument for a size, a number of bits or a dtype that does not fit.
void zfp_encode(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire, std::int64_t wire_bytes,
                int threads);

// With `add`, which needs float32, values are added to what `out` holds.
void zfp_decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, int maxbits, void* out, DType dtype,
                bool add, int threads);

}  // namespace thinwire
