#include "fuzz/fuzz.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <vector>

#include "target.hpp"

namespace thinwire::fuzz {
namespace {

constexpr Property kProperties[] = {
    fixed_any_message,    fixed_sum,          fixed_wrong_size,    fixed_round_trip,
    lossless_any_message, lossless_truncated, lossless_round_trip, delta_any_message,
    delta_any_block,      delta_truncated,    delta_round_trip,
};

}  // namespace

std::uint8_t Input::byte() {
    if (bytes_.empty()) {
        return 0;
    }
    const std::uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
}

std::int64_t Input::number(std::int64_t least, std::int64_t most) {
    const auto span = static_cast<std::uint64_t>(most - least) + 1;
    std::uint64_t value = 0;
    for (std::uint64_t reach = 1; reach < span; reach *= 256) {
        value = value * 256 + byte();
    }
    return least + static_cast<std::int64_t>(value % span);
}

Buffer::Buffer(std::int64_t size, std::int64_t misaligned)
    : size_(size),
      misaligned_(misaligned),
      memory_(std::make_unique<std::uint8_t[]>(static_cast<std::size_t>(size + misaligned))) {}

void Buffer::fill(Input& input) {
    for (std::int64_t i = 0; i < size_; ++i) {
        (*this)[i] = input.byte();
    }
}

void Buffer::mutate(Input& input, int most) {
    for (std::int64_t left = size_ > 0 ? input.number(0, most) : 0; left > 0; --left) {
        std::uint8_t& at = (*this)[input.number(0, size_ - 1)];
        at = input.flag() ? input.byte() : static_cast<std::uint8_t>(at ^ 1 << input.number(0, 7));
    }
}

const CodecKind& any_kind(Input& input, bool (*fits)(const CodecKind& kind)) {
    std::vector<const CodecKind*> kinds;
    std::copy_if(codec_kinds().begin(), codec_kinds().end(), std::back_inserter(kinds),
                 [&](const CodecKind* kind) { return fits(*kind); });
    return *kinds[static_cast<std::size_t>(input.number(0, std::ssize(kinds) - 1))];
}

Parameters any_parameters(Input& input, const CodecKind& kind) {
    return kind.draw([&](std::int64_t least, std::int64_t most) { return input.number(least, most); });
}

void require(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "with %s kernels, this does not hold: %s\n", target().c_str(), what);
        std::abort();
    }
}

}  // namespace thinwire::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace thinwire;
    static const std::vector<std::string> names = targets();
    fuzz::Input input({data, size});
    use_target(names[static_cast<std::size_t>(input.number(0, std::ssize(names) - 1))]);
    fuzz::kProperties[input.number(0, std::ssize(fuzz::kProperties) - 1)](input);
    return 0;
}
