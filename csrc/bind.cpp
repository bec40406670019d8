// The Python module.
//
// Python checks tensors (device, dtype, contiguity) and passes their addresses and sizes; sizes of wires are checked
// once more on this side, because a wire comes from another machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>

#include "codec.hpp"
#include "codec_kinds.hpp"
#include "delta.hpp"
#include "pool.hpp"
#include "target.hpp"

namespace thinwire {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Address = std::uintptr_t;
using Released = nb::call_guard<nb::gil_scoped_release, DefaultFloats>;

void* pointer(Address address) {
    return reinterpret_cast<void*>(address);
}

Sum sum_of(Address wires, std::int64_t count, std::int64_t stride, std::int64_t numel, Address onto, int onto_dtype,
           float factor) {
    return {pointer(wires), count, stride, numel, pointer(onto), dtype_of(onto_dtype), factor};
}

void bind_fixed(nb::module_& module) {
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

void bind_lossless(nb::module_& module) {
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

void bind_delta(nb::module_& module) {
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

}  // namespace
}  // namespace thinwire

NB_MODULE(_native, module) {
    module.doc() = "Native codecs; their types are in _native.pyi.";
    // Codecs are kept until the process ends; nothing of theirs needs to be released then.
    nanobind::set_leak_warnings(false);
    thinwire::choose_target();
    module.def("targets", &thinwire::targets);
    module.def("target", &thinwire::target);
    module.def("use_target", &thinwire::use_target, nanobind::arg("name"));
    thinwire::bind_delta(module);
    thinwire::bind_fixed(module);
    thinwire::bind_lossless(module);
}
