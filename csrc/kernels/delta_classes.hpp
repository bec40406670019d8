// Words of a block of `delta`, and their classes: the exponents. Included by delta.cpp only.
#pragma once

#include <cstdint>

#include "kernels/delta.hpp"
#include "kernels/delta_bits.hpp"
#include "kernels/delta_runs.hpp"
#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

template <class Word>
struct [[gnu::packed, gnu::may_alias]] Loose {  // at any address
    Word word;
};

// A dtype as words: the place and the bits of the exponent.
template <class Unsigned, int kShift, std::uint32_t kMask>
struct Form {
    using Word = Unsigned;

    static constexpr Word kTop = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));

    static std::uint8_t class_of(Word word) {
        return static_cast<std::uint8_t>(word >> kShift & kMask);
    }

    // All bits if the sign bit is set, else none. Signs are as good as random, and a branch on them takes long.
    static Word sign_mask(Word word) {
        return static_cast<Word>(0 - (word >> (8 * sizeof(Word) - 1)));
    }
    static Word negated_if(Word mask, Word word) {
        return static_cast<Word>((word ^ mask) - mask);
    }

    // Words as integers in the order of the numbers that they stand for, and back.
    static Word ordered(Word word) {
        return static_cast<Word>(word ^ (sign_mask(word) | kTop));
    }
    static Word unordered(Word word) {
        return static_cast<Word>(word ^ (static_cast<Word>(~sign_mask(word)) | kTop));
    }
};

// The classes that a block has, in their order, and the first place of each when sorted by class.
struct Classes {
    int count = 0;
    std::uint8_t values[kClasses];
    std::int64_t starts[kClasses + 1];

    explicit Classes(const std::int64_t* counts) {
        std::int64_t start = 0;
        for (int value = kClasses - 1; value >= 0; --value) {
            if (counts[value] > 0) {
                values[count] = static_cast<std::uint8_t>(value);
                starts[count++] = start;
                start += counts[value];
            }
        }
        starts[count] = start;
    }

    std::int64_t size(int number) const {
        return starts[number + 1] - starts[number];
    }
};

// The classes that have most values, which are looked for 64 at a time; the values of others are taken one by one.
// Which ones these are says a sample, and changes nothing but the speed.
class Common {
public:
    static constexpr int kMost = kMostCommon;

    template <class F>
    Common(F, const Loose<typename F::Word>* words, std::int64_t numel) {
        constexpr std::int64_t kSample = 256;
        constexpr int kLeast = 2;
        std::uint16_t counts[kClasses] = {};
        for (std::int64_t i = 0; i < kSample; ++i) {
            ++counts[F::class_of(words[i * numel / kSample].word)];
        }
        for (int value = kClasses - 1; value >= 0 && count_ < kMost; --value) {
            if (counts[value] >= kLeast) {
                places_[value] = count_;
                values_[count_++] = static_cast<std::uint8_t>(value);
                is_common_[value] = true;
            }
        }
    }

    bool has(std::uint8_t value) const {
        return is_common_[value];
    }
    int count() const {
        return count_;
    }
    std::uint8_t value(int i) const {
        return values_[i];
    }
    // Where a class is among them.
    int place(std::uint8_t value) const {
        return places_[value];
    }
    // One that is not common.
    std::uint8_t other() const {
        std::uint8_t value = 0;
        while (is_common_[value]) {
            ++value;
        }
        return value;
    }

private:
    int count_ = 0;
    std::uint8_t values_[kMost];
    bool is_common_[kClasses] = {};
    int places_[kClasses] = {};
};

std::uint64_t inside(std::int64_t numel, std::int64_t at) {
    return numel - at >= 64 ? ~std::uint64_t{0} : low_bits(static_cast<int>(numel - at));
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
