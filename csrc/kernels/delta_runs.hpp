// Flags of a block of `delta` as lengths of runs of zeros. Included by delta.cpp only.
#pragma once

#include <cstdint>

#include "kernels/delta_bits.hpp"
#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

constexpr int kClasses = 256;

// How a class has its flags written: with more ones than zeros, the other way round.
struct FlagCode {
    bool inverted;
    int parameter;
};

// Runs belong to the class that they begin in, and may end in another one. Classes are numbered as they come.
class RunWriter {
public:
    explicit RunWriter(std::uint32_t* lengths) : lengths_(lengths) {}

    // The flags of the next class: `ones` of its `numel` values, whose ranks ascend.
    void add(std::int64_t numel, const std::uint32_t* ranks, std::int64_t ones) {
        const int number = classes_++;
        inverted_[number] = 2 * ones > numel;
        if (zeros_ == 0) {
            owner_ = number;
        }
        std::int64_t next = 0;
        if (!inverted_[number]) {
            for (std::int64_t i = 0; i < ones; ++i) {
                zeros_ += ranks[i] - next;
                end_run(number);
                next = ranks[i] + 1;
            }
            zeros_ += numel - next;
            return;
        }
        for (std::int64_t i = 0; i <= ones; ++i) {
            const std::int64_t rank = i < ones ? ranks[i] : numel;
            for (; next < rank; ++next) {
                end_run(number);
            }
            next = rank + 1;
            zeros_ += i < ones ? 1 : 0;
        }
    }

    // After the last class.
    void finish() {
        if (zeros_ > 0) {
            end_run(owner_);
        }
        for (int number = 0; number < classes_; ++number) {
            parameters_[number] = tallies_[number].parameter();
        }
    }

    void write_parameters(BitWriter& bits) const {
        for (int number = 0; number < classes_; ++number) {
            bits.put((inverted_[number] ? 1U : 0U) | static_cast<std::uint64_t>(parameters_[number]) << 1, 6);
        }
    }

    void write(BitWriter& bits) const {
        const std::uint32_t* at = lengths_;
        for (int number = 0; number < classes_; ++number) {
            for (std::int64_t left = counts_[number]; left > 0; --left) {
                bits.put_rice(*at++, parameters_[number]);
            }
        }
    }

private:
    std::uint32_t* const lengths_;
    std::int64_t count_ = 0;
    std::int64_t zeros_ = 0;
    int owner_ = 0;
    int classes_ = 0;
    bool inverted_[kClasses];
    int parameters_[kClasses];
    std::int64_t counts_[kClasses] = {};
    Lengths tallies_[kClasses];

    void end_run(int number) {
        const auto length = static_cast<std::uint32_t>(zeros_);
        lengths_[count_++] = length;
        ++counts_[owner_];
        tallies_[owner_].add(length);
        zeros_ = 0;
        owner_ = number;
    }
};

// Reads what RunWriter writes: class after class, the ranks of its ones.
class RunReader {
public:
    // The first value of each class, and their number at the end.
    RunReader(BitReader& bits, const std::int64_t* starts, const FlagCode* codes, int classes)
        : bits_(bits), starts_(starts), codes_(codes), numel_(starts[classes]) {
        find_one(0);
    }

    // Returns how many there are.
    std::int64_t read(int number, std::uint32_t* ranks) {
        const std::int64_t start = starts_[number];
        const std::int64_t end = starts_[number + 1];
        std::int64_t count = 0;
        if (!codes_[number].inverted) {
            while (one_ < end) {
                ranks[count++] = static_cast<std::uint32_t>(one_ - start);
                find_one(one_ + 1);
            }
            return count;
        }
        for (std::int64_t at = start; at < end;) {
            const std::int64_t stop = one_ < end ? one_ : end;
            for (; at < stop; ++at) {
                ranks[count++] = static_cast<std::uint32_t>(at - start);
            }
            if (at < end) {
                find_one(++at);
            }
        }
        return count;
    }

    // Whether no run so far ends beyond the last value.
    bool fits() const {
        return fits_;
    }

private:
    BitReader& bits_;
    const std::int64_t* const starts_;
    const FlagCode* const codes_;
    const std::int64_t numel_;
    int owner_ = 0;
    std::int64_t one_ = 0;  // the next one, or the number of values
    bool fits_ = true;

    void find_one(std::int64_t from) {
        if (from >= numel_) {
            one_ = numel_;
            return;
        }
        while (from >= starts_[owner_ + 1]) {
            ++owner_;
        }
        one_ = from + static_cast<std::int64_t>(bits_.take_rice(codes_[owner_].parameter));
        if (one_ > numel_) {
            one_ = numel_;
            fits_ = false;
        }
    }
};

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
