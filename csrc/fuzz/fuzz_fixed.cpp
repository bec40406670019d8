#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "codec.hpp"
#include "fuzz/fuzz.hpp"
#include "sizes.hpp"
#include "target.hpp"

namespace thinwire::fuzz {
namespace {

constexpr std::int64_t kSomeValues = 2600;   // several blocks and a part of another, whatever the format
constexpr std::int64_t kManyValues = 70000;  // more than one thread takes at a time, and than the longest block
constexpr std::int64_t kMostMessages = 3;

DType any_dtype(Input& input) {
    return static_cast<DType>(input.number(0, 2));
}

Codec any_codec(Input& input) {
    const CodecKind& kind = any_kind(input, [](const CodecKind& each) { return each.make_fixed != nullptr; });
    return Codec(kind.name, any_parameters(input, kind));
}

std::int64_t any_numel(Input& input) {
    const std::int64_t length = input.number(0, 31);
    return input.number(0, length == 0 ? kManyValues : length < 8 ? kSomeValues : 300);
}

// Every choice that a call leaves open.
struct Call {
    Codec codec;
    std::int64_t numel;
    DType dtype;
    std::uint32_t seed;
    int threads;
    std::int64_t misaligned_values;
    std::int64_t misaligned_wire;

    explicit Call(Input& input)
        : codec(any_codec(input)),
          numel(any_numel(input)),
          dtype(any_dtype(input)),
          seed(static_cast<std::uint32_t>(input.number(0, 0xffffffff))),
          threads(static_cast<int>(input.number(1, 3))),
          misaligned_values(input.number(0, 7)),
          misaligned_wire(input.number(0, 7)) {}

    Buffer values(DType of) const {
        return Buffer(numel * bytes_of(of), misaligned_values);
    }
    Buffer wire() const {
        return Buffer(codec.wire_bytes(numel), misaligned_wire);
    }

    // Bytes of any kind, repeated to the end so that long tensors are not mostly zero.
    Buffer tensor(Input& input) const {
        Buffer x = values(dtype);
        x.fill(input);
        for (std::int64_t i = 4096; i < x.size(); ++i) {
            x[i] = x[i - 4096];
        }
        return x;
    }

    void encode(Buffer& x, Buffer& out) const {
        codec.encode(x.data(), dtype, numel, out.data(), out.size(), seed, threads);
    }
    void decode(Buffer& from, Buffer& out, DType to, bool add) const {
        codec.decode(from.data(), from.size(), numel, out.data(), to, add, threads);
    }
};

std::uint32_t bits_at(Buffer& values, std::int64_t index, DType dtype) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &values[bytes_of(dtype) * index], static_cast<std::size_t>(bytes_of(dtype)));
    return bits;
}

// Bits of an infinity without its sign: NaN lies above it, what is finite below.
std::uint32_t infinity_of(DType dtype) {
    return dtype == DType::float32 ? 0x7f800000U : dtype == DType::bfloat16 ? 0x7f80U : 0x7c00U;
}

std::uint32_t magnitude_at(Buffer& values, std::int64_t index, DType dtype) {
    return bits_at(values, index, dtype) & (dtype == DType::float32 ? 0x7fffffffU : 0x7fffU);
}

// The same bits, but for NaN: which of two a sum returns is the compiler's choice.
bool same_values(Buffer& a, Buffer& b, std::int64_t numel, DType dtype) {
    if (a.size() == 0 || std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.size())) == 0) {
        return true;
    }
    for (std::int64_t i = 0; i < numel; ++i) {
        const std::uint32_t left = bits_at(a, i, dtype);
        const std::uint32_t right = bits_at(b, i, dtype);
        const bool both_nan =
            magnitude_at(a, i, dtype) > infinity_of(dtype) && magnitude_at(b, i, dtype) > infinity_of(dtype);
        if (left != right && !both_nan) {
            return false;
        }
    }
    return true;
}

bool same_bytes(Buffer& a, Buffer& b) {
    return a.size() == b.size() &&
           (a.size() == 0 || std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.size())) == 0);
}

// A message that was encoded and then damaged, or bytes that no encoder wrote.
Buffer any_message(Input& input, const Call& call) {
    Buffer wire = call.wire();
    if (input.flag()) {
        Buffer x = call.tensor(input);
        call.encode(x, wire);
        wire.mutate(input, 8);
    } else {
        wire.fill(input);
    }
    return wire;
}

}  // namespace

void fixed_any_message(Input& input) {
    const Call call(input);
    Buffer wire = any_message(input, call);
    Buffer out = call.values(call.dtype);
    call.decode(wire, out, call.dtype, false);

    // Every instruction set reads the same values from it, stored and added.
    Buffer total = call.values(DType::float32);
    total.fill(input);
    Buffer before = call.values(DType::float32);
    if (total.size() > 0) {
        std::memcpy(before.data(), total.data(), static_cast<std::size_t>(total.size()));
    }
    call.decode(wire, total, DType::float32, true);
    const std::string chosen = target();
    use_target(targets().front());
    Buffer plain = call.values(call.dtype);
    call.decode(wire, plain, call.dtype, false);
    call.decode(wire, before, DType::float32, true);
    use_target(chosen);
    require(same_values(out, plain, call.numel, call.dtype), "any message decodes as with the plainest kernels");
    require(same_values(total, before, call.numel, DType::float32), "values are added as with the plainest kernels");
}

