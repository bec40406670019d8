#include "exp3.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "message.hpp"
#include "pool.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

constexpr std::uint32_t kCoded = 0x33505845;
constexpr std::uint32_t kRaw = 0x30505845;
constexpr std::uint32_t kMagics[] = {kCoded, kRaw};

constexpr std::int64_t kBlock = 512;
constexpr std::int64_t kPlaneBytes = 3 * kBlock / 8;

// What is counted at once: offsets of escapes are known for each segment.
constexpr std::int64_t kSegment = 64 * kBlock;

// A part of the values that are converted while they are in the first-level cache.
constexpr std::int64_t kPiece = 8 * kBlock;

std::int64_t padded(std::int64_t nbytes) {
    return ceil_div(nbytes, 4) * 4;
}

// Sizes of the parts of a coded message.
struct Layout {
    std::int64_t numel;

    std::int64_t blocks() const {
        return ceil_div(numel, kBlock);
    }
    std::int64_t bases() const {
        return padded(blocks());
    }
    std::int64_t counts() const {
        return padded(2 * blocks());
    }
    std::int64_t planes() const {
        return kPlaneBytes * blocks();
    }
    std::int64_t rest() const {
        return padded(numel);
    }
    std::int64_t before_escapes() const {
        return bases() + counts() + planes() + rest();
    }
    std::int64_t raw() const {
        return padded(2 * numel);
    }

    template <class Byte>
    Exp3Parts<Byte> parts(Byte* body) const {
        return {body, body + bases(), body + bases() + counts(), body + bases() + counts() + planes(),
                body + before_escapes()};
    }
};

// The parts from a value that begins a block on, of which `escapes` are before it.
template <class Byte>
Exp3Parts<Byte> from_value(const Exp3Parts<Byte>& parts, std::int64_t value, std::int64_t escapes) {
    const std::int64_t block = value / kBlock;
    return {parts.bases + block, parts.counts + 2 * block, parts.planes + kPlaneBytes * block, parts.rest + value,
            parts.escapes + escapes};
}

struct Segments {
    std::int64_t numel;
    int threads;

    std::int64_t count() const {
        return ceil_div(numel, kSegment);
    }

    std::int64_t values_before(std::int64_t segment) const {
        return std::min(numel, segment * kSegment);
    }

    // For each segment and the end: the sum of what `count_of` says of the segments before it.
    template <class Fn>
    std::vector<std::int64_t> offsets(const Fn& count_of) const {
        std::vector<std::int64_t> starts(static_cast<std::size_t>(count()) + 1);
        parallel_for(count(), threads, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t segment = begin; segment < end; ++segment) {
                const std::int64_t first = values_before(segment);
                starts[static_cast<std::size_t>(segment) + 1] = count_of(first, values_before(segment + 1) - first);
            }
        });
        std::partial_sum(starts.begin(), starts.end(), starts.begin());
        return starts;
    }
};

void zero_to(char* from, char* end) {
    std::fill(from, end, char{0});
}

// Writes all parts but the zeros that complete them. Returns the number of escapes, or -1 if there are more than
// `room`; a part may have been written by then.
std::int64_t encode_coded(const void* x, std::int64_t numel, const Exp3Parts<char>& parts, std::int64_t room,
                          const Segments& segments) {
    const auto* from = static_cast<const char*>(x);
    const Kernels& use = kernels();
    if (segments.threads <= 1) {
        return use.exp3_encode(from, numel, parts, room);
    }
    const auto starts = segments.offsets(
        [&](std::int64_t first, std::int64_t count) { return use.exp3_count(from + 2 * first, count); });
    if (starts.back() > room) {
        return -1;
    }
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.values_before(begin);
        const std::int64_t before = starts[static_cast<std::size_t>(begin)];
        use.exp3_encode(from + 2 * first, segments.values_before(end) - first, from_value(parts, first, before),
                        starts[static_cast<std::size_t>(end)] - before);
    });
    return starts.back();
}

void decode_raw(const Message& message, std::int64_t numel, void* out, DType dtype, bool add,
                const Segments& segments) {
    if (message.body_bytes != Layout{numel}.raw()) {
        throw std::invalid_argument("exp3: " + std::to_string(numel) + " values are " + std::to_string(2 * numel) +
                                    " bytes, the message holds " + std::to_string(message.body_bytes));
    }
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.values_before(begin);
        const std::int64_t count = segments.values_before(end) - first;
        const char* from = message.body + 2 * first;
        char* to = static_cast<char*>(out) + first * bytes_of(dtype);
        if (dtype == DType::bfloat16) {
            std::memcpy(to, from, static_cast<std::size_t>(2 * count));
        } else {
            kernels().cast(from, DType::bfloat16, count, to, dtype, add);
        }
    });
}

}  // namespace

