#include "message.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace thinwire {
namespace {

constexpr std::int64_t kBytesPerThread = 1 << 17;

std::string hex(std::uint32_t number) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", number);
    return text;
}

}  // namespace

Message read_message(const char* codec, std::span<const std::uint32_t> magics, const void* wire,
                     std::int64_t wire_bytes) {
    if (wire_bytes < kHeaderBytes) {
        throw std::invalid_argument(std::string(codec) + ": a message starts with 8 bytes, this one has " +
                                    std::to_string(wire_bytes) + "; it is truncated");
    }
    const auto* from = static_cast<const char*>(wire);
    std::uint32_t header[2];
    std::memcpy(header, from, sizeof header);
    if (std::find(magics.begin(), magics.end(), header[0]) == magics.end()) {
        throw std::invalid_argument(std::string(codec) + ": a message starts with " + hex(magics.front()) +
                                    ", this one with " + hex(header[0]));
    }
    const std::int64_t nbytes = std::int64_t{4} * header[1];
    if (nbytes < kHeaderBytes || nbytes > wire_bytes) {
        throw std::invalid_argument(std::string(codec) + ": the message says it has " + std::to_string(nbytes) +
                                    " bytes and " + std::to_string(wire_bytes) + " are there");
    }
    return {header[0], from + kHeaderBytes, nbytes - kHeaderBytes};
}

void write_header(std::uint32_t magic, std::int64_t nbytes, char* wire) {
    const std::uint32_t header[2] = {magic, static_cast<std::uint32_t>(nbytes / 4)};
    std::memcpy(wire, header, sizeof header);
}

void check_values(const char* codec, std::int64_t numel) {
    if (numel < 0 || numel > kMostValues) {
        throw std::invalid_argument(std::string(codec) + ": " + std::to_string(numel) + " values");
    }
}

void check_add(const char* codec, DType dtype, bool add) {
    if (add && dtype != DType::float32) {
        throw std::invalid_argument(std::string(codec) + ": only float32 can be added to");
    }
}

void check_capacity(const char* codec, std::int64_t needed, std::int64_t capacity) {
    // The header counts units of 4 bytes in 32 bits.
    if (needed > std::int64_t{4} * UINT32_MAX) {
        throw std::invalid_argument(std::string(codec) + ": a message of up to " + std::to_string(needed) +
                                    " bytes is longer than its header can say, encode the tensor in parts");
    }
    if (capacity < needed) {
        throw std::invalid_argument(std::string(codec) + ": a message may take " + std::to_string(needed) +
                                    " bytes and there is room for " + std::to_string(capacity));
    }
}

int useful_threads(std::int64_t nbytes, int threads) {
    return static_cast<int>(std::min<std::int64_t>(threads, nbytes / kBytesPerThread));
}

}  // namespace thinwire
