#include "codec.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

// Values that one thread takes at a time: enough to outweigh the hand-over, few enough for its caches.
constexpr std::int64_t kPiece = 64 << 10;

// Values between decoding and encoding in the fused forms: 16 KiB of fp32, half of a first-level cache.
constexpr std::int64_t kTile = 4096;

constexpr std::int64_t kMostValues = std::int64_t{1} << 55;  // no product below overflows

constexpr std::int64_t aligned(std::int64_t nbytes) {
    return (nbytes + 15) / 16 * 16;
}

std::int64_t bytes_of(DType dtype) {
    return dtype == DType::float32 ? 4 : 2;
}

std::int64_t divided_up(std::int64_t count, std::int64_t by) {
    return (count + by - 1) / by;
}

// The least multiple of `granule` that is `least` or more.
std::int64_t multiple(std::int64_t granule, std::int64_t least) {
    return divided_up(least, granule) * granule;
}

// fn(first, count) for pieces of `piece` values, on several threads.
template <class Fn>
void for_pieces(std::int64_t numel, std::int64_t piece, int threads, const Fn& fn) {
    const std::int64_t pieces = divided_up(numel, piece);
    parallel_for(pieces, static_cast<int>(std::min<std::int64_t>(threads, pieces)),
                 [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t first = begin * piece; first < std::min(numel, end * piece); first += piece) {
                         fn(first, std::min(piece, numel - first));
                     }
                 });
}

Largest larger(const Largest& a, const Largest& b) {
    if (a.magnitude != b.magnitude) {
        return a.magnitude > b.magnitude ? a : b;
    }
    return {a.magnitude, a.positive || b.positive};
}

}  // namespace

// ------------------------------------------------------------------------------------------------ kinds

Codec Codec::cast(DType to) {
    Codec codec;
    codec.family_ = Family::cast;
    codec.to_ = to;
    return codec;
}

Codec Codec::block(int bits, std::int64_t block, bool search, bool hadamard, bool stochastic) {
    const bool power_of_two = (block & (block - 1)) == 0;
    if (bits < 2 || bits > 8 || block < 0 || block > kMostBlock || block % 8 != 0 || (search && bits > 5) ||
        (block == 0 && (search || hadamard)) || (hadamard && !power_of_two) || (search && stochastic)) {
        throw std::invalid_argument("no block format has " + std::to_string(bits) + " bits in blocks of " +
                                    std::to_string(block) + " with these options");
    }
    Codec codec;
    codec.family_ = Family::block;
    codec.per_tensor_ = block == 0;
    codec.format_ = {bits, block == 0 ? kMostBlock : block, search, hadamard, stochastic};
    return codec;
}

Codec Codec::zfp(int block_bits) {
    if (block_bits < 9 || block_bits > 128) {
        throw std::invalid_argument("a zfp block takes 9 to 128 bits, not " + std::to_string(block_bits));
    }
    Codec codec;
    codec.family_ = Family::zfp;
    codec.block_bits_ = block_bits;
    return codec;
}

// ------------------------------------------------------------------------------------------------ layout

std::int64_t Codec::scales_at(std::int64_t numel) const {
    return aligned((numel * format_.bits + 7) / 8);
}

std::int64_t Codec::wire_bytes(std::int64_t numel) const {
    switch (family_) {
        case Family::cast:
            return numel * bytes_of(to_);
        case Family::block: {
            const std::int64_t scales =
                per_tensor_ ? std::min<std::int64_t>(numel, 1) : divided_up(numel, format_.block);
            return aligned(scales_at(numel) + 4 * scales);
        }
        case Family::zfp:
            return divided_up(divided_up(numel, 4) * block_bits_, 64) * 8;
    }
    return 0;
}

// Ranges of a message that are written and read on their own begin at multiples of this many values.
std::int64_t Codec::granule(std::int64_t numel) const {
    switch (family_) {
        case Family::cast:
            return 1;
        case Family::block:
            return per_tensor_ ? multiple(kMostBlock, std::max<std::int64_t>(numel, 1)) : format_.block;
        case Family::zfp:
            return 256;  // 64 blocks of any number of bits are whole 64-bit words
    }
    return 1;
}

void Codec::check(std::int64_t numel, std::int64_t nbytes) const {
    if (numel < 0 || numel > kMostValues || nbytes != wire_bytes(numel)) {
        throw std::invalid_argument("a message of " + std::to_string(numel) + " values does not have " +
                                    std::to_string(nbytes) + " bytes");
    }
}

