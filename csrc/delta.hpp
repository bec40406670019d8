// Messages of `delta` (docs/wire-format.md), which turn an old tensor into a new one: no codec in the sense of
// codec_kinds.hpp, as both sides need the old tensor. All functions throw std::invalid_argument for what does not fit.
#pragma once

#include <cstdint>

#include "kernels/delta.hpp"

namespace thinwire {

// Of a value.
std::int64_t bytes_of(DeltaType type);

// The largest message for so many values in blocks of 2^log.
std::int64_t delta_bytes(DeltaType type, std::int64_t numel, int log);

// Returns the message's bytes. Writes nothing beyond delta_bytes; throws if `capacity` is less.
std::int64_t encode_delta(DeltaType type, const void* before, const void* after, std::int64_t numel, int log,
                          void* wire, std::int64_t capacity, int threads);

// Other bytes may follow the message. Throws if the message is truncated or corrupt, or made against another tensor;
// `after`, which does not overlap the rest, may have been written to by then.
void apply_delta(DeltaType type, const void* before, std::int64_t numel, const void* wire, std::int64_t wire_bytes,
                 void* after, int threads);

// Throws std::invalid_argument unless a dtype has this number.
DeltaType delta_type(std::int64_t number);

}  // namespace thinwire
