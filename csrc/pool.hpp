// Threads shared by all native calls of this process.
#pragma once

#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace thinwire {

// Default rounding and denormals while it lives, whatever the thread is set to: all threads and hosts compute alike.
class DefaultFloats {
public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() {
        std::fesetenv(&before_);
    }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

private:
    std::fenv_t before_;
};

namespace detail {

using Slice = void (*)(void* context, std::int64_t begin, std::int64_t end);

void run_slices(std::int64_t count, int threads, Slice slice, void* context);

}  // namespace detail

// Calls fn(begin, end) for disjoint ranges that cover [0, count), on at most `threads` threads.
//
// The calling thread takes part and needs no other to finish, so calls from several threads, and calls from inside
// fn, never wait for each other. threads <= 1 is a plain call. The first exception that fn throws reaches the caller,
// after every range that had begun is done; ranges that had not begun are left out.
template <class Fn>
void parallel_for(std::int64_t count, int threads, Fn&& fn) {
    if (count <= 0) {
        return;
    }
    if (threads <= 1 || count == 1) {
        fn(std::int64_t{0}, count);
        return;
    }
    using Plain = std::remove_reference_t<Fn>;
    detail::run_slices(
        count, threads,
        [](void* context, std::int64_t begin, std::int64_t end) { (*static_cast<Plain*>(context))(begin, end); },
        const_cast<void*>(static_cast<const void*>(std::addressof(fn))));
}

// Values that one thread takes at a time: enough to outweigh the hand-over, few enough for its caches.
constexpr std::int64_t kPiece = 64 << 10;

// fn(first, count) for pieces of `piece` values, on several threads.
template <class Fn>
void for_pieces(std::int64_t numel, std::int64_t piece, int threads, const Fn& fn) {
    const std::int64_t pieces = (numel + piece - 1) / piece;
    parallel_for(pieces, static_cast<int>(std::min<std::int64_t>(threads, pieces)),
                 [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t first = begin * piece; first < std::min(numel, end * piece); first += piece) {
                         fn(first, std::min(piece, numel - first));
                     }
                 });
}

}  // namespace thinwire
