// Blocks of `delta` (docs/wire-format.md). Values are taken class after class, a class being an exponent of the old
// values, the largest first: whether a value changes depends on little else.
#include "kernels/delta.hpp"

#include "kernels/delta_bits.hpp"
#include "kernels/delta_runs.hpp"
#include "kernels/kernels.hpp"
#include "kernels/masks.hpp"

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

    // Words as integers in the order of the numbers that they stand for, and back.
    static Word ordered(Word word) {
        return static_cast<Word>((word & kTop) != 0 ? ~word : word | kTop);
    }
    static Word unordered(Word word) {
        return static_cast<Word>((word & kTop) != 0 ? word ^ kTop : ~word);
    }
};

// The classes that a block has, in their order, and the first place of each when sorted by class.
struct Classes {
    int count = 0;
    std::uint8_t values[kClasses];
    std::int64_t starts[kClasses + 1];

    std::int64_t size(int number) const {
        return starts[number + 1] - starts[number];
    }
};

Classes count_classes(const std::uint8_t* classes, std::int64_t numel) {
    std::uint32_t counts[4][kClasses] = {};  // neighbours are often of one class, and would wait for each other
    std::int64_t i = 0;
    for (; i + 8 <= numel; i += 8) {
        std::uint64_t eight;
        __builtin_memcpy(&eight, classes + i, sizeof eight);
        for (int j = 0; j < 8; ++j) {
            ++counts[j % 4][eight >> 8 * j & 0xff];
        }
    }
    for (; i < numel; ++i) {
        ++counts[0][classes[i]];
    }
    Classes found;
    std::int64_t start = 0;
    for (int value = kClasses - 1; value >= 0; --value) {
        const std::int64_t count =
            std::int64_t{counts[0][value]} + counts[1][value] + counts[2][value] + counts[3][value];
        if (count > 0) {
            found.values[found.count] = static_cast<std::uint8_t>(value);
            found.starts[found.count++] = start;
            start += count;
        }
    }
    found.starts[found.count] = start;
    return found;
}

// Calls fn(group, mask) for the places of a class, 64 at a time, until it returns false.
template <class Fn>
void for_places(const std::uint8_t* classes, std::uint8_t value, std::int64_t numel, const Fn& fn) {
    const std::int64_t whole = numel / 64;
    for (std::int64_t group = 0; group < whole; ++group) {
        if (!fn(group, places_of(classes + 64 * group, value))) {
            return;
        }
    }
    if (numel % 64 != 0) {
        fn(whole, places_of(classes + 64 * whole, value) & low_bits(static_cast<int>(numel % 64)));
    }
}

// ---------------------------------------------------------------------------------------------------------- encode

// Classes of the old values and which of them changed. Returns whether any did.
template <class F>
bool compare(const Loose<typename F::Word>* before, const Loose<typename F::Word>* after, std::int64_t numel,
             const DeltaRoom& room) {
    std::uint8_t* const classes = room.classes;  // bytes may alias anything, `room` as well
    std::uint64_t any = 0;
    for (std::int64_t at = 0; at < numel; at += 64) {
        alignas(64) std::uint8_t same[64] = {};
        if (numel - at >= 64) {
            for (int i = 0; i < 64; ++i) {
                classes[at + i] = F::class_of(before[at + i].word);
                same[i] = before[at + i].word == after[at + i].word;
            }
            room.changed[at / 64] = places_of(same, 0);
        } else {
            const auto left = static_cast<int>(numel - at);
            for (int i = 0; i < left; ++i) {
                classes[at + i] = F::class_of(before[at + i].word);
                same[i] = before[at + i].word == after[at + i].word;
            }
            room.changed[at / 64] = places_of(same, 0) & low_bits(left);
        }
        any |= room.changed[at / 64];
    }
    return any != 0;
}

// Places and ranks of changes, class by class; returns their number before each class.
void find_changes(const Classes& classes, std::int64_t numel, const DeltaRoom& room, std::int64_t* changes) {
    std::int64_t count = 0;
    for (int number = 0; number < classes.count; ++number) {
        changes[number] = count;
        std::int64_t rank = 0;
        for_places(room.classes, classes.values[number], numel, [&](std::int64_t group, std::uint64_t mask) {
            for (std::uint64_t here = mask & room.changed[group]; here != 0; here &= here - 1) {
                const int bit = __builtin_ctzll(here);
                room.places[count] = static_cast<std::uint32_t>(64 * group + bit);
                room.ranks[count++] = static_cast<std::uint32_t>(rank + popcount(mask & low_bits(bit)));
            }
            rank += popcount(mask);
            return true;
        });
    }
    changes[classes.count] = count;
}

