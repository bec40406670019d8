// Which instruction set the kernels use.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.hpp"

// Names the table of kernels that a file of codecs/ or kernels/ offers, and defines `get()`, which returns the one of
// the instruction set in use. For namespace thinwire, in code that is compiled once.
#ifdef THINWIRE_X86_64
#define THINWIRE_KERNELS(Table, name, get)                                                       \
    namespace baseline {                                                                         \
    extern const Table name;                                                                     \
    }                                                                                            \
    namespace avx2 {                                                                             \
    extern const Table name;                                                                     \
    }                                                                                            \
    namespace avx512 {                                                                           \
    extern const Table name;                                                                     \
    }                                                                                            \
    namespace {                                                                                  \
    const Table& get() {                                                                         \
        static constexpr const Table* kTables[] = {&baseline::name, &avx2::name, &avx512::name}; \
        return *kTables[target_number()];                                                        \
    }                                                                                            \
    }
#else
#define THINWIRE_KERNELS(Table, name, get) \
    namespace baseline {                   \
    extern const Table name;               \
    }                                      \
    namespace {                            \
    const Table& get() {                   \
        return baseline::name;             \
    }                                      \
    }
#endif

namespace thinwire {

// The instruction set in use, as a place in the tables of THINWIRE_KERNELS. Chosen when the module is loaded: the best
// that this CPU supports, or what the environment variable THINWIRE_CPU_TARGET names.
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
