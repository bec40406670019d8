// Codecs of fixed length: whole messages, sums of messages, and what stands between the hops of a reduction.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "codec_kinds.hpp"

namespace thinwire {

// `factor` times the sum of `onto` and of `count` messages of `numel` values that lie `stride` bytes apart. Without
// `onto`, which holds values of `onto_dtype`, the sum begins with the first message.
struct Sum {
    const void* wires;
    std::int64_t count;
    std::int64_t stride;
    std::int64_t numel;
    const void* onto;
    DType onto_dtype;
    float factor;
};

// A codec of fixed length (docs/wire-format.md). All sizes are checked; what does not fit throws
// std::invalid_argument. `threads` bounds the threads a call uses, the calling one included.
class Codec {
public:
    // The name of a codec kind of fixed length, and its parameters.
    Codec(const std::string& name, std::span<const std::int64_t> parameters);

    std::int64_t wire_bytes(std::int64_t numel) const;

    void encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t wire_bytes, std::uint32_t seed,
                int threads) const;

    // The message of `x` and of `lost`, added in float32; `lost` becomes (1 - gain) of itself and `gain` times what of
    // that sum is not in the message.
    void encode_feedback(const void* x, DType dtype, std::int64_t numel, float* lost, double gain, void* wire,
                         std::int64_t wire_bytes, std::uint32_t seed, int threads) const;

    // With `add`, which is for float32, values are added to what `out` holds.
    void decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, void* out, DType dtype, bool add,
                int threads) const;

    void decode_sum(const Sum& sum, void* out, DType dtype, int threads) const;

    // The message that `to` makes of such a sum.
    void decode_sum_encode(const Sum& sum, const Codec& to, void* wire, std::int64_t wire_bytes, std::uint32_t seed,
                           int threads) const;

private:
    std::shared_ptr<const FixedFormat> format_;

    void check(std::int64_t numel, std::int64_t wire_bytes) const;
    void sum_range(const Sum& sum, std::int64_t first, std::int64_t values, float* out) const;
};

}  // namespace thinwire
