#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"

namespace thinwire {

namespace nb = nanobind;
using namespace nb::literals;

void bind_lossless(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release, DefaultFloats>;
    struct Lossless {
        std::unique_ptr<const LosslessFormat> format;
    };
    nb::class_<Lossless>(module, "Lossless")
        .def(
            "__init__",
            [](Lossless* codec, const std::string& name, const std::vector<std::int64_t>& parameters) {
                new (codec) Lossless{make_lossless(name, parameters)};
            },
            "name"_a, "parameters"_a)
        .def(
            "encode",
            [](const Lossless& codec, Address x, int dtype, std::int64_t numel, Address wire, std::int64_t capacity,
               int threads) {
                return codec.format->encode(pointer(x), dtype_of(dtype), numel, pointer(wire), capacity, threads);
            },
            "x_address"_a, "dtype"_a, "numel"_a, "wire_address"_a, "capacity"_a, "threads"_a, Released())
        .def(
            "decode",
            [](const Lossless& codec, Address wire, std::int64_t wire_bytes, std::int64_t numel, int encoded,
               Address out, int dtype, bool add, int threads) {
                codec.format->decode(pointer(wire), wire_bytes, numel, dtype_of(encoded), pointer(out), dtype_of(dtype),
                                     add, threads);
            },
            "wire_address"_a, "wire_bytes"_a, "numel"_a, "encoded"_a, "out_address"_a, "dtype"_a, "add"_a, "threads"_a,
            Released());
}

}  // namespace thinwire
