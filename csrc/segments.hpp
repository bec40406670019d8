// Values or bytes that several threads code side by side, in segments of equal size: where each begins in a message is
// known once all segments before it are counted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "pool.hpp"
#include "sizes.hpp"

namespace thinwire {

struct Segments {
    std::int64_t size;  // of all
    std::int64_t each;
    int threads;

    std::int64_t count() const {
        return ceil_div(size, each);
    }

    // What is before a segment.
    std::int64_t before(std::int64_t segment) const {
        return std::min(size, segment * each);
    }

    // For each segment and the end: the sum of what `count_of`, which gets its begin and its size, says of the segments
    // before it.
    template <class Fn>
    std::vector<std::int64_t> offsets(const Fn& count_of) const {
        std::vector<std::int64_t> starts(static_cast<std::size_t>(count()) + 1);
        parallel_for(count(), threads, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t segment = begin; segment < end; ++segment) {
                const std::int64_t first = before(segment);
                starts[static_cast<std::size_t>(segment) + 1] = count_of(first, before(segment + 1) - first);
            }
        });
        std::partial_sum(starts.begin(), starts.end(), starts.begin());
        return starts;
    }
};

}  // namespace thinwire
