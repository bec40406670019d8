// What a codec gives to the rest: each file codecs/NAME.cpp defines `const CodecKind codecs::NAME`, and no other file
// names it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace thinwire {

// A wire format of fixed length (docs/wire-format.md): sizes, and ranges of values that are coded on their own, on one
// thread. Arguments are checked; memory may be misaligned.
class FixedFormat {
public:
    virtual ~FixedFormat() = default;

    virtual std::int64_t wire_bytes(std::int64_t numel) const = 0;

    // Ranges begin at multiples of this many values.
    virtual std::int64_t granule() const = 0;

    // `numel` is that of the whole message, which begins at `wire`; `x` begins at its value `first`.
    virtual void encode_range(const void* x, DType dtype, std::int64_t first, std::int64_t count, std::int64_t numel,
                              char* wire, std::uint32_t seed) const = 0;
    virtual void decode_range(const char* wire, std::int64_t first, std::int64_t count, std::int64_t numel, void* out,
                              DType dtype, bool add) const = 0;

    // Writes what no range writes.
    virtual void pad(std::int64_t, char*) const {}

    // Whether a range's bytes depend on values outside of it. Then encode_whole is called in place of encode_range.
    virtual bool needs_all_values() const {
        return false;
    }
    virtual void encode_whole(const void*, DType, std::int64_t, char*, std::uint32_t, int) const {}
};

// A number from `least` to `most`, for fuzzing.
using Draw = std::function<std::int64_t(std::int64_t least, std::int64_t most)>;

using Parameters = std::vector<std::int64_t>;

// A wire format of variable length that loses nothing. All functions throw std::invalid_argument for what does not fit.
class LosslessFormat {
public:
    virtual ~LosslessFormat() = default;

    // What messages begin with.
    virtual std::span<const std::uint32_t> magics() const = 0;
    // The dtypes that can be encoded.
    virtual std::span<const DType> dtypes() const = 0;
    // The largest message for so many values.
    virtual std::int64_t wire_bytes(std::int64_t numel, DType dtype) const = 0;
    // Writes nothing beyond wire_bytes; returns the message's bytes. Throws if `capacity` is less than wire_bytes.
    virtual std::int64_t encode(const void* x, DType dtype, std::int64_t numel, void* wire, std::int64_t capacity,
                                int threads) const = 0;
    // The `numel` values of a message of `encoded` ones, widened or rounded to `dtype`; or added to what `out` holds,
    // which must be float32. Other bytes may follow the message. Throws if the message is truncated or corrupt; `out`
    // may have been written to by then.
    virtual void decode(const void* wire, std::int64_t wire_bytes, std::int64_t numel, DType encoded, void* out,
                        DType dtype, bool add, int threads) const = 0;
};

// Throws std::invalid_argument unless the parameters are valid; `Family.parameters` of spec/codec.py makes them.
template <class Format>
using Make = std::unique_ptr<const Format> (*)(std::span<const std::int64_t> parameters);

// One of the two formats.
struct CodecKind {
    const char* name;
    Make<FixedFormat> make_fixed;
    Make<LosslessFormat> make_lossless;
    // Any valid parameters.
    Parameters (*draw)(const Draw& draw);
};

// Throws std::invalid_argument unless there are so many.
void check_parameters(const char* codec, std::span<const std::int64_t> parameters, std::size_t count);

// Throws std::invalid_argument unless a dtype has this number.
DType dtype_of(std::int64_t number);

// Every codec, in the order of their names.
std::span<const CodecKind* const> codec_kinds();

// Throws std::invalid_argument if no codec has this name.
const CodecKind& codec_kind(const std::string& name);

// Throw std::invalid_argument if no codec with such messages has this name, or the parameters are not valid.
std::unique_ptr<const FixedFormat> make_fixed(const std::string& name, std::span<const std::int64_t> parameters);
std::unique_ptr<const LosslessFormat> make_lossless(const std::string& name, std::span<const std::int64_t> parameters);

}  // namespace thinwire
