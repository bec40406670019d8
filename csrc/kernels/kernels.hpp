// The kernels: plain loops over memory that their callers have checked, on one thread.
//
// Every file in this folder is compiled once per instruction set into the namespace thinwire::THINWIRE_TARGET. A
// symbol that two of those objects share would be linked once, in whichever version comes first, and could bring
// AVX-512 to a CPU without it. So everything here stands in the target's namespace or has no linkage, and uses no
// template or inline function of the standard library that leaves a symbol behind.
#pragma once

#include <cstddef>
#include <cstdint>

#ifndef THINWIRE_TARGET
#define THINWIRE_TARGET baseline
#endif

namespace thinwire {

// The numbers are the bindings' interface: src/thinwire/codecs/cpp passes them.
enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// Memory may be misaligned unless a kernel says otherwise.
struct Kernels {
    // kernels/zfp.cpp
    void (*zfp_encode)(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire);
    void (*zfp_decode)(const void* wire, std::int64_t numel, int maxbits, void* out, DType dtype, bool add);
};

namespace THINWIRE_TARGET {

void zfp_encode(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire);
void zfp_decode(const void* wire, std::int64_t numel, int maxbits, void* out, DType dtype, bool add);

extern const Kernels kKernels;

}  // namespace THINWIRE_TARGET
}  // namespace thinwire
