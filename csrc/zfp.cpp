#include "zfp.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "pool.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

// 64 blocks are a whole number of 64-bit words for any number of bits, so threads share no word.
constexpr std::int64_t kValuesPerChunk = 64 * 4;
constexpr std::int64_t kBytesPerChunkPerBit = 64 / 8;

constexpr std::int64_t kChunksPerThread = 64;  // fewer are not worth waking a thread for

void check(std::int64_t numel, int maxbits, std::int64_t wire_bytes) {
    if (maxbits < 9 || maxbits > 128) {
        throw std::invalid_argument("a zfp block takes 9 to 128 bits, not " + std::to_string(maxbits));
    }
    // Bounded so that no product below overflows.
    if (numel < 0 || numel > std::int64_t{1} << 55) {
        throw std::invalid_argument("zfp: " + std::to_string(numel) + " values");
    }
    if (wire_bytes != zfp_wire_bytes(numel, maxbits)) {
        throw std::invalid_argument("zfp: " + std::to_string(numel) + " values at " + std::to_string(maxbits) +
                                    " bits a block take " + std::to_string(zfp_wire_bytes(numel, maxbits)) +
                                    " bytes of wire, not " + std::to_string(wire_bytes));
    }
}

template <class Fn>
void for_chunks(std::int64_t numel, int threads, const Fn& fn) {
    const std::int64_t chunks = (numel + kValuesPerChunk - 1) / kValuesPerChunk;
    const auto useful = std::min<std::int64_t>(threads, chunks / kChunksPerThread);
    parallel_for(chunks, static_cast<int>(useful), [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = begin * kValuesPerChunk;
        fn(begin, first, std::min(numel, end * kValuesPerChunk) - first);
    });
}

std::int64_t bytes_of(DType dtype) {
    return dtype == DType::float32 ? 4 : 2;
}

}  // namespace

std::int64_t zfp_wire_bytes(std::int64_t numel, int maxbits) {
    return ((numel + 3) / 4 * maxbits + 63) / 64 * 8;
}

void zfp_encode(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire, std::int64_t wire_bytes,
                int threads) {
    check(numel, maxbits, wire_bytes);
    const auto encode = kernels().zfp_encode;
    for_chunks(numel, threads, [&](std::int64_t chunk, std::int64_t first, std::int64_t count) {
        encode(static_cast<const char*>(x) + first * bytes_of(dtype), dtype, count, maxbits,
               static_cast<char*>(wire) + chunk * kBytesPerChunkPerBit * maxbits);
    });
}

void zfp_decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, int maxbits, void* out, DType dtype,
                bool add, int threads) {
    check(numel, maxbits, wire_bytes);
    if (add && dtype != DType::float32) {
        throw std::invalid_argument("zfp: only float32 can be added to");
    }
    const auto decode = kernels().zfp_decode;
    for_chunks(numel, threads, [&](std::int64_t chunk, std::int64_t first, std::int64_t count) {
        decode(static_cast<const char*>(wire) + chunk * kBytesPerChunkPerBit * maxbits, count, maxbits,
               static_cast<char*>(out) + first * bytes_of(dtype), dtype, add);
    });
}

}  // namespace thinwire
