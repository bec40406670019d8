#include "bind.hpp"
#include "zfp.hpp"

namespace thinwire {

namespace nb = nanobind;
using namespace nb::literals;

void bind_zfp(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release>;
    module.def(
        "zfp_encode",
        [](Address x, int dtype, std::int64_t numel, int maxbits, Address wire, std::int64_t wire_bytes, int threads) {
            zfp_encode(pointer(x), dtype_of(dtype), numel, maxbits, pointer(wire), wire_bytes, threads);
        },
        "x_address"_a, "dtype"_a, "numel"_a, "maxbits"_a, "wire_address"_a, "wire_bytes"_a, "threads"_a, Released());
    module.def(
        "zfp_decode",
        [](Address wire, std::int64_t wire_bytes, std::int64_t numel, int maxbits, Address out, int dtype, bool add,
           int threads) {
            zfp_decode(pointer(wire), wire_bytes, numel, maxbits, pointer(out), dtype_of(dtype), add, threads);
        },
        "wire_address"_a, "wire_bytes"_a, "numel"_a, "maxbits"_a, "out_address"_a, "dtype"_a, "add"_a, "threads"_a,
        Released());
}

}  // namespace thinwire
