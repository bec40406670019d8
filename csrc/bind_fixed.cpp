#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "codec.hpp"

namespace thinwire {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

Sum sum_of(Address wires, std::int64_t count, std::int64_t stride, std::int64_t numel, Address onto, int onto_dtype,
           float factor) {
    return {pointer(wires), count, stride, numel, pointer(onto), dtype_of(onto_dtype), factor};
}

}  // namespace

void bind_fixed(nb::module_& module) {
    using Released = nb::call_guard<nb::gil_scoped_release, DefaultFloats>;
    nb::class_<Codec>(module, "Codec")
        .def(
            "__init__",
            [](Codec* codec, const std::string& name, const std::vector<std::int64_t>& parameters) {
                new (codec) Codec(name, parameters);
            },
            "name"_a, "parameters"_a)
        .def("wire_bytes", &Codec::wire_bytes, "numel"_a)
        .def(
            "encode",
            [](const Codec& codec, Address x, int dtype, std::int64_t numel, Address wire, std::int64_t wire_bytes,
               std::uint32_t seed, int threads) {
                codec.encode(pointer(x), dtype_of(dtype), numel, pointer(wire), wire_bytes, seed, threads);
            },
            "x_address"_a, "dtype"_a, "numel"_a, "wire_address"_a, "wire_bytes"_a, "seed"_a, "threads"_a, Released())
        .def(
            "encode_feedback",
            [](const Codec& codec, Address x, int dtype, std::int64_t numel, Address lost, double gain, Address wire,
               std::int64_t wire_bytes, std::uint32_t seed, int threads) {
                codec.encode_feedback(pointer(x), dtype_of(dtype), numel, static_cast<float*>(pointer(lost)), gain,
                                      pointer(wire), wire_bytes, seed, threads);
            },
            "x_address"_a, "dtype"_a, "numel"_a, "lost_address"_a, "gain"_a, "wire_address"_a, "wire_bytes"_a, "seed"_a,
            "threads"_a, Released())
        .def(
            "decode",
            [](const Codec& codec, Address wire, std::int64_t wire_bytes, std::int64_t numel, Address out, int dtype,
               bool add, int threads) {
                codec.decode(pointer(wire), wire_bytes, numel, pointer(out), dtype_of(dtype), add, threads);
            },
            "wire_address"_a, "wire_bytes"_a, "numel"_a, "out_address"_a, "dtype"_a, "add"_a, "threads"_a, Released())
        .def(
            "decode_sum",
            [](const Codec& codec, Address wires, std::int64_t count, std::int64_t stride, std::int64_t numel,
               Address onto, int onto_dtype, float factor, Address out, int dtype, int threads) {
                codec.decode_sum(sum_of(wires, count, stride, numel, onto, onto_dtype, factor), pointer(out),
                                 dtype_of(dtype), threads);
            },
            "wires_address"_a, "count"_a, "stride"_a, "numel"_a, "onto_address"_a, "onto_dtype"_a, "factor"_a,
            "out_address"_a, "dtype"_a, "threads"_a, Released())
        .def(
            "decode_sum_encode",
            [](const Codec& codec, Address wires, std::int64_t count, std::int64_t stride, std::int64_t numel,
               Address onto, int onto_dtype, float factor, const Codec& to, Address wire, std::int64_t wire_bytes,
               std::uint32_t seed, int threads) {
                codec.decode_sum_encode(sum_of(wires, count, stride, numel, onto, onto_dtype, factor), to,
                                        pointer(wire), wire_bytes, seed, threads);
            },
            "wires_address"_a, "count"_a, "stride"_a, "numel"_a, "onto_address"_a, "onto_dtype"_a, "factor"_a, "to"_a,
            "wire_address"_a, "wire_bytes"_a, "seed"_a, "threads"_a, Released());
}

}  // namespace thinwire
