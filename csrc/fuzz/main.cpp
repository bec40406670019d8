// For compilers without libFuzzer: random inputs until the time is up.
#ifndef THINWIRE_LIBFUZZER

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

// The runs of one seed are the same everywhere; the seed is printed so that a failure can be seen again.
std::vector<std::uint8_t> random_input(std::mt19937_64& random) {
    constexpr std::size_t kMost = 4096;
    std::vector<std::uint8_t> input(random() % kMost);
    // Bytes of many kinds: all alike, of few values, with few ones, and any.
    const auto mask = static_cast<std::uint8_t>(random() % 4 == 0 ? random() : 0xff);
    const auto more = static_cast<std::uint8_t>(random() % 8 == 0 ? random() : 0);
    for (std::uint8_t& byte : input) {
        byte = static_cast<std::uint8_t>((random() & mask) | more);
    }
    // The first bytes are the choices, which are to be of every kind whatever the contents are.
    for (std::size_t i = 0; i < input.size() && i < 16; ++i) {
        input[i] = static_cast<std::uint8_t>(random());
    }
    return input;
}

}  // namespace

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 20.0;
    const unsigned long long seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
    std::printf("fuzzing for %g s, seed %llu\n", seconds, seed);
    std::fflush(stdout);
    std::mt19937_64 random(seed);
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    unsigned long long runs = 0;
    while (std::chrono::steady_clock::now() < end) {
        const std::vector<std::uint8_t> input = random_input(random);
        LLVMFuzzerTestOneInput(input.data(), input.size());
        ++runs;
    }
    std::printf("%llu runs, nothing found\n", runs);
}

#endif
