// What the files bind_*.cpp share.
//
// Python checks tensors (device, dtype, contiguity) and passes their addresses and sizes; sizes of wires are checked
// once more on this side, because a wire comes from another machine.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "codec_kinds.hpp"
#include "pool.hpp"

namespace thinwire {

using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

void bind_delta(nanobind::module_& module);
void bind_fixed(nanobind::module_& module);
void bind_lossless(nanobind::module_& module);
void bind_target(nanobind::module_& module);

}  // namespace thinwire