void fixed_sum(Input& input) {
    const Call call(input);
    const std::int64_t count = input.number(1, kMostMessages);
    const std::int64_t stride = call.codec.wire_bytes(call.numel) + input.number(0, 16);
    const float factor = input.flag() ? 1.0F : 1.0F / static_cast<float>(count);
    // The last message ends where the memory ends.
    Buffer wires(stride * (count - 1) + call.codec.wire_bytes(call.numel), call.misaligned_wire);
    for (std::int64_t row = 0; row < count; ++row) {
        Buffer wire = any_message(input, call);
        if (wire.size() > 0) {
            std::memcpy(&wires[row * stride], wire.data(), static_cast<std::size_t>(wire.size()));
        }
    }

    const bool has_onto = input.flag();
    Buffer onto = has_onto ? call.tensor(input) : Buffer(0);
    Buffer sum(4 * call.numel);
    if (has_onto) {
        const Codec widen("cast", std::vector{static_cast<std::int64_t>(DType::float32)});
        widen.encode(onto.data(), call.dtype, call.numel, sum.data(), sum.size(), 0, 1);
    }
    for (std::int64_t row = 0; row < count && call.numel > 0; ++row) {
        call.codec.decode(&wires[row * stride], call.codec.wire_bytes(call.numel), call.numel, sum.data(),
                          DType::float32, row > 0 || has_onto, 1);
    }
    for (std::int64_t i = 0; i < call.numel; ++i) {
        const float scaled = std::bit_cast<float>(bits_at(sum, i, DType::float32)) * factor;
        std::memcpy(&sum[4 * i], &scaled, sizeof scaled);
    }

    Buffer fused = call.values(call.dtype);
    Buffer composed(fused.size());
    const Sum total{wires.data(), count, stride, call.numel, has_onto ? onto.data() : nullptr, call.dtype, factor};
    call.codec.decode_sum(total, fused.data(), call.dtype, call.threads);
    const Codec cast("cast", std::vector{static_cast<std::int64_t>(call.dtype)});
    cast.encode(sum.data(), DType::float32, call.numel, composed.data(), composed.size(), 0, 1);
    require(same_values(fused, composed, call.numel, call.dtype), "a sum of messages is the sum of their values");

    const Codec to = any_codec(input);
    Buffer between(to.wire_bytes(call.numel), call.misaligned_values);
    Buffer encoded(between.size());
    call.codec.decode_sum_encode(total, to, between.data(), between.size(), call.seed, call.threads);
    to.encode(sum.data(), DType::float32, call.numel, encoded.data(), encoded.size(), call.seed, 1);
    const bool plain =
        std::all_of(reinterpret_cast<float*>(sum.data()), reinterpret_cast<float*>(sum.data()) + call.numel,
                    [](float value) { return !std::isnan(value); });
    require(!plain || same_bytes(between, encoded), "the message of a sum is the sum's message");
}

void fixed_wrong_size(Input& input) {
    const Call call(input);
    const std::int64_t right = call.codec.wire_bytes(call.numel);
    Buffer wire(input.flag() ? input.number(0, right + 32) : right);
    Buffer values = call.values(call.dtype);
    const bool fits = wire.size() == right;
    require(refuses([&] { call.encode(values, wire); }) == !fits, "encode refuses just the wrong sizes");
    require(refuses([&] { call.decode(wire, values, call.dtype, false); }) == !fits,
            "decode refuses just the wrong sizes");
    require(refuses([&] { call.decode(wire, values, call.dtype, true); }) == (!fits || call.dtype != DType::float32),
            "only fp32 is added to");
    Buffer from = call.wire();
    Buffer message(input.number(0, right + 32));
    require(refuses([&] {
                const Sum total{from.data(), 1, from.size(), call.numel, nullptr, DType::float32, 1.0F};
                call.codec.decode_sum_encode(total, call.codec, message.data(), message.size(), call.seed,
                                             call.threads);
            }) == (message.size() != right),
            "a sum's message has just one size");
}

void fixed_round_trip(Input& input) {
    const Call call(input);
    Buffer x = call.tensor(input);
    Buffer wire = call.wire();
    call.encode(x, wire);
    const std::string chosen = target();
    for (const std::string& name : targets()) {
        use_target(name);
        Buffer again(wire.size());
        call.encode(x, again);
        require(same_bytes(wire, again), "every instruction set writes the same bytes");
    }
    use_target(chosen);
    Buffer out = call.values(DType::float32);
    call.decode(wire, out, DType::float32, false);
    for (std::int64_t i = 0; i < call.numel; ++i) {
        require(magnitude_at(x, i, call.dtype) < infinity_of(call.dtype) ||
                    magnitude_at(out, i, DType::float32) >= infinity_of(DType::float32),
                "NaN and Inf never become finite");
    }
}

}  // namespace thinwire::fuzz
