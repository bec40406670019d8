// What messages of variable length have in common (docs/wire-format.md).
#pragma once

#include <cstdint>
#include <span>

#include "sizes.hpp"

namespace thinwire {

// A magic number, and the number of bytes in units of 4, these two included.
constexpr std::int64_t kHeaderBytes = 8;

struct Message {
    std::uint32_t magic;
    const char* body;
    std::int64_t body_bytes;
};

// Throws std::invalid_argument unless the wire starts with one of these magic numbers and holds the whole message.
Message read_message(const char* codec, std::span<const std::uint32_t> magics, const void* wire,
                     std::int64_t wire_bytes);

void write_header(std::uint32_t magic, std::int64_t nbytes, char* wire);

// Throws std::invalid_argument unless products of the count with small numbers are far from overflow, and, `add` is for
// float32.
void check_values(const char* codec, std::int64_t numel);
void check_add(const char* codec, DType dtype, bool add);

// Throws std::invalid_argument unless there is room for the largest message.
void check_capacity(const char* codec, std::int64_t needed, std::int64_t capacity);

// How many threads are worth waking for so many bytes.
int useful_threads(std::int64_t nbytes, int threads);

}  // namespace thinwire
