#include <cstring>

#include "delta.hpp"
#include "fuzz/fuzz.hpp"
#include "target.hpp"

namespace thinwire {

THINWIRE_KERNELS(DeltaKernels, kDelta, kernels)

namespace fuzz {
namespace {

constexpr std::int64_t kMostValues = 700;  // ten of the smallest blocks, and a part of another

// Of a message of one block: the checksums of that block's bytes and of the index, and where the block begins.
constexpr std::int64_t kSent = 28;
constexpr std::int64_t kSum = 40;
constexpr std::int64_t kBody = 48;

struct Call {
    DeltaType type;
    std::int64_t numel;
    int log;
    int threads;
    std::int64_t misaligned;
    std::int64_t word;
    Buffer old;
    Buffer now;

    explicit Call(Input& input)
        : type(delta_type(input.number(0, kDeltaTypes - 1))),
          numel(input.flag() ? input.number(0, 200) : input.number(0, kMostValues)),
          log(static_cast<int>(input.number(6, 10))),
          threads(static_cast<int>(input.number(1, 3))),
          misaligned(input.number(0, 7)),
          word(bytes_of(type)),
          old(numel * word, misaligned),
          now(numel * word, misaligned) {
        const bool far = input.flag();
        const std::int64_t period = input.number(1, 40);
        old.fill(input);
        for (std::int64_t i = 0; i < old.size(); ++i) {
            const bool changed = i / word % period == 0 && (far || i % word == 0);
            now[i] = changed ? input.byte() : old[i];
        }
    }

    std::int64_t capacity() const {
        return delta_bytes(type, numel, log);
    }
    // A message in memory that ends where it ends.
    Buffer encode() {
        Buffer room(capacity(), misaligned);
        const std::int64_t size =
            encode_delta(type, old.data(), now.data(), numel, log, room.data(), room.size(), threads);
        require(size <= room.size(), "a delta fits its bound");
        Buffer wire(size, misaligned);
        std::memcpy(wire.data(), room.data(), static_cast<std::size_t>(size));
        return wire;
    }
    void apply(Buffer& before, Buffer& wire, Buffer& out) const {
        apply_delta(type, before.data(), numel, wire.data(), wire.size(), out.data(), threads);
    }
    bool makes_new(Buffer& out) {
        return numel == 0 || std::memcmp(out.data(), now.data(), static_cast<std::size_t>(out.size())) == 0;
    }
};

}  // namespace

void delta_any_message(Input& input) {
    Call call(input);
    Buffer wire = call.encode();
    wire.mutate(input, 8);
    Buffer out(call.now.size(), call.misaligned);
    if (!refuses([&] { call.apply(call.old, wire, out); })) {
        require(call.makes_new(out), "a message that is not refused makes the new tensor");
    }
}

// The decoder of blocks gets any bytes, because their checksum is right.
void delta_any_block(Input& input) {
    Call call(input);
    call.log = 20;
    Buffer wire = call.encode();
    if (wire.size() <= kBody) {
        return;
    }
    Buffer body(wire.size() - kBody);
    std::memcpy(body.data(), &wire[kBody], static_cast<std::size_t>(body.size()));
    body.mutate(input, 8);
    std::memcpy(&wire[kBody], body.data(), static_cast<std::size_t>(body.size()));
    const auto sent = static_cast<std::uint32_t>(kernels().checksum(body.data(), body.size()));
    std::memcpy(&wire[kSent], &sent, sizeof sent);
    const std::uint64_t sum = kernels().checksum(wire.data(), kSum);
    std::memcpy(&wire[kSum], &sum, sizeof sum);
    Buffer out(call.now.size(), call.misaligned);
    if (!refuses([&] { call.apply(call.old, wire, out); })) {
        require(call.makes_new(out), "a block that is not refused makes the new values");
    }
}

void delta_truncated(Input& input) {
    Call call(input);
    Buffer wire = call.encode();
    Buffer part(input.number(0, wire.size() - 1));
    std::memcpy(part.data(), wire.data(), static_cast<std::size_t>(part.size()));
    Buffer out(call.now.size(), call.misaligned);
    require(refuses([&] { call.apply(call.old, part, out); }), "a truncated delta is refused");
    Buffer room(call.capacity() - 1);
    require(refuses([&] {
                encode_delta(call.type, call.old.data(), call.now.data(), call.numel, call.log, room.data(),
                             room.size(), call.threads);
            }),
            "an encoder without room for the largest delta refuses");
}

void delta_round_trip(Input& input) {
    Call call(input);
    Buffer wire = call.encode();
    Buffer out(call.now.size(), call.misaligned);
    call.apply(call.old, wire, out);
    require(call.makes_new(out), "a delta makes the new tensor");
    Buffer other(call.old.size(), call.misaligned);
    if (call.numel > 0) {
        std::memcpy(other.data(), call.old.data(), static_cast<std::size_t>(other.size()));
        other.mutate(input, 2);
    }
    if (!refuses([&] { call.apply(other, wire, out); })) {
        require(call.makes_new(out), "a delta makes nothing else of another tensor");
    }
}

}  // namespace fuzz
}  // namespace thinwire