template <class F>
std::int64_t encode_as(const void* old, const void* now, std::int64_t numel, const DeltaRoom room, char* to,
                       std::int64_t limit) {
    using Word = typename F::Word;
    const auto* before = static_cast<const Loose<Word>*>(old);
    const auto* after = static_cast<const Loose<Word>*>(now);
    if (!compare<F>(before, after, numel, room)) {
        return 0;
    }
    const Classes classes = count_classes(room.classes, numel);
    std::int64_t changes[kClasses + 1];
    find_changes(classes, numel, room, changes);
    const std::int64_t count = changes[classes.count];

    RunWriter first(room.runs[0]);
    for (int number = 0; number < classes.count; ++number) {
        first.add(classes.size(number), room.ranks + changes[number], changes[number + 1] - changes[number]);
    }
    first.finish();

    // Steps: their signs take the place of the ranks.
    int small = 0;  // classes before the first one with a step of two or more
    RunWriter second(room.runs[1]);
    Lengths rest[kClasses];
    for (int number = 0; number < classes.count; ++number) {
        std::int64_t big = 0;
        for (std::int64_t i = changes[number]; i < changes[number + 1]; ++i) {
            const auto from = F::ordered(before[room.places[i]].word);
            const auto step = static_cast<Word>(F::ordered(after[room.places[i]].word) - from);
            const bool negative = (step & F::kTop) != 0;
            const auto size = static_cast<Word>(negative ? 0 - step : step);
            room.ranks[i] = negative ? 1 : 0;
            room.sizes[i] = size;
            if (size > 1) {
                room.big[big++] = static_cast<std::uint32_t>(i - changes[number]);
                rest[number].add(std::uint32_t{size} - 2);
            }
        }
        if (big == 0 && small == number) {
            ++small;
        } else {
            second.add(changes[number + 1] - changes[number], room.big, big);
        }
    }
    second.finish();

    BitWriter bits(to, limit);
    first.write_parameters(bits);
    bits.put(static_cast<std::uint64_t>(small), 9);
    second.write_parameters(bits);
    int parameters[kClasses];
    for (int number = small; number < classes.count; ++number) {
        parameters[number] = rest[number].parameter();
        bits.put(static_cast<std::uint64_t>(parameters[number]), 5);
    }
    first.write(bits);
    for (std::int64_t i = 0; i < count; i += 32) {
        const auto here = static_cast<int>(count - i < 32 ? count - i : 32);
        std::uint64_t signs = 0;
        for (int j = 0; j < here; ++j) {
            signs |= std::uint64_t{room.ranks[i + j]} << j;
        }
        bits.put(signs, here);
    }
    second.write(bits);
    for (int number = small; number < classes.count; ++number) {
        for (std::int64_t i = changes[number]; i < changes[number + 1]; ++i) {
            if (room.sizes[i] > 1) {
                bits.put_rice(room.sizes[i] - 2, parameters[number]);
            }
        }
    }
    return bits.size();
}

// ----------------------------------------------------------------------------------------------------------- apply

FlagCode take_code(BitReader& bits) {
    const auto both = static_cast<int>(bits.take(6));
    return {(both & 1) != 0, both >> 1};
}

// Places of a class's changes from their ranks.
void find_places(const std::uint8_t* classes, std::uint8_t value, std::int64_t numel, const std::uint32_t* ranks,
                 std::int64_t count, std::uint32_t* places) {
    std::int64_t i = 0;
    std::int64_t before = 0;
    for_places(classes, value, numel, [&](std::int64_t group, std::uint64_t mask) {
        const std::int64_t until = before + popcount(mask);
        for (; i < count && ranks[i] < until; ++i) {
            const int rank = static_cast<int>(ranks[i] - before);
            places[i] = static_cast<std::uint32_t>(64 * group + place_of(mask, rank));
        }
        before = until;
        return i < count;
    });
}

