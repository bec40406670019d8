#include "delta.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "message.hpp"
#include "pool.hpp"
#include "sizes.hpp"
#include "target.hpp"

namespace thinwire {

THINWIRE_KERNELS(DeltaKernels, kDelta, kernels)

namespace {

constexpr std::uint32_t kMagic = 0x4c445754;
constexpr std::uint8_t kVersion = 1;
constexpr int kLeastLog = 6;
constexpr int kMostLog = 20;

// Numbers are little-endian, as on every machine that this is built for.
struct Head {
    std::uint32_t magic;
    std::uint8_t version;
    std::uint8_t type;
    std::uint8_t log;
    std::uint8_t zero;
    std::uint64_t numel;
    std::uint64_t bytes;  // of the message
};
static_assert(sizeof(Head) == 24);

struct Entry {
    std::uint32_t bytes;
    std::uint32_t sent;  // checksum of these
    std::uint64_t made;  // checksum of the new values
};
static_assert(sizeof(Entry) == 16);

constexpr std::int64_t kHead = sizeof(Head);
constexpr std::int64_t kEntry = sizeof(Entry);
constexpr std::int64_t kSum = sizeof(std::uint64_t);

// What the encoder of a block may write beyond its limit, and the decoder read beyond its end.
constexpr std::int64_t kSpare = 8;

struct Blocks {
    std::int64_t numel;
    std::int64_t values;  // of a block
    std::int64_t word;    // bytes of a value

    std::int64_t count() const {
        return ceil_div(numel, values);
    }
    std::int64_t size(std::int64_t block) const {
        return std::min(values, numel - block * values);
    }
    std::int64_t raw(std::int64_t block) const {
        return size(block) * word;
    }
    // Bytes of the message before those of its blocks.
    std::int64_t start() const {
        return kHead + kEntry * count() + kSum;
    }
};

// Memory for a block, without initial values: a block whose values do not change needs little of it.
class Memory {
public:
    Memory(std::int64_t values, std::int64_t word) {
        const std::int64_t all = multiple(64, values) + 64;
        constexpr std::int64_t kParts = kMostCommon + 2;
        const std::int64_t bits = all / 8 * (1 + kMostCommon) + 8;
        const std::int64_t numbers = kParts * std::int64_t{sizeof(DeltaChange)} + 5 * 4 + 1 + word;
        memory_.reset(new char[static_cast<std::size_t>(bits + all * numbers + kSpare)]);
        room.flags = take<std::uint64_t>(all / 64 + 1);
        room.masks = take<std::uint64_t>(all / 64 * kMostCommon);
        room.changes = take<DeltaChange>(all * kParts);
        room.stride = all;
        room.places = take<std::uint32_t>(all);
        room.sizes = take<std::uint32_t>(all);
        room.big = take<std::uint32_t>(all);
        room.others = take<std::uint32_t>(all);
        room.sorted = take<std::uint32_t>(all);
        room.classes = take<std::uint8_t>(all);
        coded = take<char>(word * all + kSpare);
    }

    DeltaRoom room;
    char* coded;  // for a message

private:
    std::unique_ptr<char[]> memory_;
    std::int64_t taken_ = 0;

