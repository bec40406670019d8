#include <cstring>

#include "exp3.hpp"
#include "fuzz/fuzz.hpp"
#include "mpc.hpp"

namespace thinwire::fuzz {
namespace {

constexpr std::int64_t kMostValues = 2600;  // two chunks or five blocks, and a part of another
constexpr std::int64_t kHeaderBytes = 8;

struct Call {
    bool mpc;
    DType encoded;
    std::int64_t numel;
    DType dtype;
    bool add;
    int threads;
    std::int64_t misaligned_values;
    std::int64_t misaligned_wire;

    explicit Call(Input& input)
        : mpc(input.flag()),
          encoded(mpc ? static_cast<DType>(input.number(0, 2)) : DType::bfloat16),
          numel(input.flag() ? input.number(0, 200) : input.number(0, kMostValues)),
          dtype(static_cast<DType>(input.number(0, 2))),
          add(dtype == DType::float32 && input.flag()),
          threads(static_cast<int>(input.number(1, 3))),
          misaligned_values(input.number(0, 7)),
          misaligned_wire(input.number(0, 7)) {}

    Buffer values(DType of) const {
        return Buffer(numel * (of == DType::float32 ? 4 : 2), misaligned_values);
    }
    // Values as tensors have them: of few exponents, some of them far away.
    Buffer tensor(Input& input) const {
        Buffer x = values(encoded);
        x.fill(input);
        if (input.flag()) {
            const std::uint8_t top = input.byte();
            for (std::int64_t i = 1; i < x.size(); i += 2) {
                x[i] = x[i] < 248 ? static_cast<std::uint8_t>(top ^ (x[i] & 1)) : x[i];
            }
        }
        return x;
    }
    std::int64_t capacity() const {
        return mpc ? mpc_wire_bytes(numel * (encoded == DType::float32 ? 4 : 2)) : exp3_wire_bytes(numel);
    }
    // A message in memory that ends where it ends.
    Buffer encode(Buffer& x) const {
        Buffer room(capacity(), misaligned_wire);
        const std::int64_t size = mpc ? mpc_encode(x.data(), x.size(), room.data(), room.size(), threads)
                                      : exp3_encode(x.data(), numel, room.data(), room.size(), threads);
        require(size <= room.size(), "a message fits its bound");
        Buffer wire(size, misaligned_wire);
        std::memcpy(wire.data(), room.data(), static_cast<std::size_t>(size));
        return wire;
    }
    void decode(Buffer& wire, Buffer& out, DType to, bool added) const {
        if (mpc) {
            mpc_decode(wire.data(), wire.size(), numel, encoded, out.data(), to, added, threads);
        } else {
            exp3_decode(wire.data(), wire.size(), numel, out.data(), to, added, threads);
        }
    }
};

void write_header(Input& input, bool mpc, Buffer& wire) {
    if (wire.size() < kHeaderBytes) {
        return;
    }
    const std::uint32_t magic = mpc ? 0x3143504d : input.flag() ? 0x30505845 : 0x33505845;
    const auto words = static_cast<std::uint32_t>(wire.size() / 4);
    std::memcpy(wire.data(), &magic, sizeof magic);
    std::memcpy(&wire[4], &words, sizeof words);
}

}  // namespace

void lossless_any_message(Input& input) {
    const Call call(input);
    Buffer wire(0);
    if (input.flag()) {
        Buffer x = call.tensor(input);
        wire = call.encode(x);
        wire.mutate(input, 8);
    } else {
        wire = Buffer(input.number(0, call.capacity() + 64), call.misaligned_wire);
        wire.fill(input);
        write_header(input, call.mpc, wire);
    }
    Buffer out = call.values(call.dtype);
    refuses([&] { call.decode(wire, out, call.dtype, call.add); });
}

void lossless_truncated(Input& input) {
    const Call call(input);
    Buffer x = call.tensor(input);
    Buffer wire = call.encode(x);
    if (wire.size() == 0) {
        return;
    }
    Buffer part(input.number(0, wire.size() - 1));
    std::memcpy(part.data(), wire.data(), static_cast<std::size_t>(part.size()));
    Buffer out = call.values(call.dtype);
    require(refuses([&] { call.decode(part, out, call.dtype, call.add); }), "a truncated message is refused");
    require(refuses([&] {
                Buffer room(call.capacity() - 1);
                if (call.mpc) {
                    mpc_encode(x.data(), x.size(), room.data(), room.size(), call.threads);
                } else {
                    exp3_encode(x.data(), call.numel, room.data(), room.size(), call.threads);
                }
            }),
            "an encoder without room for the largest message refuses");
}

void lossless_round_trip(Input& input) {
    const Call call(input);
    Buffer x = call.tensor(input);
    Buffer wire = call.encode(x);
    Buffer out = call.values(call.encoded);
    call.decode(wire, out, call.encoded, false);
    require(x.size() == 0 || std::memcmp(x.data(), out.data(), static_cast<std::size_t>(x.size())) == 0,
            "what is decoded is what was encoded");
}

}  // namespace thinwire::fuzz
