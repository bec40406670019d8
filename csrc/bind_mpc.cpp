#include "bind.hpp"
#include "mpc.hpp"

namespace thinwire {

namespace nb = nanobind;
using namespace nb::literals;

void bind_mpc(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    module.def(
        "mpc_encode",
        [](Address x, std::int64_t nbytes, Address wire, std::int64_t capacity, int threads) {
            return mpc_encode(pointer(x), nbytes, pointer(wire), capacity, threads);
        },
        "x_address"_a, "nbytes"_a, "wire_address"_a, "capacity"_a, "threads"_a, Released());
    module.def(
        "mpc_decode",
        [](Address wire, std::int64_t wire_bytes, std::int64_t numel, int encoded, Address out, int dtype, bool add,
           int threads) {
            mpc_decode(pointer(wire), wire_bytes, numel, dtype_of(encoded), pointer(out), dtype_of(dtype), add,
                       threads);
        },
        "wire_address"_a, "wire_bytes"_a, "numel"_a, "encoded"_a, "out_address"_a, "dtype"_a, "add"_a, "threads"_a,
        Released());
}

}  // namespace thinwire
