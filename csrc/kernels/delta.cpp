// Blocks of `delta` (docs/wire-format.md). Values are taken class after class, a class being an exponent of the old
// values, the largest first: whether a value changes depends on little else.
#include "kernels/delta.hpp"

#include "kernels/checksum.hpp"
#include "kernels/delta_bits.hpp"
#include "kernels/delta_classes.hpp"
#include "kernels/delta_runs.hpp"
#include "kernels/kernels.hpp"
#include "kernels/masks.hpp"

namespace thinwire::THINWIRE_TARGET {
namespace {

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

// Values of each class, changes of it, and where these are, in the order of their places.
struct Found {
    std::int64_t values[kClasses] = {};
    std::int64_t counts[kClasses] = {};
    const DeltaChange* changes[kClasses];
};

// Returns how many changes there are.
template <class F>
std::int64_t find_changes(const Loose<typename F::Word>* before, const Loose<typename F::Word>* after,
                          std::int64_t numel, Found& found, const DeltaRoom room) {
    constexpr std::int64_t kTile = 16;  // groups of 64
    const Common common(F(), before, numel);
    const std::uint8_t padding = common.other();
    std::int64_t totals[Common::kMost] = {};
    DeltaChange* ends[Common::kMost];
    for (int i = 0; i < common.count(); ++i) {
        ends[i] = room.changes + i * room.stride;
    }
    DeltaChange* const sorted = room.changes + Common::kMost * room.stride;
    DeltaChange* const unsorted = sorted + room.stride;
    std::int64_t num_unsorted = 0;
    const auto change = [&](std::int64_t place, std::int64_t rank) {
        const auto from = F::ordered(before[place].word);
        return DeltaChange{static_cast<std::uint32_t>(rank),
                           static_cast<typename F::Word>(F::ordered(after[place].word) - from)};
    };
    for (std::int64_t start = 0; start < numel; start += 64 * kTile) {
        alignas(64) std::uint8_t classes[64 * kTile];
        std::uint64_t changed[kTile];
        std::uint64_t masks[Common::kMost][kTile];
        std::int64_t ranks[Common::kMost][kTile];  // of the first value
        std::uint32_t changes[64 * kTile + 64];
        std::uint32_t others[64 * kTile + 64];
        std::uint32_t* last_change = changes;
        std::uint32_t* last_other = others;
        for (std::int64_t group = 0; group < kTile && start + 64 * group < numel; ++group) {
            const std::int64_t at = start + 64 * group;
            const auto here = static_cast<int>(numel - at < 64 ? numel - at : 64);
            changed[group] = compare<F>(before + at, after + at, here, classes + 64 * group, padding);
            std::uint64_t left = inside(numel, at);
            for (int i = 0; i < common.count(); ++i) {
                const std::uint64_t mask = places_of(classes + 64 * group, common.value(i));
                masks[i][group] = mask;
                left ^= mask;
                ranks[i][group] = totals[i];
                totals[i] += popcount(mask);
            }
            last_change = list_places<1>(changed[group] & ~left, 64 * group, last_change);
            last_other = list_places<3>(left, 64 * group, last_other);
        }
        for (const std::uint32_t* at = changes; at < last_change; ++at) {
            const int i = common.place(classes[*at]);
            const std::int64_t group = *at / 64;
            const std::uint64_t below = masks[i][group] & low_bits(static_cast<int>(*at % 64));
            *ends[i]++ = change(start + *at, ranks[i][group] + popcount(below));
        }
        for (const std::uint32_t* at = others; at < last_other; ++at) {
            const std::uint8_t value = classes[*at];
            const auto is_change = static_cast<std::int64_t>(changed[*at / 64] >> *at % 64 & 1);
            room.classes[num_unsorted] = value;
            unsorted[num_unsorted] = change(start + *at, found.values[value]++);
            num_unsorted += is_change;
            found.counts[value] += is_change;
        }
    }
    DeltaChange* next[kClasses];
    DeltaChange* end = sorted;
    for (int value = 0; value < kClasses; ++value) {
        found.changes[value] = next[value] = end;
        end += found.counts[value];
    }
    for (std::int64_t i = 0; i < num_unsorted; ++i) {
        *next[room.classes[i]]++ = unsorted[i];
    }
    std::int64_t count = num_unsorted;
    for (int i = 0; i < common.count(); ++i) {
        const std::uint8_t value = common.value(i);
        found.values[value] = totals[i];
        found.changes[value] = room.changes + i * room.stride;
        found.counts[value] = ends[i] - found.changes[value];
        count += found.counts[value];
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
    Found found;
    const std::int64_t count = find_changes<F>(before, after, numel, found, room);
    if (count == 0) {
        return 0;
    }
    const Classes classes(found.values);
    std::int64_t changes[kClasses + 1] = {};  // before each class
    for (int number = 0; number < classes.count; ++number) {
        changes[number + 1] = changes[number] + found.counts[classes.values[number]];
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
        const DeltaChange* change = found.changes[classes.values[number]];
        std::int64_t num_big = big[number];
        for (std::int64_t i = changes[number]; i < changes[number + 1]; ++i) {
            const auto step = static_cast<Word>(change++->step);
            const Word negative = F::sign_mask(step);
            const Word size = F::negated_if(negative, step);
            signs = (i % 64 == 0 ? 0 : signs) | std::uint64_t{negative & 1U} << i % 64;
            room.flags[i / 64] = signs;
            room.sizes[i] = size;
            room.big[num_big] = static_cast<std::uint32_t>(i - changes[number]);
            num_big += size > 1 ? 1 : 0;
        }
        for (std::int64_t i = big[number]; i < num_big; ++i) {
            rest[number].add(room.sizes[changes[number] + room.big[i]] - 2);
        }
        big[number + 1] = num_big;
        small = num_big > 0 && number < small ? number : small;
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
        const DeltaChange* own = found.changes[classes.values[number]];
        first.add(codes[number], classes.size(number), changes[number + 1] - changes[number],
                  [&](std::int64_t i) { return std::int64_t{own[i].rank}; });
    }
    first.finish();
    for (std::int64_t i = 0; i < count; i += 32) {
        const auto here = static_cast<int>(count - i < 32 ? count - i : 32);
        bits.put(flags_from(room.flags, i) & low_bits(here), here);
    }
    RunWriter second(bits);
    for (int number = small; number < classes.count; ++number) {
        const std::uint32_t* own = room.big + big[number];
        second.add(big_codes[number], changes[number + 1] - changes[number], big[number + 1] - big[number],
                   [&](std::int64_t i) { return std::int64_t{own[i]}; });
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

// Copies values, counts classes, and finds each class's places: for common ones, as masks of 64 in `room.masks`, one
// class after another; of others, the places themselves in `room.others`. Returns how many these are.
template <class F>
std::int64_t find_classes(const Common& common, const Loose<typename F::Word>* before, std::int64_t numel,
                          std::int64_t* counts, const DeltaRoom room, Loose<typename F::Word>* after) {
    const std::int64_t groups = (numel + 63) / 64;
    std::int64_t totals[Common::kMost] = {};
    std::uint32_t* found = room.others;
    for (std::int64_t group = 0; group < groups; ++group) {
        const std::int64_t at = 64 * group;
        alignas(64) std::uint8_t here[64];
        if (numel - at >= 64) {
            for (int i = 0; i < 64; ++i) {
                here[i] = F::class_of(before[at + i].word);
            }
            __builtin_memcpy(after + at, before + at, 64 * sizeof(typename F::Word));
        } else {
            for (std::int64_t i = 0; i < 64; ++i) {
                here[i] = at + i < numel ? F::class_of(before[at + i].word) : common.other();
            }
            __builtin_memcpy(after + at, before + at, static_cast<std::size_t>(numel - at) * sizeof(typename F::Word));
        }
        std::uint64_t others = inside(numel, at);
        for (int i = 0; i < common.count(); ++i) {
            const std::uint64_t mask = places_of(here, common.value(i));
            others ^= mask;
            totals[i] += popcount(mask);
            room.masks[i * groups + group] = mask;
        }
        found = list_places<3>(others, at, found);
    }
    for (int i = 0; i < common.count(); ++i) {
        counts[common.value(i)] = totals[i];
    }
    for (const std::uint32_t* place = room.others; place < found; ++place) {
        ++counts[F::class_of(before[*place].word)];
    }
    return found - room.others;
}

// Places of a common class whose flags are set, or not set if inverted. The class has the flags from `rank` to `end`.
// Returns how many. Where changes are rare, groups of 64 values without any are left out by a branch.
template <bool rare>
std::int64_t find_places(const std::uint64_t* masks, const std::uint64_t* flags, std::int64_t rank, std::int64_t end,
                         bool inverted, std::uint32_t* places) {
    const std::uint64_t flip = inverted ? ~std::uint64_t{0} : 0;
    std::uint32_t* to = places;
    std::int64_t next = rare ? next_flag(flags, rank, end) : 0;
    for (std::int64_t at = 0; rank < end; at += 64) {
        const std::uint64_t mask = *masks++;
        const std::int64_t first = rank;
        rank += popcount(mask);
        if (rare && next >= rank) {
            continue;
        }
        to = list_places<2>(deposit(flags_from(flags, first) ^ flip, mask), at, to);
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
    const std::int64_t num_others = find_classes<F>(common, before, numel, counts, room, after);
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
        room.sorted[others[F::class_of(before[room.others[i]].word)]++] = room.others[i];
    }
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
        const std::uint64_t* masks = room.masks + common.place(value) * ((numel + 63) / 64);
        std::int64_t count = 0;
        if (!common.has(value)) {
            const std::uint32_t* own = room.sorted + others[value] - classes.size(number);
            for (std::int64_t i = rank; i < end; ++i) {
                places[count] = *own++;
                count += (flags_from(room.flags, i) & 1) != (inverted ? 1U : 0U) ? 1 : 0;
            }
        } else if (!inverted && first_codes[number].parameter > kRare) {
            count = find_places<true>(masks, room.flags, rank, end, inverted, places);
        } else {
            count = find_places<false>(masks, room.flags, rank, end, inverted, places);
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
        const std::uint64_t inverted = second_codes[number].inverted ? 1 : 0;
        std::int64_t found = 0;
        for (std::int64_t i = seconds[number]; i < seconds[number + 1]; ++i) {
            room.big[found] = static_cast<std::uint32_t>(changes[small] + i);
            found += static_cast<std::int64_t>((flags_from(room.flags, i) & 1) ^ inverted);
        }
        for (std::int64_t i = 0; i < found; ++i) {
            const auto size = static_cast<Word>(bits.take_rice(parameters[number]) + 1);
            step(room.big[i], size, bits.bit(signs + room.big[i]));
        }
    }
    return bits.at_end();
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
