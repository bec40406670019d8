#include <cstring>

#include "fuzz/fuzz.hpp"
#include "zfp.hpp"

namespace thinwire::fuzz {
namespace {

constexpr std::int64_t kMostValues = 600;  // two groups of blocks and a part of a third

// Every choice that a call leaves open.
struct Call {
    std::int64_t numel;
    int maxbits;
    DType dtype;
    bool add;
    int threads;
    std::int64_t misaligned_values;
    std::int64_t misaligned_wire;

    explicit Call(Input& input)
        : numel(input.flag() ? input.number(0, 300) : input.number(0, kMostValues)),
          maxbits(static_cast<int>(input.number(9, 128))),
          dtype(static_cast<DType>(input.number(0, 2))),
          add(dtype == DType::float32 && input.flag()),
          threads(static_cast<int>(input.number(1, 3))),
          misaligned_values(input.number(0, 7)),
          misaligned_wire(input.number(0, 7)) {}

    Buffer values() const {
        return Buffer(numel * (dtype == DType::float32 ? 4 : 2), misaligned_values);
    }
    Buffer wire() const {
        return Buffer(zfp_wire_bytes(numel, maxbits), misaligned_wire);
    }

    void encode(Buffer& x, Buffer& wire) const {
        zfp_encode(x.data(), dtype, numel, maxbits, wire.data(), wire.size(), threads);
    }
    void decode(Buffer& wire, Buffer& out) const {
        zfp_decode(wire.data(), wire.size(), numel, maxbits, out.data(), dtype, add, threads);
    }
};

}  // namespace

void zfp_any_stream(Input& input) {
    const Call call(input);
    Buffer wire = call.wire();
    if (input.flag()) {
        Buffer x = call.values();
        x.fill(input);
        call.encode(x, wire);
        wire.mutate(input, 8);
    } else {
        wire.fill(input);
    }
    Buffer out = call.values();
    call.decode(wire, out);
}

void zfp_wrong_size(Input& input) {
    const Call call(input);
    const std::int64_t right = zfp_wire_bytes(call.numel, call.maxbits);
    const std::int64_t wrong = input.number(0, right + 16);
    Buffer wire(wrong);
    Buffer values = call.values();
    require(refuses([&] { call.encode(values, wire); }) == (wrong != right), "encode refuses just the wrong sizes");
    require(refuses([&] { call.decode(wire, values); }) == (wrong != right), "decode refuses just the wrong sizes");
}

void zfp_round_trip(Input& input) {
    const Call call(input);
    Buffer x = call.values();
    x.fill(input);
    Buffer wire = call.wire();
    call.encode(x, wire);
    Buffer again = call.wire();
    call.encode(x, again);
    require(std::memcmp(wire.data(), again.data(), static_cast<std::size_t>(wire.size())) == 0,
            "the same values make the same wire");
    Buffer out = call.values();
    call.decode(wire, out);
}

}  // namespace thinwire::fuzz
