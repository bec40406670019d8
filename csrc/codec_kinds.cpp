#include "codec_kinds.hpp"

#include <stdexcept>

namespace thinwire {
namespace codecs {

// codec_list.inc has a line THINWIRE_CODEC(NAME) for each file codecs/NAME.cpp. CMake writes it.
#define THINWIRE_CODEC(name) extern const CodecKind name;
#include "codec_list.inc"
#undef THINWIRE_CODEC

}  // namespace codecs

namespace {

#define THINWIRE_CODEC(name) &codecs::name,
constexpr const CodecKind* kKinds[] = {
#include "codec_list.inc"
};
#undef THINWIRE_CODEC

}  // namespace

void check_parameters(const char* codec, std::span<const std::int64_t> parameters, std::size_t count) {
    if (parameters.size() != count) {
        throw std::invalid_argument(std::string(codec) + " takes " + std::to_string(count) + " parameters, not " +
                                    std::to_string(parameters.size()));
    }
}

DType dtype_of(std::int64_t number) {
    if (number < 0 || number > static_cast<std::int64_t>(DType::float16)) {
        throw std::invalid_argument("no dtype " + std::to_string(number));
    }
    return static_cast<DType>(number);
}

std::span<const CodecKind* const> codec_kinds() {
    return kKinds;
}

const CodecKind& codec_kind(const std::string& name) {
    for (const CodecKind* kind : kKinds) {
        if (kind->name == name) {
            return *kind;
        }
    }
    throw std::invalid_argument("no codec has the name " + name);
}

std::unique_ptr<const FixedFormat> make_fixed(const std::string& name, std::span<const std::int64_t> parameters) {
    const CodecKind& kind = codec_kind(name);
    if (kind.make_fixed == nullptr) {
        throw std::invalid_argument(name + " has messages of variable length");
    }
    return kind.make_fixed(parameters);
}

std::unique_ptr<const LosslessFormat> make_lossless(const std::string& name, std::span<const std::int64_t> parameters) {
    const CodecKind& kind = codec_kind(name);
    if (kind.make_lossless == nullptr) {
        throw std::invalid_argument(name + " has messages of fixed length");
    }
    return kind.make_lossless(parameters);
}

}  // namespace thinwire
