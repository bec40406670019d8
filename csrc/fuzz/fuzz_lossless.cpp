#include <cstring>
#include <memory>

#include "codec_kinds.hpp"
#include "fuzz/fuzz.hpp"
#include "message.hpp"

namespace thinwire::fuzz {
namespace {

constexpr std::int64_t kSomeValues = 2600;  // two chunks or five blocks, and a part of another

std::unique_ptr<const LosslessFormat> any_format(Input& input) {
    const CodecKind& kind = any_kind(input, [](const CodecKind& each) { return each.make_lossless != nullptr; });
    return kind.make_lossless(any_parameters(input, kind));
}

struct Call {
    std::unique_ptr<const LosslessFormat> format;
    DType encoded;
    std::int64_t numel;
    DType dtype;
    bool add;
    int threads;
    std::int64_t misaligned_values;
    std::int64_t misaligned_wire;

    explicit Call(Input& input)
        : format(any_format(input)),
          encoded(format->dtypes()[static_cast<std::size_t>(input.number(0, std::ssize(format->dtypes()) - 1))]),
          numel(input.flag() ? input.number(0, 200) : input.number(0, kSomeValues)),
          dtype(static_cast<DType>(input.number(0, 2))),
          add(dtype == DType::float32 && input.flag()),
          threads(static_cast<int>(input.number(1, 3))),
          misaligned_values(input.number(0, 7)),
          misaligned_wire(input.number(0, 7)) {}

    Buffer values(DType of) const {
        return Buffer(numel * bytes_of(of), misaligned_values);
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
        return format->wire_bytes(numel, encoded);
    }
    // A message in memory that ends where it ends.
    Buffer encode(Buffer& x) const {
        Buffer room(capacity(), misaligned_wire);
        const std::int64_t size = encode(x, room);
        require(size <= room.size(), "a message fits its bound");
        Buffer wire(size, misaligned_wire);
        std::memcpy(wire.data(), room.data(), static_cast<std::size_t>(size));
        return wire;
    }
    std::int64_t encode(Buffer& x, Buffer& room) const {
        return format->encode(x.data(), encoded, numel, room.data(), room.size(), threads);
    }
    void decode(Buffer& wire, Buffer& out, DType to, bool added) const {
        format->decode(wire.data(), wire.size(), numel, encoded, out.data(), to, added, threads);
    }
};

void write_header(Input& input, const LosslessFormat& format, Buffer& wire) {
    if (wire.size() < kHeaderBytes) {
        return;
    }
    const auto magics = format.magics();
    const std::uint32_t magic = magics[static_cast<std::size_t>(input.number(0, std::ssize(magics) - 1))];
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
        write_header(input, *call.format, wire);
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
                call.encode(x, room);
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
