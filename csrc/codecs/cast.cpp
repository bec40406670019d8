// Values in another dtype, or as they are. The loops are kernels/values.cpp, which other codecs use as well.
#ifndef THINWIRE_TARGET

#include "codec_kinds.hpp"
#include "sizes.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

class Cast final : public FixedFormat {
public:
    explicit Cast(DType to) : to_(to) {}

    std::int64_t wire_bytes(std::int64_t numel) const override {
        return numel * bytes_of(to_);
    }

    std::int64_t granule() const override {
        return 1;
    }

    void encode_range(const void* x, DType dtype, std::int64_t first, std::int64_t count, std::int64_t, char* wire,
                      std::uint32_t) const override {
        value_kernels().cast(x, dtype, count, wire + first * bytes_of(to_), to_, false);
    }

    void decode_range(const char* wire, std::int64_t first, std::int64_t count, std::int64_t, void* out, DType dtype,
                      bool add) const override {
        value_kernels().cast(wire + first * bytes_of(to_), to_, count, out, dtype, add);
    }

private:
    const DType to_;
};

// The type of the values on the wire: bfloat16, float16, or with `none` the tensor's own.
std::unique_ptr<const FixedFormat> make(std::span<const std::int64_t> parameters) {
    check_parameters("cast", parameters, 1);
    return std::make_unique<Cast>(dtype_of(parameters[0]));
}

Parameters draw(const Draw& number) {
    return {number(0, 2)};
}

}  // namespace

namespace codecs {
extern const CodecKind cast = {"cast", make, nullptr, draw};
}

}  // namespace thinwire

#endif
