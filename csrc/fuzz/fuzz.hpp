// What the fuzzed properties share. Each kind of codec has a file fuzz_<kind>.cpp with its properties and names them in
// kProperties (fuzz.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>

#include "codec_kinds.hpp"

namespace thinwire::fuzz {

// The bytes a run is made from: first its choices, then the contents of buffers. Zeros follow its end.
class Input {
public:
    explicit Input(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    std::uint8_t byte();

    // From `least` to `most`, both included.
    std::int64_t number(std::int64_t least, std::int64_t most);

    bool flag() {
        return (byte() & 1) != 0;
    }

private:
    std::span<const std::uint8_t> bytes_;
};

// Heap memory that ends where the contents end, so that the sanitizer sees the first byte beyond, and begins
// `misaligned` bytes after an aligned address.
class Buffer {
public:
    explicit Buffer(std::int64_t size, std::int64_t misaligned = 0);

    void* data() {
        return memory_.get() + misaligned_;
    }
    std::uint8_t& operator[](std::int64_t index) {
        return memory_[static_cast<std::size_t>(misaligned_ + index)];
    }
    std::int64_t size() const {
        return size_;
    }

    void fill(Input& input);

    // Changes up to `most` bits or bytes anywhere.
    void mutate(Input& input, int most);

private:
    std::int64_t size_;
    std::int64_t misaligned_;
    std::unique_ptr<std::uint8_t[]> memory_;
};

// One of the codecs for which `fits` holds, and parameters of it.
const CodecKind& any_kind(Input& input, bool (*fits)(const CodecKind& kind));
Parameters any_parameters(Input& input, const CodecKind& kind);

// Ends the process, in a way that fuzzers take for a finding.
void require(bool holds, const char* what);

// Whether the call throws std::invalid_argument; anything else that it throws ends the process.
template <class Fn>
bool refuses(Fn&& fn) {
    try {
        fn();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

using Property = void (*)(Input& input);

// Lossless codecs: any bytes decode or are refused; a part of a message is refused; values come back bit by bit.
void lossless_any_message(Input& input);
void lossless_truncated(Input& input);
void lossless_round_trip(Input& input);

// Codecs of fixed length: any bytes decode; sums of messages are what their values add up to; sizes that do not
// fit are refused; what is not finite stays so. Whatever the instruction set, the results are the same.
void fixed_any_message(Input& input);
void fixed_sum(Input& input);
void fixed_wrong_size(Input& input);
void fixed_round_trip(Input& input);

// Deltas: any bytes are refused, or make what their checksums say; a part of a message is refused; values come back
// bit by bit, and not from another old tensor.
void delta_any_message(Input& input);
void delta_any_block(Input& input);
void delta_truncated(Input& input);
void delta_round_trip(Input& input);

}  // namespace thinwire::fuzz
