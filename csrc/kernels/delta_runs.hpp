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

    static FlagCode of(std::int64_t numel, std::int64_t ones) {
        const bool inverted = 2 * ones > numel;
        const std::int64_t written = inverted ? numel - ones : ones;
        const std::int64_t least = written > 0 ? written : 1;
        // With a share p of ones, k + 1 takes less than k while (1 - p)^(2^k) is above one over the golden ratio, whose
        // logarithm is 64 / 133.
        int parameter = 0;
        while ((133 * least) << (parameter + 1) < 64 * (2 * numel - written)) {
            ++parameter;
        }
        return {inverted, parameter};
    }
};

// Writes flags as runs of zeros, each of which belongs to the class that it begins in, and may end in another one.
class RunWriter {
public:
    explicit RunWriter(BitWriter& to) : to_(to), bits_(to) {}

    // The flags of the next class: `ones` of its `numel` values, whose ranks, by `rank_of`, ascend.
    template <class Fn>
    void add(const FlagCode& code, std::int64_t numel, std::int64_t ones, const Fn& rank_of) {
        if (zeros_ == 0) {
            parameter_ = code.parameter;
        }
        std::int64_t next = 0;
        if (!code.inverted) {
            for (std::int64_t i = 0; i < ones; ++i) {
                const std::int64_t rank = rank_of(i);
                end_run(rank - next, code.parameter);
                next = rank + 1;
            }
            zeros_ += numel - next;
            return;
        }
        for (std::int64_t i = 0; i <= ones; ++i) {
            const std::int64_t rank = i < ones ? rank_of(i) : numel;
            for (; next < rank; ++next) {
                end_run(0, code.parameter);
            }
            next = rank + 1;
            zeros_ += i < ones ? 1 : 0;
        }
    }

    // After the last class.
    void finish() {
        if (zeros_ > 0) {
            end_run(0, 0);
        }
        to_ = bits_;
    }

private:
    BitWriter& to_;
    BitWriter bits_;  // not the reference, which would be in memory
    std::int64_t zeros_ = 0;
    int parameter_ = 0;

    // After so many more zeros; the next run begins with this parameter.
    void end_run(std::int64_t more, int parameter) {
        bits_.put_rice(static_cast<std::uint32_t>(zeros_ + more), parameter_);
        zeros_ = 0;
        parameter_ = parameter;
    }
};

// Reads what RunWriter writes: a bit for each value, in `flags`, which have room for 64 more. The first value of each
// class, and their number at the end, are in `starts`. Returns whether no run ends beyond the last value.
bool read_runs(BitReader& from, const std::int64_t* starts, const FlagCode* codes, int classes, std::uint64_t* flags) {
    const std::int64_t numel = starts[classes];
    __builtin_memset(flags, 0, static_cast<std::size_t>(numel / 64 + 2) * sizeof *flags);
    BitReader bits = from;  // not the reference, which would be in memory
    std::int64_t at = 0;
    for (int number = 0; number < classes; ++number) {
        const int parameter = codes[number].parameter;
        while (at < starts[number + 1]) {
            at += static_cast<std::int64_t>(bits.take_rice(parameter));
            if (at >= numel) {
                from = bits;
                return at == numel;
            }
            flags[at / 64] |= std::uint64_t{1} << at % 64;
            ++at;
        }
    }
    from = bits;
    return true;
}

// The place of the next flag that is set, or some place after all of them.
std::int64_t next_flag(const std::uint64_t* flags, std::int64_t at, std::int64_t numel) {
    std::uint64_t word = at < numel ? flags[at / 64] >> at % 64 << at % 64 : 0;
    while (word == 0) {
        at = (at / 64 + 1) * 64;
        if (at >= numel) {
            return numel;
        }
        word = flags[at / 64];
    }
    return at / 64 * 64 + __builtin_ctzll(word);
}

// The 64 flags from a place on.
std::uint64_t flags_from(const std::uint64_t* flags, std::int64_t at) {
    const auto shift = static_cast<int>(at % 64);
    return flags[at / 64] >> shift | flags[at / 64 + 1] << 1 << (63 - shift);
}

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