template <class F>
bool apply_as(const void* old, std::int64_t numel, const char* body, std::int64_t nbytes, const DeltaRoom room,
              void* now) {
    using Word = typename F::Word;
    const auto* before = static_cast<const Loose<Word>*>(old);
    auto* after = static_cast<Loose<Word>*>(now);
    std::uint8_t* const values = room.classes;
    for (std::int64_t i = 0; i < numel; ++i) {
        values[i] = F::class_of(before[i].word);
    }
    __builtin_memcpy(now, old, static_cast<std::size_t>(numel) * sizeof(Word));
    const Classes classes = count_classes(room.classes, numel);
    BitReader bits(body, nbytes);
    FlagCode first_codes[kClasses];
    FlagCode second_codes[kClasses];
    int parameters[kClasses];
    for (int number = 0; number < classes.count; ++number) {
        first_codes[number] = take_code(bits);
    }
    const auto small = static_cast<int>(bits.take(9));
    if (small > classes.count) {
        return false;
    }
    for (int number = small; number < classes.count; ++number) {
        second_codes[number] = take_code(bits);
    }
    for (int number = small; number < classes.count; ++number) {
        parameters[number] = static_cast<int>(bits.take(5));
    }

    std::int64_t changes[kClasses + 1] = {};
    RunReader first(bits, classes.starts, first_codes, classes.count);
    for (int number = 0; number < classes.count; ++number) {
        std::uint32_t* ranks = room.ranks + changes[number];
        const std::int64_t count = first.read(number, ranks);
        changes[number + 1] = changes[number] + count;
        find_places(room.classes, classes.values[number], numel, ranks, count, room.places + changes[number]);
    }
    const std::int64_t count = changes[classes.count];
    const std::int64_t signs = bits.place();
    bits.skip(count);
    if (!first.fits() || !bits.has(0)) {
        return false;
    }
    const auto step = [&](std::int64_t i, Word size) {
        Loose<Word>& at = after[room.places[i]];
        const Word from = F::ordered(at.word);
        at.word = F::unordered(static_cast<Word>(bits.bit(signs + i) ? from - size : from + size));
    };
    for (std::int64_t i = 0; i < count; ++i) {
        step(i, 1);
    }

    std::int64_t seconds[kClasses + 1];
    for (int number = small; number <= classes.count; ++number) {
        seconds[number] = changes[number] - changes[small];
    }
    RunReader second(bits, seconds + small, second_codes + small, classes.count - small);
    std::int64_t big[kClasses + 1] = {};
    for (int number = small; number < classes.count; ++number) {
        std::uint32_t* ranks = room.big + big[number];
        big[number + 1] = big[number] + second.read(number - small, ranks);
    }
    for (int number = small; number < classes.count; ++number) {
        for (std::int64_t i = big[number]; i < big[number + 1]; ++i) {
            step(changes[number] + room.big[i], static_cast<Word>(bits.take_rice(parameters[number]) + 1));
        }
    }
    return second.fits() && bits.at_end();
}

// -------------------------------------------------------------------------------------------------------- checksum

constexpr int kLanes = 16;

void mix(std::uint32_t (&lanes)[kLanes], const Loose<std::uint32_t>* words) {
    for (int i = 0; i < kLanes; ++i) {
        const std::uint32_t sum = lanes[i] + words[i].word * 0x85ebca77U;
        lanes[i] = (sum << 13 | sum >> 19) * 0x9e3779b1U;
    }
}

std::uint64_t checksum(const void* bytes, std::int64_t nbytes) {
    constexpr std::int64_t kStripe = 4 * kLanes;
    const auto* at = static_cast<const char*>(bytes);
    alignas(64) std::uint32_t lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        lanes[i] = static_cast<std::uint32_t>(i + 1) * 0x9e3779b1U;
    }
    std::int64_t left = nbytes;
    for (; left >= kStripe; left -= kStripe, at += kStripe) {
        mix(lanes, reinterpret_cast<const Loose<std::uint32_t>*>(at));
    }
    if (left > 0) {
        char last[kStripe] = {};
        __builtin_memcpy(last, at, static_cast<std::size_t>(left));
        mix(lanes, reinterpret_cast<const Loose<std::uint32_t>*>(last));
    }
    auto folded = static_cast<std::uint64_t>(nbytes);
    for (int i = 0; i < kLanes; i += 2) {
        folded = (folded ^ (lanes[i] | std::uint64_t{lanes[i + 1]} << 32)) * 0x9fb21c651e98df25U;
        folded ^= folded >> 32;
    }
    return folded;
}

// ---------------------------------------------------------------------------------------------------------- dtypes

// Calls fn with the form of a dtype.
template <class Fn>
auto as_form(DeltaType type, const Fn& fn) {
    switch (type) {
        case DeltaType::float32:
            return fn(Form<std::uint32_t, 23, 0xff>());
        case DeltaType::bfloat16:
            return fn(Form<std::uint16_t, 7, 0xff>());
        case DeltaType::float16:
            return fn(Form<std::uint16_t, 10, 0x1f>());
        case DeltaType::float8_e4m3:
            return fn(Form<std::uint8_t, 3, 0x0f>());
        default:
            return fn(Form<std::uint8_t, 2, 0x1f>());
    }
}

std::int64_t encode(DeltaType type, const void* before, const void* after, std::int64_t numel, const DeltaRoom& room,
                    char* to, std::int64_t limit) {
    return as_form(type, [&](auto form) { return encode_as<decltype(form)>(before, after, numel, room, to, limit); });
}

bool apply(DeltaType type, const void* before, std::int64_t numel, const char* body, std::int64_t nbytes,
           const DeltaRoom& room, void* after) {
    return as_form(type, [&](auto form) { return apply_as<decltype(form)>(before, numel, body, nbytes, room, after); });
}

}  // namespace

extern const DeltaKernels kDelta = {.checksum = checksum, .encode = encode, .apply = apply};

}  // namespace thinwire::THINWIRE_TARGET
