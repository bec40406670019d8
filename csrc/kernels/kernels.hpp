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

// intN:BLOCK and intN:tensor. A block is at most kMostBlock values, so that one fits the first-level cache.
constexpr std::int64_t kMostBlock = 8192;

struct BlockFormat {
    int bits;            // 2 to 8
    std::int64_t block;  // values a scale serves, a multiple of 8
    bool search;         // the scale of least squared error, for 5 bits and fewer
    bool hadamard;       // blocks are rotated; `block` is a power of two
    bool stochastic;
};

// The largest magnitude among values, as the bits of an fp32 without sign (infinities and NaN above all others), and
// whether a value without minus sign has it.
struct Largest {
    std::int32_t magnitude;
    bool positive;
};

// The parts of an exp3 message from some block of 512 values on. Byte is char or const char.
template <class Byte>
struct Exp3Parts {
    Byte* bases;    // one byte for each block
    Byte* counts;   // two
    Byte* planes;   // 192
    Byte* rest;     // a byte for each value
    Byte* escapes;  // a byte for each escape
};

// Memory may be misaligned unless a kernel says otherwise.
struct Kernels {
    // kernels/block.cpp. Whole blocks, the last of a message may be shorter; `position` is the place of x[0] in it.
    void (*block_encode)(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format,
                         std::int64_t position, std::uint32_t seed, void* codes, void* scales);
    void (*block_decode)(const void* codes, const void* scales, std::int64_t numel, const BlockFormat& format,
                         void* out, DType dtype, bool add);
    // One scale for many parts: first the largest value of all parts, then the parts. Returns the scale.
    Largest (*block_largest)(const void* x, DType dtype, std::int64_t numel);
    float (*block_encode_part)(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format,
                               const Largest& largest, std::int64_t position, std::uint32_t seed, void* codes);

    // kernels/cast.cpp
    void (*cast)(const void* x, DType dtype, std::int64_t numel, void* out, DType to, bool add);
    void (*multiply)(float* x, std::int64_t numel, float factor);

    // kernels/exp3.cpp. `x` begins a block.
    std::int64_t (*exp3_count)(const void* x, std::int64_t numel);  // escapes
    // Returns the number of escapes, or -1 if there are more than `room`.
    std::int64_t (*exp3_encode)(const void* x, std::int64_t numel, const Exp3Parts<char>& parts, std::int64_t room);
    std::int64_t (*exp3_announced)(const void* counts, std::int64_t blocks);  // escapes
    // Reads as many escapes as the counts announce. Returns whether each block marks as many as it announces.
    bool (*exp3_decode)(const Exp3Parts<const char>& parts, std::int64_t numel, void* out);

    // kernels/mpc.cpp. `x` and `out` begin a chunk; `kept` are the residual words that are not zero, and
    // what is returned is how many they are.
    std::int64_t (*mpc_count)(const void* x, std::int64_t nbytes);
    std::int64_t (*mpc_encode)(const void* x, std::int64_t nbytes, void* bitmap, void* kept);
    std::int64_t (*mpc_announced)(const void* bitmap, std::int64_t words);
    std::int64_t (*mpc_decode)(const void* bitmap, const void* kept, std::int64_t nbytes, void* out);

    // kernels/zfp.cpp
    void (*zfp_encode)(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire);
    void (*zfp_decode)(const void* wire, std::int64_t numel, int maxbits, void* out, DType dtype, bool add);
};

namespace THINWIRE_TARGET {

void block_encode(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format, std::int64_t position,
                  std::uint32_t seed, void* codes, void* scales);
void block_decode(const void* codes, const void* scales, std::int64_t numel, const BlockFormat& format, void* out,
                  DType dtype, bool add);
Largest block_largest(const void* x, DType dtype, std::int64_t numel);
float block_encode_part(const void* x, DType dtype, std::int64_t numel, const BlockFormat& format,
                        const Largest& largest, std::int64_t position, std::uint32_t seed, void* codes);
void cast(const void* x, DType dtype, std::int64_t numel, void* out, DType to, bool add);
void multiply(float* x, std::int64_t numel, float factor);

std::int64_t exp3_count(const void* x, std::int64_t numel);
std::int64_t exp3_encode(const void* x, std::int64_t numel, const Exp3Parts<char>& parts, std::int64_t room);
std::int64_t exp3_announced(const void* counts, std::int64_t blocks);
bool exp3_decode(const Exp3Parts<const char>& parts, std::int64_t numel, void* out);

std::int64_t mpc_count(const void* x, std::int64_t nbytes);
std::int64_t mpc_encode(const void* x, std::int64_t nbytes, void* bitmap, void* kept);
std::int64_t mpc_announced(const void* bitmap, std::int64_t words);
std::int64_t mpc_decode(const void* bitmap, const void* kept, std::int64_t nbytes, void* out);

void zfp_encode(const void* x, DType dtype, std::int64_t numel, int maxbits, void* wire);
void zfp_decode(const void* wire, std::int64_t numel, int maxbits, void* out, DType dtype, bool add);

extern const Kernels kKernels;

}  // namespace THINWIRE_TARGET
}  // namespace thinwire