// What no range writes: the bytes between the codes and the scales, and after the scales.
void Codec::pad(std::int64_t numel, char* wire) const {
    if (family_ != Family::block || numel == 0) {
        return;
    }
    const std::int64_t code_bytes = (numel * format_.bits + 7) / 8;
    const std::int64_t scale_bytes = 4 * (per_tensor_ ? 1 : divided_up(numel, format_.block));
    std::memset(wire + code_bytes, 0, static_cast<std::size_t>(scales_at(numel) - code_bytes));
    const std::int64_t end = scales_at(numel) + scale_bytes;
    std::memset(wire + end, 0, static_cast<std::size_t>(wire_bytes(numel) - end));
}

// ------------------------------------------------------------------------------------------------ ranges

void Codec::encode_range(const void* x, DType dtype, std::int64_t first, std::int64_t count, std::int64_t numel,
                         char* wire, std::uint32_t seed) const {
    switch (family_) {
        case Family::cast:
            kernels().cast(x, dtype, count, wire + first * bytes_of(to_), to_, false);
            break;
        case Family::block:
            kernels().block_encode(x, dtype, count, format_, first, seed, wire + first * format_.bits / 8,
                                   wire + scales_at(numel) + first / format_.block * 4);
            break;
        case Family::zfp:
            kernels().zfp_encode(x, dtype, count, block_bits_, wire + first / 4 * block_bits_ / 8);
            break;
    }
}

void Codec::decode_range(const char* wire, std::int64_t first, std::int64_t count, std::int64_t numel, void* out,
                         DType dtype, bool add) const {
    switch (family_) {
        case Family::cast:
            kernels().cast(wire + first * bytes_of(to_), to_, count, out, dtype, add);
            break;
        case Family::block:
            if (per_tensor_) {
                for (std::int64_t at = 0; at < count; at += kMostBlock) {
                    kernels().block_decode(wire + (first + at) * format_.bits / 8, wire + scales_at(numel),
                                           std::min(kMostBlock, count - at), format_,
                                           static_cast<char*>(out) + at * bytes_of(dtype), dtype, add);
                }
            } else {
                kernels().block_decode(wire + first * format_.bits / 8,
                                       wire + scales_at(numel) + first / format_.block * 4, count, format_, out, dtype,
                                       add);
            }
            break;
        case Family::zfp:
            kernels().zfp_decode(wire + first / 4 * block_bits_ / 8, count, block_bits_, out, dtype, add);
            break;
    }
}

void Codec::sum_range(const char* wires, std::int64_t count, std::int64_t stride, std::int64_t first,
                      std::int64_t values, std::int64_t numel, float factor, float* out) const {
    for (std::int64_t row = 0; row < count; ++row) {
        decode_range(wires + row * stride, first, values, numel, out, DType::float32, row > 0);
    }
    if (factor != 1.0F) {
        kernels().multiply(out, values, factor);
    }
}

// ------------------------------------------------------------------------------------------------ messages

void Codec::encode_tensor(const void* x, DType dtype, std::int64_t numel, char* wire, std::uint32_t seed,
                          int threads) const {
    const auto at = [&](std::int64_t first) { return static_cast<const char*>(x) + first * bytes_of(dtype); };
    Largest largest = {0, false};
    std::mutex mutex;
    for_pieces(numel, kPiece, threads, [&](std::int64_t first, std::int64_t count) {
        const Largest part = kernels().block_largest(at(first), dtype, count);
        const std::lock_guard lock(mutex);
        largest = larger(largest, part);
    });
    for_pieces(numel, kPiece, threads, [&](std::int64_t first, std::int64_t count) {
        const float scale = kernels().block_encode_part(at(first), dtype, count, format_, largest, first, seed,
                                                        wire + first * format_.bits / 8);
        if (first == 0) {
            std::memcpy(wire + scales_at(numel), &scale, sizeof scale);
        }
    });
}

void Codec::encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t nbytes, std::uint32_t seed,
                   int threads) const {
    check(numel, nbytes);
    auto* to = static_cast<char*>(wire);
    pad(numel, to);
    if (per_tensor_) {
        encode_tensor(x, dtype, numel, to, seed, threads);
        return;
    }
    for_pieces(numel, multiple(granule(numel), kPiece), threads, [&](std::int64_t first, std::int64_t count) {
        encode_range(static_cast<const char*>(x) + first * bytes_of(dtype), dtype, first, count, numel, to, seed);
    });
}

