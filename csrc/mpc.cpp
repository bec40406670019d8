#include "mpc.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "message.hpp"
#include "pool.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

constexpr std::uint32_t kMagics[] = {0x3143504d};

constexpr std::int64_t kChunkBytes = 4 * 1024;
constexpr std::int64_t kBytesPerBitmapWord = 4 * 32;

// What is counted at once: offsets of residual words are known for each segment.
constexpr std::int64_t kSegmentBytes = 16 * kChunkBytes;

// A part of the values that are converted while they are in the first-level cache.
constexpr std::int64_t kPieceBytes = 4 * kChunkBytes;

std::int64_t bitmap_words(std::int64_t nbytes) {
    return ceil_div(nbytes, kBytesPerBitmapWord);
}

// Where in its bitmap or, by the word, in its values a segment starts.
std::int64_t bitmap_at(std::int64_t segment) {
    return 4 * (segment * kSegmentBytes / kBytesPerBitmapWord);
}

struct Segments {
    std::int64_t nbytes;
    int threads;

    std::int64_t count() const {
        return ceil_div(nbytes, kSegmentBytes);
    }

    std::int64_t bytes_before(std::int64_t segment) const {
        return std::min(nbytes, segment * kSegmentBytes);
    }

    // For each segment and the end: the sum of what `count_of` says of the segments before it.
    template <class Fn>
    std::vector<std::int64_t> offsets(const Fn& count_of) const {
        std::vector<std::int64_t> starts(static_cast<std::size_t>(count()) + 1);
        parallel_for(count(), threads, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t segment = begin; segment < end; ++segment) {
                const std::int64_t first = bytes_before(segment);
                starts[static_cast<std::size_t>(segment) + 1] =
                    count_of(segment, first, bytes_before(segment + 1) - first);
            }
        });
        std::partial_sum(starts.begin(), starts.end(), starts.begin());
        return starts;
    }
};

}  // namespace

std::int64_t mpc_wire_bytes(std::int64_t nbytes) {
    return nbytes == 0 ? 0 : kHeaderBytes + 4 * (bitmap_words(nbytes) + ceil_div(nbytes, 4));
}

std::int64_t mpc_encode(const void* x, std::int64_t nbytes, void* wire, std::int64_t capacity, int threads) {
    check_values("mpc", nbytes);
    check_capacity("mpc", mpc_wire_bytes(nbytes), capacity);
    if (nbytes == 0) {
        return 0;
    }
    const auto* from = static_cast<const char*>(x);
    auto* to = static_cast<char*>(wire);
    char* bitmap = to + kHeaderBytes;
    char* kept = bitmap + 4 * bitmap_words(nbytes);
    const Kernels& use = kernels();
    const Segments segments{nbytes, useful_threads(nbytes, threads)};
    std::int64_t count = 0;
    if (segments.threads <= 1) {
        count = use.mpc_encode(from, nbytes, bitmap, kept);
    } else {
        const auto starts = segments.offsets(
            [&](std::int64_t, std::int64_t first, std::int64_t here) { return use.mpc_count(from + first, here); });
        count = starts.back();
        parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
            const std::int64_t first = segments.bytes_before(begin);
            use.mpc_encode(from + first, segments.bytes_before(end) - first, bitmap + bitmap_at(begin),
                           kept + 4 * starts[static_cast<std::size_t>(begin)]);
        });
    }
    const std::int64_t size = kept + 4 * count - to;
    write_header(kMagics[0], size, to);
    return size;
}

void mpc_decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, DType encoded, void* out, DType dtype,
                bool add, int threads) {
    check_values("mpc", numel);
    check_add("mpc", dtype, add);
    if (numel == 0) {
        return;
    }
    const std::int64_t nbytes = numel * bytes_of(encoded);
    const std::int64_t words = ceil_div(nbytes, 4);
    const std::int64_t bitmap_bytes = 4 * bitmap_words(nbytes);
    const Message message = read_message("mpc", kMagics, wire, wire_bytes);
    if (message.body_bytes < bitmap_bytes) {
        throw std::invalid_argument("mpc: " + std::to_string(words) + " words need a bitmap of " +
                                    std::to_string(bitmap_bytes / 4) + ", " + std::to_string(message.body_bytes / 4) +
                                    " are there");
    }
    const Kernels& use = kernels();
    const Segments segments{nbytes, useful_threads(nbytes, threads)};
    const char* bitmap = message.body;
    const char* kept = bitmap + bitmap_bytes;
    const auto starts = segments.offsets([&](std::int64_t segment, std::int64_t, std::int64_t here) {
        return use.mpc_announced(bitmap + bitmap_at(segment), bitmap_words(here));
    });
    const std::int64_t there = (message.body_bytes - bitmap_bytes) / 4;
    // The last word of the bitmap may have bits for words that do not exist.
    const auto last = static_cast<unsigned char>(bitmap[(words - 1) / 8]);
    const bool beyond = last >> ((words - 1) % 8 + 1) != 0 ||
                        std::any_of(bitmap + (words - 1) / 8 + 1, kept, [](char byte) { return byte != 0; });
    if (starts.back() != there || beyond) {
        throw std::invalid_argument("mpc: the bitmap announces " + std::to_string(starts.back()) + " words of " +
                                    std::to_string(words) + ", " + std::to_string(there) + " are there");
    }
    parallel_for(segments.count(), segments.threads, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t first = segments.bytes_before(begin);
        const std::int64_t stop = segments.bytes_before(end);
        const char* bits = bitmap + bitmap_at(begin);
        const char* next = kept + 4 * starts[static_cast<std::size_t>(begin)];
        if (encoded == dtype && !add) {
            use.mpc_decode(bits, next, stop - first, static_cast<char*>(out) + first);
            return;
        }
        alignas(64) char piece[kPieceBytes];
        for (std::int64_t at = first; at < stop; at += kPieceBytes) {
            const std::int64_t here = std::min(kPieceBytes, stop - at);
            next += 4 * use.mpc_decode(bits + 4 * ((at - first) / kBytesPerBitmapWord), next, here, piece);
            use.cast(piece, encoded, here / bytes_of(encoded),
                     static_cast<char*>(out) + at / bytes_of(encoded) * bytes_of(dtype), dtype, add);
        }
    });
}

}  // namespace thinwire