    template <class Number>
    Number* take(std::int64_t count) {
        auto* at = reinterpret_cast<Number*>(memory_.get() + taken_);
        taken_ += count * std::int64_t{sizeof(Number)};
        return at;
    }
};

std::uint64_t checksum(const void* bytes, std::int64_t nbytes) {
    return kernels().checksum(bytes, nbytes);
}

[[noreturn]] void refuse(const std::string& why) {
    throw std::invalid_argument("delta: " + why);
}

// Calls fn(block, memory) for each block, on several threads.
template <class Fn>
void for_blocks(const Blocks& blocks, int threads, const Fn& fn) {
    const int useful = useful_threads(blocks.numel * blocks.word, threads);
    parallel_for(blocks.count(), useful, [&](std::int64_t begin, std::int64_t end) {
        const Memory memory(blocks.size(begin), blocks.word);
        for (std::int64_t block = begin; block < end; ++block) {
            fn(block, memory);
        }
    });
}

Blocks read_head(DeltaType type, std::int64_t numel, const char* wire, std::int64_t wire_bytes,
                 std::vector<Entry>& index) {
    if (wire_bytes < kHead + kSum) {
        refuse("a message starts with " + std::to_string(kHead + kSum) + " bytes, this one has " +
               std::to_string(wire_bytes) + "; it is truncated");
    }
    Head head;
    std::memcpy(&head, wire, sizeof head);
    if (head.magic != kMagic || head.version != kVersion || head.zero != 0 || head.log < kLeastLog ||
        head.log > kMostLog) {
        refuse("these are not the first bytes of a message of this version");
    }
    if (head.type != static_cast<int>(type) || head.numel != static_cast<std::uint64_t>(numel)) {
        refuse("the message is of " + std::to_string(head.numel) + " values of dtype " + std::to_string(head.type) +
               ", the old tensor is not");
    }
    const Blocks blocks{numel, std::int64_t{1} << head.log, bytes_of(type)};
    const auto all = static_cast<std::uint64_t>(wire_bytes);
    if (head.bytes < static_cast<std::uint64_t>(blocks.start()) || head.bytes > all) {
        refuse("the message says it has " + std::to_string(head.bytes) + " bytes and " + std::to_string(wire_bytes) +
               " are there");
    }
    std::uint64_t sum;
    std::memcpy(&sum, wire + blocks.start() - kSum, sizeof sum);
    if (sum != checksum(wire, blocks.start() - kSum)) {
        refuse("the index of the message is damaged");
    }
    index.resize(static_cast<std::size_t>(blocks.count()));
    if (!index.empty()) {
        std::memcpy(index.data(), wire + kHead, index.size() * sizeof(Entry));
    }
    std::int64_t bytes = blocks.start();
    for (const Entry& entry : index) {
        bytes += entry.bytes;
    }
    if (static_cast<std::uint64_t>(bytes) != head.bytes) {
        refuse("the blocks of the message have another length than it says");
    }
    return blocks;
}

}  // namespace

std::int64_t bytes_of(DeltaType type) {
    constexpr int kBytes[kDeltaTypes] = {4, 2, 2, 1, 1};
    return kBytes[static_cast<int>(type)];
}

DeltaType delta_type(std::int64_t number) {
    if (number < 0 || number >= kDeltaTypes) {
        refuse("no dtype has the number " + std::to_string(number));
    }
    return static_cast<DeltaType>(number);
}

std::int64_t delta_bytes(DeltaType type, std::int64_t numel, int log) {
    check_values("delta", numel);
    if (log < kLeastLog || log > kMostLog) {
        refuse("a block has 2^6 to 2^20 values, not 2^" + std::to_string(log));
    }
    const Blocks blocks{numel, std::int64_t{1} << log, bytes_of(type)};
    return blocks.start() + numel * blocks.word;
}

std::int64_t encode_delta(DeltaType type, const void* before, const void* after, std::int64_t numel, int log,
                          void* wire, std::int64_t capacity, int threads) {
    const std::int64_t needed = delta_bytes(type, numel, log);
    if (capacity < needed) {
        refuse("a message may take " + std::to_string(needed) + " bytes and there is room for " +
               std::to_string(capacity));
    }
    const Blocks blocks{numel, std::int64_t{1} << log, bytes_of(type)};
    auto* to = static_cast<char*>(wire);
    std::vector<Entry> index(static_cast<std::size_t>(blocks.count()));
    // Each block is written where it would begin if all were as long as they may be, and moved once all are there.
    const auto slot = [&](std::int64_t block) { return to + blocks.start() + block * blocks.values * blocks.word; };
    for_blocks(blocks, threads, [&](std::int64_t block, const Memory& memory) {
        const std::int64_t offset = block * blocks.values * blocks.word;
        const char* from = static_cast<const char*>(before) + offset;
        const char* now = static_cast<const char*>(after) + offset;
        std::int64_t bytes =
            kernels().encode(type, from, now, blocks.size(block), memory.room, memory.coded, blocks.raw(block));
        const char* body = memory.coded;
        if (bytes < 0) {
            bytes = blocks.raw(block);
            body = now;
        }
        std::memcpy(slot(block), body, static_cast<std::size_t>(bytes));
        index[static_cast<std::size_t>(block)] = {static_cast<std::uint32_t>(bytes),
                                                  static_cast<std::uint32_t>(checksum(body, bytes)),
                                                  checksum(now, blocks.raw(block))};
    });
    char* end = to + blocks.start();
    for (std::int64_t block = 0; block < blocks.count(); ++block) {
        const std::uint32_t bytes = index[static_cast<std::size_t>(block)].bytes;
        std::memmove(end, slot(block), bytes);
        end += bytes;
    }
    const Head head = {kMagic,
                       kVersion,
                       static_cast<std::uint8_t>(type),
                       static_cast<std::uint8_t>(log),
                       0,
                       static_cast<std::uint64_t>(numel),
                       static_cast<std::uint64_t>(end - to)};
    std::memcpy(to, &head, sizeof head);
    if (!index.empty()) {
        std::memcpy(to + kHead, index.data(), index.size() * sizeof(Entry));
    }
    const std::uint64_t sum = checksum(to, blocks.start() - kSum);
    std::memcpy(to + blocks.start() - kSum, &sum, sizeof sum);
    return end - to;
}

void apply_delta(DeltaType type, const void* before, std::int64_t numel, const void* wire, std::int64_t wire_bytes,
                 void* after, int threads) {
    check_values("delta", numel);
    const auto* message = static_cast<const char*>(wire);
    std::vector<Entry> index;
    const Blocks blocks = read_head(type, numel, message, wire_bytes, index);
    std::vector<std::int64_t> starts(index.size());
    std::int64_t start = blocks.start();
    for (std::size_t block = 0; block < index.size(); ++block) {
        starts[block] = start;
        start += index[block].bytes;
    }
    for_blocks(blocks, threads, [&](std::int64_t block, const Memory& memory) {
        const Entry& entry = index[static_cast<std::size_t>(block)];
        const char* body = message + starts[static_cast<std::size_t>(block)];
        const std::int64_t offset = block * blocks.values * blocks.word;
        const std::int64_t raw = blocks.raw(block);
        const char* from = static_cast<const char*>(before) + offset;
        char* to = static_cast<char*>(after) + offset;
        if (static_cast<std::uint32_t>(checksum(body, entry.bytes)) != entry.sent) {
            refuse("the message is damaged in block " + std::to_string(block));
        }
        bool fits = entry.bytes <= raw;
        if (entry.bytes == 0 || entry.bytes == raw) {
            std::memcpy(to, entry.bytes == 0 ? from : body, static_cast<std::size_t>(raw));
        } else if (fits) {
            std::memcpy(memory.coded, body, entry.bytes);
            std::memset(memory.coded + entry.bytes, 0, kSpare);
            fits = kernels().apply(type, from, blocks.size(block), memory.coded, entry.bytes, memory.room, to);
        }
        if (!fits || checksum(to, raw) != entry.made) {
            refuse("the old tensor is not the one that block " + std::to_string(block) + " was made against");
        }
    });
}

}  // namespace thinwire
