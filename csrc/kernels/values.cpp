// Values from one dtype to another.
#include "kernels/values.hpp"

#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

void cast(const void* x, DType dtype, std::int64_t numel, void* out, DType to, bool add) {
    if (dtype == to && !add) {
        copy(out, x, numel * item_bytes(dtype));
        return;
    }
    constexpr std::int64_t kPiece = 2048;
    alignas(64) float widened[kPiece];
    for (std::int64_t at = 0; at < numel; at += kPiece) {
        const std::int64_t count = numel - at < kPiece ? numel - at : kPiece;
        const float* values = load_values(offset(x, dtype, at), count, dtype, widened);
        store_values(values, count, offset(out, to, at), to, add);
    }
}

void multiply(float* x, std::int64_t numel, float factor) {
    for (std::int64_t i = 0; i < numel; ++i) {
        x[i] = x[i] * factor;
    }
}

}  // namespace

extern const ValueKernels kValues = {.cast = cast, .multiply = multiply};

}  // namespace thinwire::THINWIRE_TARGET
