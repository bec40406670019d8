#include "codec.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.hpp"
#include "sizes.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

// Values between decoding and encoding in the fused forms: 16 KiB of fp32, half of a first-level cache.
constexpr std::int64_t kTile = 4096;

}  // namespace

Codec::Codec(const std::string& name, std::span<const std::int64_t> parameters)
    : format_(make_fixed(name, parameters)) {}

std::int64_t Codec::wire_bytes(std::int64_t numel) const {
    return format_->wire_bytes(numel);
}

void Codec::check(std::int64_t numel, std::int64_t nbytes) const {
    if (numel < 0 || numel > kMostValues || nbytes != wire_bytes(numel)) {
        throw std::invalid_argument("a message of " + std::to_string(numel) + " values does not have " +
                                    std::to_string(nbytes) + " bytes");
    }
}

void Codec::sum_range(const Sum& sum, std::int64_t first, std::int64_t values, float* out) const {
    const auto* wires = static_cast<const char*>(sum.wires);
    if (sum.onto != nullptr) {
        const auto* onto = static_cast<const char*>(sum.onto) + first * bytes_of(sum.onto_dtype);
        value_kernels().cast(onto, sum.onto_dtype, values, out, DType::float32, false);
    }
    for (std::int64_t row = 0; row < sum.count; ++row) {
        format_->decode_range(wires + row * sum.stride, first, values, sum.numel, out, DType::float32,
                              row > 0 || sum.onto != nullptr);
    }
    if (sum.factor != 1.0F) {
        value_kernels().multiply(out, values, sum.factor);
    }
}

// ------------------------------------------------------------------------------------------------ messages

void Codec::encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t nbytes, std::uint32_t seed,
                   int threads) const {
    check(numel, nbytes);
    auto* to = static_cast<char*>(wire);
    format_->pad(numel, to);
    if (format_->needs_all_values()) {
        format_->encode_whole(x, dtype, numel, to, seed, threads);
        return;
    }
    for_pieces(numel, multiple(format_->granule(), kPiece), threads, [&](std::int64_t first, std::int64_t count) {
        format_->encode_range(static_cast<const char*>(x) + first * bytes_of(dtype), dtype, first, count, numel, to,
                              seed);
    });
}

void Codec::encode_feedback(const void* x, DType dtype, std::int64_t numel, float* lost, double gain, void* wire,
                            std::int64_t nbytes, std::uint32_t seed, int threads) const {
    check(numel, nbytes);
    auto* to = static_cast<char*>(wire);
    const auto add = [&](std::int64_t first, std::int64_t count) {
        value_kernels().cast(static_cast<const char*>(x) + first * bytes_of(dtype), dtype, count, lost + first,
                             DType::float32, true);
    };
    const auto take_off = [&](std::int64_t first, std::int64_t count) {
        if (gain == 1.0) {
            value_kernels().multiply(lost + first, count, -1.0F);
        } else {  // a step further with every line: x + lost, ..., ((1 - gain) x - (x + lost)) / gain
            value_kernels().multiply(lost + first, count, static_cast<float>(-1.0 / (1.0 - gain)));
            add(first, count);
            value_kernels().multiply(lost + first, count, static_cast<float>((1.0 - gain) / gain));
        }
        format_->decode_range(to, first, count, numel, lost + first, DType::float32, true);
        value_kernels().multiply(lost + first, count, static_cast<float>(-gain));
    };
    if (format_->needs_all_values()) {
        for_pieces(numel, kPiece, threads, add);
        encode(lost, DType::float32, numel, wire, nbytes, seed, threads);
        for_pieces(numel, kPiece, threads, take_off);
        return;
    }
    format_->pad(numel, to);
    const std::int64_t tile = multiple(format_->granule(), kTile);
    for_pieces(numel, multiple(tile, kPiece), threads, [&](std::int64_t first, std::int64_t count) {
        for (std::int64_t at = first; at < first + count; at += tile) {
            const std::int64_t here = std::min(tile, first + count - at);
            add(at, here);
            format_->encode_range(lost + at, DType::float32, at, here, numel, to, seed);
            take_off(at, here);
        }
    });
}

void Codec::decode(const void* wire, std::int64_t nbytes, std::int64_t numel, void* out, DType dtype, bool add,
                   int threads) const {
    check(numel, nbytes);
    if (add && dtype != DType::float32) {
        throw std::invalid_argument("only float32 can be added to");
    }
    for_pieces(numel, multiple(format_->granule(), kPiece), threads, [&](std::int64_t first, std::int64_t count) {
        format_->decode_range(static_cast<const char*>(wire), first, count, numel,
                              static_cast<char*>(out) + first * bytes_of(dtype), dtype, add);
    });
}

void Codec::decode_sum(const Sum& sum, void* out, DType dtype, int threads) const {
    check(sum.numel, wire_bytes(sum.numel));
    const std::int64_t tile = multiple(format_->granule(), kTile);
    const std::int64_t piece = multiple(tile, kPiece);
    for_pieces(sum.numel, piece, threads, [&](std::int64_t first, std::int64_t values) {
        std::vector<float> total(dtype == DType::float32 ? 0 : static_cast<std::size_t>(std::min(tile, values)));
        for (std::int64_t at = first; at < first + values; at += tile) {
            const std::int64_t here = std::min(tile, first + values - at);
            char* to = static_cast<char*>(out) + at * bytes_of(dtype);
            const bool direct = dtype == DType::float32 && reinterpret_cast<std::uintptr_t>(to) % alignof(float) == 0;
            if (direct) {
                sum_range(sum, at, here, reinterpret_cast<float*>(to));
            } else {
                total.resize(static_cast<std::size_t>(tile));
                sum_range(sum, at, here, total.data());
                value_kernels().cast(total.data(), DType::float32, here, to, dtype, false);
            }
        }
    });
}

void Codec::decode_sum_encode(const Sum& sum, const Codec& to, void* wire, std::int64_t nbytes, std::uint32_t seed,
                              int threads) const {
    check(sum.numel, wire_bytes(sum.numel));
    to.check(sum.numel, nbytes);
    const FixedFormat& next = *to.format_;
    if (next.needs_all_values()) {
        std::vector<float> total(static_cast<std::size_t>(sum.numel));
        decode_sum(sum, total.data(), DType::float32, threads);
        to.encode(total.data(), DType::float32, sum.numel, wire, nbytes, seed, threads);
        return;
    }
    auto* out = static_cast<char*>(wire);
    next.pad(sum.numel, out);
    const std::int64_t both = std::lcm(format_->granule(), next.granule());
    const std::int64_t tile = multiple(both, kTile);
    for_pieces(sum.numel, multiple(tile, kPiece), threads, [&](std::int64_t first, std::int64_t values) {
        std::vector<float> total(static_cast<std::size_t>(std::min(tile, values)));
        for (std::int64_t at = first; at < first + values; at += tile) {
            const std::int64_t here = std::min(tile, first + values - at);
            sum_range(sum, at, here, total.data());
            next.encode_range(total.data(), DType::float32, at, here, sum.numel, out, seed);
        }
    });
}

}  // namespace thinwire
