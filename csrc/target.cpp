#include "target.hpp"

#if defined(THINWIRE_X86_64)
#include <cpuid.h>
#elif defined(THINWIRE_AARCH64)
#include <sys/auxv.h>
#endif

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace thinwire {

THINWIRE_KERNELS(ValueKernels, kValues, values_in_use)

namespace {

#ifdef THINWIRE_X86_64
// What __builtin_cpu_supports of Clang 14 does not know: F16C, MOVBE and LZCNT, which came with AVX2 or before.
bool has_avx2_companions() {
    constexpr unsigned kF16c = 1U << 29;
    constexpr unsigned kMovbe = 1U << 22;
    constexpr unsigned kLzcnt = 1U << 5;
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kF16c) == 0 || (ecx & kMovbe) == 0) {
        return false;
    }
    return __get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kLzcnt) != 0;
}
#endif

struct Target {
    const char* name;
    bool (*supported)();
};

// A target is supported where the CPU has every feature that csrc/CMakeLists.txt compiles it with.
namespace supported {

bool baseline() {
    return true;
}

#if defined(THINWIRE_X86_64)

bool sse4() {
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("popcnt");
}

bool avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && has_avx2_companions();
}

bool avx512() {
    return avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

bool avx512vbmi() {
    return avx512() && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bitalg") &&
           __builtin_cpu_supports("gfni");
}

#elif defined(THINWIRE_AARCH64)

bool neon() {
    return true;
}

bool sve() {
    return (getauxval(AT_HWCAP) & HWCAP_SVE) != 0;
}

#endif

}  // namespace supported

#define THINWIRE_TARGET_ENTRY(name, ...) {#name, supported::name},
constexpr Target kTargets[] = {THINWIRE_TARGETS(THINWIRE_TARGET_ENTRY, )};

std::atomic<int> current = 0;

std::string variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// THINWIRE_CPU_TARGET is what the variable was called up to 0.2, when `avx512` was what is `avx512vbmi` now.
std::string from_environment() {
    const std::string wanted = variable("THINWIRE_TARGET");
    const std::string before = variable("THINWIRE_CPU_TARGET");
    if (!before.empty() && before != wanted) {
        throw std::invalid_argument(
            "THINWIRE_CPU_TARGET is '" + before +
            "', but that variable is called THINWIRE_TARGET now: set it, and unset the old one");
    }
    return wanted;
}

}  // namespace

int target_number() {
    return current.load(std::memory_order_relaxed);
}

const ValueKernels& value_kernels() {
    return values_in_use();
}

std::vector<std::string> targets() {
    std::vector<std::string> names;
    for (const Target& target : kTargets) {
        if (target.supported()) {
            names.emplace_back(target.name);
        }
    }
    return names;
}

std::string target() {
    return kTargets[target_number()].name;
}

void use_target(const std::string& name) {
    std::string valid;
    for (const Target& target : kTargets) {
        if (!target.supported()) {
            continue;
        }
        if (target.name == name) {
            current.store(static_cast<int>(&target - kTargets), std::memory_order_relaxed);
            return;
        }
        valid += (valid.empty() ? "" : ", ") + std::string(target.name);
    }
    throw std::invalid_argument("no instruction set '" + name + "' on this CPU; there are: " + valid);
}

void choose_target() {
    const std::string wanted = from_environment();
    if (wanted.empty()) {
        use_target(targets().back());
        return;
    }
    try {
        use_target(wanted);
    } catch (const std::invalid_argument& error) {
        throw std::invalid_argument(std::string("THINWIRE_TARGET: ") + error.what());
    }
}

}  // namespace thinwire
