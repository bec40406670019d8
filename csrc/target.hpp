// Which instruction set the kernels use.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.hpp"

// X(name, ...) for every target of this architecture, the plainest first. csrc/CMakeLists.txt says what each of them is
// compiled with.
#if defined(THINWIRE_X86_64)
#define THINWIRE_TARGETS(X, ...) \
    X(baseline, __VA_ARGS__) X(sse4, __VA_ARGS__) X(avx2, __VA_ARGS__) X(avx512, __VA_ARGS__) X(avx512vbmi, __VA_ARGS__)
#elif defined(THINWIRE_AARCH64)
#define THINWIRE_TARGETS(X, ...) X(baseline, __VA_ARGS__) X(neon, __VA_ARGS__) X(sve, __VA_ARGS__)
#else
#define THINWIRE_TARGETS(X, ...) X(baseline, __VA_ARGS__)
#endif

// Names the table of kernels that a file of codecs/ or kernels/ offers, and defines `get()`, which returns the one of
// the target in use. For namespace thinwire, in code that is compiled once.
#define THINWIRE_KERNELS(Table, name, get)                                                       \
    THINWIRE_TARGETS(THINWIRE_DECLARE_TABLE, Table, name)                                        \
    namespace {                                                                                  \
    const Table& get() {                                                                         \
        static constexpr const Table* kTables[] = {THINWIRE_TARGETS(THINWIRE_ADDRESS_OF, name)}; \
        return *kTables[target_number()];                                                        \
    }                                                                                            \
    }
#define THINWIRE_DECLARE_TABLE(target, Table, name) \
    namespace target {                              \
    extern const Table name;                        \
    }
#define THINWIRE_ADDRESS_OF(target, name) &target::name,

namespace thinwire {

// The instruction set in use, as a place in the tables of THINWIRE_KERNELS. Chosen when the module is loaded: the best
// that this CPU supports, or what the environment variable THINWIRE_TARGET names.
int target_number();

// Kernels that every codec may use.
const ValueKernels& value_kernels();

// Names of the targets that this CPU supports, the plainest first.
std::vector<std::string> targets();

// The name of the target in use.
std::string target();

// Uses another target from now on. Throws std::invalid_argument, which names the valid ones.
void use_target(const std::string& name);

// What loading the module does. Throws as use_target does.
void choose_target();

}  // namespace thinwire
