#include "bind.hpp"
#include "delta.hpp"

namespace thinwire {

namespace nb = nanobind;
using namespace nb::literals;

void bind_delta(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release, DefaultFloats>;
    module.def(
        "delta_bytes",
        [](int dtype, std::int64_t numel, int log) { return delta_bytes(delta_type(dtype), numel, log); }, "dtype"_a,
        "numel"_a, "log"_a);
    module.def(
        "encode_delta",
        [](int dtype, Address old, Address now, std::int64_t numel, int log, Address wire, std::int64_t capacity,
           int threads) {
            return encode_delta(delta_type(dtype), pointer(old), pointer(now), numel, log, pointer(wire), capacity,
                                threads);
        },
        "dtype"_a, "old_address"_a, "new_address"_a, "numel"_a, "log"_a, "wire_address"_a, "capacity"_a, "threads"_a,
        Released());
    module.def(
        "apply_delta",
        [](int dtype, Address old, std::int64_t numel, Address wire, std::int64_t wire_bytes, Address out,
           int threads) {
            apply_delta(delta_type(dtype), pointer(old), numel, pointer(wire), wire_bytes, pointer(out), threads);
        },
        "dtype"_a, "old_address"_a, "numel"_a, "wire_address"_a, "wire_bytes"_a, "out_address"_a, "threads"_a,
        Released());
}

}  // namespace thinwire