std::int64_t exp3_wire_bytes(std::int64_t numel) {
    return numel == 0 ? 0 : kHeaderBytes + Layout{numel}.raw();
}

std::int64_t exp3_encode(const void* x, std::int64_t numel, void* wire, std::int64_t capacity, int threads) {
    check_values("exp3", numel);
    check_capacity("exp3", exp3_wire_bytes(numel), capacity);
    if (numel == 0) {
        return 0;
    }
    const Layout layout{numel};
    const Segments segments{numel, useful_threads(2 * numel, threads)};
    auto* to = static_cast<char*>(wire);
    char* body = to + kHeaderBytes;
    const Exp3Parts<char> parts = layout.parts(body);
    const std::int64_t room = layout.raw() - 4 - layout.before_escapes();  // a multiple of 4: padding fits as well
    const std::int64_t escapes = room < 0 ? -1 : encode_coded(x, numel, parts, room, segments);
    if (escapes < 0) {
        parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t first = 2 * segments.values_before(begin);
            std::memcpy(body + first, static_cast<const char*>(x) + first,
                        static_cast<std::size_t>(2 * segments.values_before(end) - first));
        });
        zero_to(body + 2 * numel, body + layout.raw());
        write_header(kRaw, exp3_wire_bytes(numel), to);
        return exp3_wire_bytes(numel);
    }
    char* end = parts.escapes + padded(escapes);
    zero_to(parts.bases + layout.blocks(), parts.counts);
    zero_to(parts.counts + 2 * layout.blocks(), parts.planes);
    zero_to(parts.rest + numel, parts.escapes);
    zero_to(parts.escapes + escapes, end);
    write_header(kCoded, end - to, to);
    return end - to;
}

void exp3_decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, void* out, DType dtype, bool add,
                 int threads) {
    check_values("exp3", numel);
    check_add("exp3", dtype, add);
    if (numel == 0) {
        return;
    }
    const Layout layout{numel};
    const Segments segments{numel, useful_threads(2 * numel, threads)};
    const Message message = read_message("exp3", kMagics, wire, wire_bytes);
    if (message.magic == kRaw) {
        decode_raw(message, numel, out, dtype, add, segments);
        return;
    }
    const std::int64_t there = message.body_bytes - layout.before_escapes();
    if (there < 0) {
        throw std::invalid_argument("exp3: " + std::to_string(numel) + " values need " +
                                    std::to_string(layout.before_escapes()) + " bytes and escapes, " +
                                    std::to_string(message.body_bytes) + " are there");
    }
    const Kernels& use = kernels();
    const Exp3Parts<const char> parts = layout.parts(message.body);
    const auto starts = segments.offsets([&](std::int64_t first, std::int64_t count) {
        return use.exp3_announced(from_value(parts, first, 0).counts, ceil_div(count, kBlock));
    });
    if (padded(starts.back()) != there) {
        throw std::invalid_argument("exp3: " + std::to_string(starts.back()) + " escapes are announced, " +
                                    std::to_string(there) + " bytes of them are there");
    }
    const auto decode = [&](const Exp3Parts<const char>& from, std::int64_t count, void* to) {
        if (!use.exp3_decode(from, count, to)) {
            throw std::invalid_argument("exp3: a block marks more or fewer escapes than it announces");
        }
    };
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.values_before(begin);
        const std::int64_t stop = segments.values_before(end);
        std::int64_t escapes = starts[static_cast<std::size_t>(begin)];
        if (dtype == DType::bfloat16) {
            decode(from_value(parts, first, escapes), stop - first, static_cast<char*>(out) + 2 * first);
            return;
        }
        alignas(64) char piece[2 * kPiece];
        for (std::int64_t at = first; at < stop; at += kPiece) {
            const std::int64_t here = std::min(kPiece, stop - at);
            const Exp3Parts<const char> from = from_value(parts, at, escapes);
            decode(from, here, piece);
            use.cast(piece, DType::bfloat16, here, static_cast<char*>(out) + at * bytes_of(dtype), dtype, add);
            escapes += use.exp3_announced(from.counts, ceil_div(here, kBlock));
        }
    });
}

}  // namespace thinwire
