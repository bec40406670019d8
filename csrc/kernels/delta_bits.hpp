// Bits of a block of `delta`, the lowest of each byte first. Included by delta.cpp only.
#pragma once

#include <cstdint>

#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

// A quotient of so many and more is written as so many ones, and the number in 32 bits.
constexpr int kUnary = 20;
constexpr int kEscape = kUnary + 32;

int bit_length(std::uint32_t number) {
    return number == 0 ? 0 : 32 - __builtin_clz(number);
}

constexpr std::uint64_t low_bits(int count) {
    return (std::uint64_t{1} << count) - 1;
}

// Numbers of each bit length, and the Rice parameter that suits them.
class Lengths {
public:
    void add(std::uint32_t number) {
        ++counts_[bit_length(number)];
    }

    // What numbers of a length cost on average is taken twice, so that it is whole. The first of several equal ones.
    int parameter() const {
        int best = 0;
        std::uint64_t least = ~std::uint64_t{0};
        int longest = 32;
        while (longest > 0 && counts_[longest] == 0) {
            --longest;
        }
        for (int k = 0; k <= longest && k < 32; ++k) {  // a longer one costs more
            std::uint64_t total = 0;
            for (int length = 0; length <= longest; ++length) {
                const std::uint64_t twice = length > k ? (std::uint64_t{3} << (length - 1 - k)) - 1 : 0;
                const auto code = static_cast<std::uint64_t>(2 * (k + 1));
                total += counts_[length] * (twice < 2 * kUnary ? twice + code : std::uint64_t{2 * kEscape});
            }
            if (total < least) {
                least = total;
                best = k;
            }
        }
        return best;
    }

private:
    std::uint32_t counts_[33] = {};
};

class BitWriter {
public:
    BitWriter(char* to, std::int64_t limit) : to_(to), at_(to), end_(to + limit) {}

    // At most 56 bits. What no longer fits is dropped, and `size` says so.
    void put(std::uint64_t bits, int count) {
        if (at_ >= end_) {
            return;
        }
        held_ |= bits << filled_;
        filled_ += count;
        __builtin_memcpy(at_, &held_, sizeof held_);
        at_ += filled_ >> 3;
        held_ >>= filled_ & 56;
        filled_ &= 7;
    }

    void put_rice(std::uint32_t number, int k) {
        const std::uint32_t quotient = number >> k;
        if (quotient < kUnary) {
            const auto q = static_cast<int>(quotient);
            put(low_bits(q) | (number & low_bits(k)) << (q + 1), q + 1 + k);
        } else {
            put(low_bits(kUnary) | std::uint64_t{number} << kUnary, kEscape);
        }
    }

    // Bytes, or -1 if there are as many as the limit or more.
    std::int64_t size() const {
        const std::int64_t bytes = at_ - to_ + (filled_ > 0 ? 1 : 0);
        return bytes < end_ - to_ ? bytes : -1;
    }

private:
    char* to_;
    char* at_;
    char* end_;
    std::uint64_t held_ = 0;
    int filled_ = 0;
};

// Zeros follow the end, the first 8 bytes of them in memory.
class BitReader {
public:
    BitReader(const char* from, std::int64_t bytes) : from_(from), bytes_(bytes) {}

    std::int64_t place() const {
        return 8 * next_ - count_;
    }
    bool has(std::int64_t bits) const {
        return place() + bits <= 8 * bytes_;
    }

    std::uint64_t bit(std::int64_t place) const {
        return static_cast<std::uint64_t>(from_[place >> 3] >> (place & 7) & 1);
    }

    // At most 56.
    std::uint64_t take(int count) {
        fill();
        const std::uint64_t bits = held_ & low_bits(count);
        drop(count);
        return bits;
    }

    std::uint64_t take_rice(int k) {
        fill();
        const std::uint64_t bits = held_;
        const int q = __builtin_ctzll(~bits | std::uint64_t{1} << kUnary);
        if (q == kUnary) {
            drop(kEscape);
            return bits >> kUnary & low_bits(32);
        }
        drop(q + 1 + k);
        return static_cast<std::uint64_t>(q) << k | (bits >> (q + 1) & low_bits(k));
    }

    // Whether all bits were taken but zeros that complete the last byte.
    bool at_end() const {
        const std::int64_t left = 8 * bytes_ - place();
        return left >= 0 && left < 8 && (left == 0 || static_cast<std::uint8_t>(from_[bytes_ - 1]) >> (8 - left) == 0);
    }

private:
    const char* from_;
    std::int64_t bytes_;
    std::int64_t next_ = 0;  // the byte whose bits come after those that are held
    std::uint64_t held_ = 0;
    int count_ = 0;

    // Holds 56 bits or more. What is read does not wait for the bits taken last (Giesen, Reading bits in far too many
    // ways, part 2).
    void fill() {
        std::uint64_t more;
        __builtin_memcpy(&more, from_ + (next_ < bytes_ ? next_ : bytes_), sizeof more);
        held_ |= more << count_;
        next_ += (63 - count_) >> 3;
        count_ |= 56;
    }
    void drop(int count) {
        held_ >>= count;
        count_ -= count;
    }
};

}  // namespace
}  // namespace thinwire::THINWIRE_TARGET
