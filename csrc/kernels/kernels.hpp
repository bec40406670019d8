// What the kernels share: plain loops over memory that their callers have checked, on one thread.
//
// Every file in codecs/ and kernels/ is compiled once per instruction set, with THINWIRE_TARGET as the name of its
// namespace. A symbol that two of those objects share would be linked once, in whichever version comes first, and could
// bring AVX-512 to a CPU without it. So everything there stands in the target's namespace or has no linkage, and uses
// no template or inline function of the standard library that leaves a symbol behind.
//
// Each file offers one table of its kernels per instruction set; target.hpp chooses among them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace thinwire {

// The numbers are the bindings' interface: src/thinwire/codecs/cpp passes them.
enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// kernels/values.cpp. Memory may be misaligned, here and in every other kernel that does not say otherwise.
struct ValueKernels {
    // With `add`, which is for float32, values are added to what `out` holds.
    void (*cast)(const void* x, DType dtype, std::int64_t numel, void* out, DType to, bool add);
    void (*multiply)(float* x, std::int64_t numel, float factor);
};

#ifdef THINWIRE_TARGET
namespace THINWIRE_TARGET {

extern const ValueKernels kValues;

}  // namespace THINWIRE_TARGET
#endif

}  // namespace thinwire
