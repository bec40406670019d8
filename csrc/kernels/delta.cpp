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

// ---------------------------------------------------------------------------------------------------------- classes

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
    static constexpr int kMost = 12;

    template <class F>
    Common(F, const Loose<typename F::Word>* words, std::int64_t numel) {
        constexpr std::int64_t kSample = 1024;
        constexpr int kLeast = 8;
        std::uint16_t counts[kClasses] = {};
        for (std::int64_t i = 0; i < kSample; ++i) {
            ++counts[F::class_of(words[i * numel / kSample].word)];
        }
        for (int value = kClasses - 1; value >= 0 && count_ < kMost; --value) {
            if (counts[value] >= kLeast) {
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
};

std::uint64_t inside(std::int64_t numel, std::int64_t at) {
    return numel - at >= 64 ? ~std::uint64_t{0} : low_bits(static_cast<int>(numel - at));
}

// ---------------------------------------------------------------------------------------------------------- encode

// Classes of 64 old values, and which of them changed.
template <class F>
std::uint64_t compare(const Loose<typename F::Word>* before, const Loose<typename F::Word>* after, int numel,
                      std::uint8_t* classes, std::uint8_t padding) {
    alignas(64) std::uint8_t same[64];
    if (numel == 64) {
        for (int i = 0; i < 64; ++i) {
            classes[i] = F::class_of(before[i].word);
            same[i] = before[i].word == after[i].word;
        }
        return places_of(same, 0);
    }
    for (int i = 0; i < 64; ++i) {
        classes[i] = i < numel ? F::class_of(before[i].word) : padding;
        same[i] = i >= numel || before[i].word == after[i].word;
    }
    return places_of(same, 0);
}

// Values of each class, and changes of it.
struct Counts {
    std::int64_t values[kClasses] = {};
    std::int64_t changes[kClasses] = {};
};

// Changes in the order of their places: their classes, their ranks in them, and their steps as words. Returns how many.
template <class F>
std::int64_t find_changes(const Loose<typename F::Word>* before, const Loose<typename F::Word>* after,
                          std::int64_t numel, Counts& counts, std::uint8_t* classes, std::uint32_t* ranks,
                          std::uint32_t* steps) {
    const Common common(F(), before, numel);
    const std::uint8_t padding = common.other();
    std::int64_t count = 0;
    const auto add = [&](std::int64_t place, std::uint8_t value, std::int64_t rank) {
        classes[count] = value;
        steps[count] = static_cast<typename F::Word>(F::ordered(after[place].word) - F::ordered(before[place].word));
        ranks[count++] = static_cast<std::uint32_t>(rank);
        ++counts.changes[value];
    };
    for (std::int64_t at = 0; at < numel; at += 64) {
        alignas(64) std::uint8_t here[64];
        std::uint64_t masks[kClasses];
        std::uint64_t others = inside(numel, at);
        const std::uint64_t changed =
            compare<F>(before + at, after + at, static_cast<int>(numel - at < 64 ? numel - at : 64), here, padding);
        for (int i = 0; i < common.count(); ++i) {
            const std::uint64_t mask = places_of(here, common.value(i));
            masks[common.value(i)] = mask;
            others ^= mask;
        }
        for (std::uint64_t left = changed & ~others; left != 0; left &= left - 1) {
            const int bit = __builtin_ctzll(left);
            add(at + bit, here[bit], counts.values[here[bit]] + popcount(masks[here[bit]] & low_bits(bit)));
        }
        for (int i = 0; i < common.count(); ++i) {
            counts.values[common.value(i)] += popcount(masks[common.value(i)]);
        }
        for (; others != 0; others &= others - 1) {
            const int bit = __builtin_ctzll(others);
            const std::int64_t rank = counts.values[here[bit]]++;
            if ((changed >> bit & 1) != 0) {
                add(at + bit, here[bit], rank);
            }
        }
    }
    return count;
}

void put_code(BitWriter& bits, const FlagCode& code) {
    bits.put((code.inverted ? 1U : 0U) | static_cast<std::uint64_t>(code.parameter) << 1, 6);
}

template <class F>
std::int64_t encode_as(const void* old, const void* now, std::int64_t numel, const DeltaRoom room, char* to,
                       std::int64_t limit) {
    using Word = typename F::Word;
    const auto* before = static_cast<const Loose<Word>*>(old);
    const auto* after = static_cast<const Loose<Word>*>(now);
    Counts counts;
    const std::int64_t count = find_changes<F>(before, after, numel, counts, room.classes, room.first, room.second);
    if (count == 0) {
        return 0;
    }
    const Classes classes(counts.values);
    std::int64_t changes[kClasses + 1] = {};  // before each class
    std::int64_t next[kClasses];
    for (int number = 0; number < classes.count; ++number) {
        next[classes.values[number]] = changes[number];
        changes[number + 1] = changes[number] + counts.changes[classes.values[number]];
    }
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t place = next[room.classes[i]]++;
        room.ranks[place] = room.first[i];
        room.sizes[place] = room.second[i];
    }

    BitWriter bits(to, limit);
    FlagCode codes[kClasses];
    for (int number = 0; number < classes.count; ++number) {
        codes[number] = FlagCode::of(classes.size(number), changes[number + 1] - changes[number]);
        put_code(bits, codes[number]);
    }

    // Steps become their magnitudes, and those of two and more are found.
    int small = classes.count;  // classes before the first one with such a step
    std::int64_t big[kClasses + 1] = {};
    Lengths rest[kClasses];
    std::uint64_t signs = 0;
    for (int number = 0; number < classes.count; ++number) {
        std::int64_t found = big[number];
        for (std::int64_t i = changes[number]; i < changes[number + 1]; ++i) {
            const auto step = static_cast<Word>(room.sizes[i]);
            const Word negative = F::sign_mask(step);
            const Word size = F::negated_if(negative, step);
            signs = (i % 64 == 0 ? 0 : signs) | std::uint64_t{negative & 1U} << i % 64;
            room.flags[i / 64] = signs;
            room.sizes[i] = size;
            if (size > 1) {
                room.big[found++] = static_cast<std::uint32_t>(i - changes[number]);
                rest[number].add(std::uint32_t{size} - 2);
            }
        }
        big[number + 1] = found;
        small = found > 0 && number < small ? number : small;
    }
    FlagCode big_codes[kClasses];
    int parameters[kClasses];
    bits.put(static_cast<std::uint64_t>(small), 9);
    for (int number = small; number < classes.count; ++number) {
        big_codes[number] = FlagCode::of(changes[number + 1] - changes[number], big[number + 1] - big[number]);
        put_code(bits, big_codes[number]);
    }
    for (int number = small; number < classes.count; ++number) {
        parameters[number] = rest[number].parameter();
        bits.put(static_cast<std::uint64_t>(parameters[number]), 5);
    }

    RunWriter first(bits);
    for (int number = 0; number < classes.count; ++number) {
        first.add(codes[number], classes.size(number), room.ranks + changes[number],
                  changes[number + 1] - changes[number]);
    }
    first.finish();
    for (std::int64_t i = 0; i < count; i += 32) {
        const auto here = static_cast<int>(count - i < 32 ? count - i : 32);
        bits.put(flags_from(room.flags, i) & low_bits(here), here);
    }
    RunWriter second(bits);
    for (int number = small; number < classes.count; ++number) {
        second.add(big_codes[number], changes[number + 1] - changes[number], room.big + big[number],
                   big[number + 1] - big[number]);
    }
    second.finish();
    for (int number = small; number < classes.count; ++number) {
        for (std::int64_t i = big[number]; i < big[number + 1]; ++i) {
            bits.put_rice(room.sizes[changes[number] + room.big[i]] - 2, parameters[number]);
        }
    }
    return bits.size();
}

// ----------------------------------------------------------------------------------------------------------- apply

FlagCode take_code(BitReader& bits) {
    const auto both = static_cast<int>(bits.take(6));
    return {(both & 1) != 0, both >> 1};
}

// Classes of all values, how many have each, and the places of those whose class is not common.
template <class F>
std::int64_t find_others(const Common& common, const Loose<typename F::Word>* before, std::int64_t numel,
                         std::int64_t* counts, std::uint8_t* classes, std::uint32_t* places) {
    std::int64_t found = 0;
    for (std::int64_t at = 0; at < numel; at += 64) {
        if (numel - at >= 64) {
            for (int i = 0; i < 64; ++i) {
                classes[at + i] = F::class_of(before[at + i].word);
            }
        } else {
            for (std::int64_t i = at; i < at + 64; ++i) {
                classes[i] = i < numel ? F::class_of(before[i].word) : common.other();
            }
        }
        std::uint64_t others = inside(numel, at);
        for (int i = 0; i < common.count(); ++i) {
            const std::uint64_t mask = places_of(classes + at, common.value(i));
            others ^= mask;
            counts[common.value(i)] += popcount(mask);
        }
        for (; others != 0; others &= others - 1) {
            const std::int64_t place = at + __builtin_ctzll(others);
            places[found++] = static_cast<std::uint32_t>(place);
            ++counts[classes[place]];
        }
    }
    return found;
}

// Places of a common class whose flags are set, or not set if inverted. The class has the flags from `rank` to `end`.
// Returns how many. Where changes are rare, groups of 64 values without any are left out; where they are not, whether
// there are any is as good as random, and a branch on it takes long.
template <bool rare>
std::int64_t find_places(const std::uint8_t* classes, std::uint8_t value, const std::uint64_t* flags, std::int64_t rank,
                         std::int64_t end, bool inverted, std::uint32_t* places) {
    const std::uint64_t flip = inverted ? ~std::uint64_t{0} : 0;
    std::uint32_t* to = places;
    std::int64_t next = rare ? next_flag(flags, rank, end) : 0;
    for (std::int64_t at = 0; rank < end; at += 64) {
        const std::uint64_t mask = places_of(classes + at, value);
        const std::int64_t first = rank;
        rank += popcount(mask);
        if (rare && next >= rank) {
            continue;
        }
        std::uint64_t found = deposit(flags_from(flags, first) ^ flip, mask);
        std::uint32_t* const then = to + popcount(found);
        for (int i = 0; i < 2; ++i, found &= found - 1) {  // seldom more
            *to++ = static_cast<std::uint32_t>(at + __builtin_ctzll(found | std::uint64_t{1} << 63));
        }
        for (; found != 0; found &= found - 1) {
            *to++ = static_cast<std::uint32_t>(at + __builtin_ctzll(found));
        }
        to = then;
        next = rare ? next_flag(flags, rank, end) : 0;
    }
    return to - places;
}

template <class F>
bool apply_as(const void* old, std::int64_t numel, const char* body, std::int64_t nbytes, const DeltaRoom room,
              void* now) {
    using Word = typename F::Word;
    const auto* before = static_cast<const Loose<Word>*>(old);
    auto* after = static_cast<Loose<Word>*>(now);
    const Common common(F(), before, numel);
    std::int64_t counts[kClasses] = {};
    const std::int64_t num_others = find_others<F>(common, before, numel, counts, room.classes, room.first);
    const Classes classes(counts);
    // Places of the values whose class is not common, class by class.
    std::int64_t others[kClasses];
    std::int64_t start = 0;
    for (int number = 0; number < classes.count; ++number) {
        if (!common.has(classes.values[number])) {
            others[classes.values[number]] = start;
            start += classes.size(number);
        }
    }
    for (std::int64_t i = 0; i < num_others; ++i) {
        const std::uint32_t place = room.first[i];
        room.second[others[room.classes[place]]++] = place;
    }
    __builtin_memcpy(now, old, static_cast<std::size_t>(numel) * sizeof(Word));
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

    if (!read_runs(bits, classes.starts, first_codes, classes.count, room.flags)) {
        return false;
    }
    constexpr int kRare = 4;                  // with larger parameters, fewer than one value in 30 changes
    std::int64_t changes[kClasses + 1] = {};  // before each class
    for (int number = 0; number < classes.count; ++number) {
        const std::uint8_t value = classes.values[number];
        const std::int64_t rank = classes.starts[number];
        const std::int64_t end = classes.starts[number + 1];
        const bool inverted = first_codes[number].inverted;
        std::uint32_t* places = room.places + changes[number];
        std::int64_t count = 0;
        if (!common.has(value)) {
            const std::uint32_t* own = room.second + others[value] - classes.size(number);
            for (std::int64_t i = rank; i < end; ++i) {
                places[count] = *own++;
                count += (flags_from(room.flags, i) & 1) != (inverted ? 1U : 0U) ? 1 : 0;
            }
        } else if (!inverted && first_codes[number].parameter > kRare) {
            count = find_places<true>(room.classes, value, room.flags, rank, end, inverted, places);
        } else {
            count = find_places<false>(room.classes, value, room.flags, rank, end, inverted, places);
        }
        changes[number + 1] = changes[number] + count;
    }

    const std::int64_t count = changes[classes.count];
    const std::int64_t signs = bits.place();
    if (!bits.has(count)) {
        return false;
    }
    const auto step = [&](std::int64_t i, Word size, std::uint64_t is_negative) {
        Loose<Word>& at = after[room.places[i]];
        const auto negative = static_cast<Word>(0 - is_negative);
        at.word = F::unordered(static_cast<Word>(F::ordered(at.word) + F::negated_if(negative, size)));
    };
    for (std::int64_t i = 0; i < count; i += 32) {
        const auto here = static_cast<int>(count - i < 32 ? count - i : 32);
        const std::uint64_t negative = bits.take(here);
        for (int j = 0; j < here; ++j) {
            step(i + j, 1, negative >> j & 1);
        }
    }

    std::int64_t seconds[kClasses + 1];
    for (int number = small; number <= classes.count; ++number) {
        seconds[number] = changes[number] - changes[small];
    }
    if (!read_runs(bits, seconds + small, second_codes + small, classes.count - small, room.flags)) {
        return false;
    }
    for (int number = small; number < classes.count; ++number) {
        for (std::int64_t i = seconds[number]; i < seconds[number + 1]; ++i) {
            const bool flag = (flags_from(room.flags, i) & 1) != 0;
            if (flag != second_codes[number].inverted) {
                const std::int64_t change = changes[small] + i;
                step(change, static_cast<Word>(bits.take_rice(parameters[number]) + 1), bits.bit(signs + change));
            }
        }
    }
    return bits.at_end();
}

// -------------------------------------------------------------------------------------------------------- checksum

using Four = std::uint32_t __attribute__((vector_size(16)));

// 16 lanes.
struct Lanes {
    Four fours[4];

    void mix(const char* stripe) {
        for (int i = 0; i < 4; ++i) {
            Four words;
            __builtin_memcpy(&words, stripe + 16 * i, sizeof words);
            const Four sum = fours[i] + words * 0x85ebca77U;
            fours[i] = (sum << 13 | sum >> 19) * 0x9e3779b1U;
        }
    }
};

std::uint64_t checksum(const void* bytes, std::int64_t nbytes) {
    constexpr std::int64_t kStripe = sizeof(Lanes);
    const auto* at = static_cast<const char*>(bytes);
    Lanes lanes;
    for (unsigned i = 0; i < 4; ++i) {
        lanes.fours[i] = Four{4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4} * 0x9e3779b1U;
    }
    std::int64_t left = nbytes;
    for (; left >= kStripe; left -= kStripe, at += kStripe) {
        lanes.mix(at);
    }
    if (left > 0) {
        char last[kStripe] = {};
        __builtin_memcpy(last, at, static_cast<std::size_t>(left));
        lanes.mix(last);
    }
    auto folded = static_cast<std::uint64_t>(nbytes);
    for (const Four four : lanes.fours) {
        for (int i = 0; i < 4; i += 2) {
            folded = (folded ^ (four[i] | std::uint64_t{four[i + 1]} << 32)) * 0x9fb21c651e98df25U;
            folded ^= folded >> 32;
        }
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