void Codec::encode_feedback(const void* x, DType dtype, std::int64_t numel, float* lost, double gain, void* wire,
                            std::int64_t nbytes, std::uint32_t seed, int threads) const {
    check(numel, nbytes);
    auto* to = static_cast<char*>(wire);
    const auto add = [&](std::int64_t first, std::int64_t count) {
        kernels().cast(static_cast<const char*>(x) + first * bytes_of(dtype), dtype, count, lost + first,
                       DType::float32, true);
    };
    const auto take_off = [&](std::int64_t first, std::int64_t count) {
        if (gain == 1.0) {
            kernels().multiply(lost + first, count, -1.0F);
        } else {  // a step further with every line: x + lost, ..., ((1 - gain) x - (x + lost)) / gain
            kernels().multiply(lost + first, count, static_cast<float>(-1.0 / (1.0 - gain)));
            add(first, count);
            kernels().multiply(lost + first, count, static_cast<float>((1.0 - gain) / gain));
        }
        decode_range(to, first, count, numel, lost + first, DType::float32, true);
        kernels().multiply(lost + first, count, static_cast<float>(-gain));
    };
    if (per_tensor_) {  // its scale depends on every value
        for_pieces(numel, kPiece, threads, add);
        encode(lost, DType::float32, numel, wire, nbytes, seed, threads);
        for_pieces(numel, kPiece, threads, take_off);
        return;
    }
    pad(numel, to);
    const std::int64_t tile = multiple(granule(numel), kTile);
    for_pieces(numel, multiple(tile, kPiece), threads, [&](std::int64_t first, std::int64_t count) {
        for (std::int64_t at = first; at < first + count; at += tile) {
            const std::int64_t here = std::min(tile, first + count - at);
            add(at, here);
            encode_range(lost + at, DType::float32, at, here, numel, to, seed);
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
    const std::int64_t least = per_tensor_ ? kPiece : multiple(granule(numel), kPiece);
    for_pieces(numel, least, threads, [&](std::int64_t first, std::int64_t count) {
        decode_range(static_cast<const char*>(wire), first, count, numel,
                     static_cast<char*>(out) + first * bytes_of(dtype), dtype, add);
    });
}

void Codec::decode_sum(const void* wires, std::int64_t count, std::int64_t stride, std::int64_t numel, float factor,
                       void* out, DType dtype, int threads) const {
    check(numel, wire_bytes(numel));
    const std::int64_t tile = multiple(per_tensor_ ? kMostBlock : granule(numel), kTile);
    const std::int64_t piece = multiple(tile, kPiece);
    for_pieces(numel, piece, threads, [&](std::int64_t first, std::int64_t values) {
        std::vector<float> total(dtype == DType::float32 ? 0 : static_cast<std::size_t>(std::min(tile, values)));
        for (std::int64_t at = first; at < first + values; at += tile) {
            const std::int64_t here = std::min(tile, first + values - at);
            char* to = static_cast<char*>(out) + at * bytes_of(dtype);
            const bool direct = dtype == DType::float32 && reinterpret_cast<std::uintptr_t>(to) % alignof(float) == 0;
            if (direct) {
                sum_range(static_cast<const char*>(wires), count, stride, at, here, numel, factor,
                          reinterpret_cast<float*>(to));
            } else {
                total.resize(static_cast<std::size_t>(tile));
                sum_range(static_cast<const char*>(wires), count, stride, at, here, numel, factor, total.data());
                kernels().cast(total.data(), DType::float32, here, to, dtype, false);
            }
        }
    });
}

void Codec::decode_sum_encode(const void* wires, std::int64_t count, std::int64_t stride, std::int64_t numel,
                              float factor, const Codec& to, void* wire, std::int64_t nbytes, std::uint32_t seed,
                              int threads) const {
    check(numel, wire_bytes(numel));
    to.check(numel, nbytes);
    if (to.per_tensor_) {  // its scale depends on every value of the sum
        std::vector<float> total(static_cast<std::size_t>(numel));
        decode_sum(wires, count, stride, numel, factor, total.data(), DType::float32, threads);
        to.encode(total.data(), DType::float32, numel, wire, nbytes, seed, threads);
        return;
    }
    auto* out = static_cast<char*>(wire);
    to.pad(numel, out);
    const std::int64_t both = std::lcm(per_tensor_ ? kMostBlock : granule(numel), to.granule(numel));
    const std::int64_t tile = multiple(both, kTile);
    for_pieces(numel, multiple(tile, kPiece), threads, [&](std::int64_t first, std::int64_t values) {
        std::vector<float> total(static_cast<std::size_t>(std::min(tile, values)));
        for (std::int64_t at = first; at < first + values; at += tile) {
            const std::int64_t here = std::min(tile, first + values - at);
            sum_range(static_cast<const char*>(wires), count, stride, at, here, numel, factor, total.data());
            to.encode_range(total.data(), DType::float32, at, here, numel, out, seed);
        }
    });
}

}  // namespace thinwire
