// What the files bind_*.cpp share.
//
// Python checks tensors (device, dtype, contiguity) and passes their addresses and sizes; sizes of wires are checked
// once more on this side, because a wire comes from another machine.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/kernels.hpp"

namespace thinwire {

using Address = std::uintptr_t;

template <class T = void>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

inline DType dtype_of(int number) {
    if (number < 0 || number > static_cast<int>(DType::float16)) {
        throw std::invalid_argument("no dtype " + std::to_string(number));
    }
    return static_cast<DType>(number);
}

void bind_codec(nanobind::module_& module);
void bind_exp3(nanobind::module_& module);
void bind_mpc(nanobind::module_& module);
void bind_target(nanobind::module_& module);

}  // namespace thinwire
