#include "bind.hpp"
#include "exp3.hpp"

namespace thinwire {

namespace nb = nanobind;
using namespace nb::literals;

void bind_exp3(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    module.def(
        "exp3_encode",
        [](Address x, std::int64_t numel, Address wire, std::int64_t capacity, int threads) {
            return exp3_encode(pointer(x), numel, pointer(wire), capacity, threads);
        },
        "x_address"_a, "numel"_a, "wire_address"_a, "capacity"_a, "threads"_a, Released());
    module.def(
        "exp3_decode",
        [](Address wire, std::int64_t wire_bytes, std::int64_t numel, Address out, int dtype, bool add, int threads) {
            exp3_decode(pointer(wire), wire_bytes, numel, pointer(out), dtype_of(dtype), add, threads);
        },
        "wire_address"_a, "wire_bytes"_a, "numel"_a, "out_address"_a, "dtype"_a, "add"_a, "threads"_a, Released());
}

}  // namespace thinwire
