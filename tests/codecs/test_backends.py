"""Every backend writes the reference's bytes and reads its values, for every instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.support.codecs.samples import LOSSLESS, of_every_fixed_family

from thinwire import codecs
from thinwire.codecs.cpp import _native
from thinwire.codecs.seeds import fold_seed
from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES, encodable_dtypes

EVERY = [text for family in FAMILIES.values() for text in family.examples]
FIXED = [text for text in EVERY if not CodecSpec(text).is_variable_length]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 64, 255, 257, 1000, 9001]


def dtypes_of(name: str) -> list[torch.dtype]:
    """What a codec takes."""
    return [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in encodable_dtypes(CodecSpec(name))]


def each_target() -> Iterator[str]:
    before = _native.target()
    for name in _native.targets():
        _native.use_target(name)
        yield name
    _native.use_target(before)


def contents(numel: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    heavy = normal / torch.rand(numel, generator=generator)
    poisoned = normal.clone()
    poisoned[numel // 2] = torch.inf
    poisoned[numel // 5] = torch.nan
    return {
        "normal": normal,
        "heavy tails": heavy,
        "mostly zero": torch.where(torch.rand(numel, generator=generator) < 0.9, 0.0, normal),
        "zero": torch.zeros(numel),
        "minus zero": -torch.zeros(numel),
        "huge": normal * 1e37,
        "tiny": normal * 1e-36,
        "denormal": normal * 1e-41,
        "poisoned": poisoned,
        "constant": torch.full((numel,), -3.7),
        "two values": torch.where(normal > 0, 2.5, -2.5),
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    )


def pair(name: str) -> tuple[codecs.Codec, codecs.Codec]:
    return codecs.get(name, backend="reference"), codecs.get(name, backend="cpp")


@pytest.mark.slow
@pytest.mark.parametrize("name", FIXED)
def test_messages_and_values_are_the_references(name: str) -> None:
    reference, native = pair(name)
    sizes = (7, 255) if name.startswith("zfp") else SIZES  # the reference codes ZFP bit by bit; see cpp/test_zfp.py
    for numel in sizes:
        for label, values in contents(numel).items():
            for dtype in DTYPES:
                x = values.to(dtype)
                wire = reference.encode(x, seed=5)
                wanted = (dtype,) if CodecSpec(name).is_lossless and not CodecSpec(name).is_variable_length else DTYPES
                decoded = [reference.decode(wire, numel, to) for to in wanted]
                total = reference.decode_add(wire, torch.linspace(-1, 1, numel), encoded=dtype)
                for target in each_target():
                    case = (numel, label, dtype, target)
                    assert torch.equal(native.encode(x, seed=5), wire), case
                    assert all(same(native.decode(wire, numel, y.dtype), y) for y in decoded), case
                    assert same(native.decode_add(wire, torch.linspace(-1, 1, numel), encoded=dtype), total), case


@pytest.mark.parametrize("misalignment", [1, 2, 3, 8])
@pytest.mark.parametrize("name", of_every_fixed_family(["bf16", "int8:256", "int4:256", "int3:64", "zfp:8"]))
def test_any_alignment(name: str, misalignment: int, target: str) -> None:
    codec = codecs.get(name, backend="cpp")
    x = torch.randn(1001)
    wire = codec.encode(x)
    moved = torch.empty(wire.numel() + misalignment, dtype=torch.uint8)[misalignment:]
    assert torch.equal(codec.encode(x, out=moved), wire)
    assert torch.equal(codec.decode(moved, 1001, torch.float32), codec.decode(wire, 1001, torch.float32))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "zfp:16" else name
        for name in of_every_fixed_family(["int8:256", "int4:256", "int4:256,stochastic", "int4:tensor", "zfp:16"])
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_fused_forms_are_their_composition(name: str, threads: int, target: str) -> None:
    reference, native = pair(name)
    to = [codecs.get("int4:96", backend=backend) for backend in ("reference", "cpp")]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for numel in (1, 300, 20_001):
            x = torch.randn(numel * 3)
            # Three slices in another order, one of them shorter.
            bounds = [(2 * numel, 3 * numel), (0, numel), (numel, 2 * numel - numel // 3)]
            wires = native.encode_slices(x, bounds, seed=9)
            expected = reference.encode_slices(x, bounds, seed=9)
            for row, (start, stop) in enumerate(bounds):
                used = native.max_wire_bytes(stop - start, x.dtype)
                assert torch.equal(wires[row, :used], expected[row, :used])
            rows = wires[:2]
            for dtype in DTYPES:
                fused = native.decode_sum(rows, numel, dtype, scale=1 / 3)
                assert same(fused, reference.decode_sum(rows, numel, dtype, scale=1 / 3))
            for start, out in ((x[:numel].float(), torch.float32), (x[:numel].bfloat16(), torch.bfloat16)):
                total = codecs.Sum(rows, numel, start, 1 / 3)
                made, wanted = (
                    one.decode_sum_into(total, torch.empty(numel, dtype=out)) for one in (native, reference)
                )
                assert same(made, wanted)
                assert torch.equal(
                    native.encode_sum(total, to[1]), to[0].encode(reference.decode_sum_into(total, torch.empty(numel)))
                )
            short = numel - numel // 3
            fewer = native.encode_slices(x, [(0, short), (1, 1 + short)], seed=9)
            totals = [
                codecs.Sum(rows, numel, x[:numel].bfloat16()),
                codecs.Sum(rows[:, :0], 0, x[:0]),
                codecs.Sum(fewer, short, x[:short], 1 / 3),
            ]
            outs = [
                torch.empty(to[1].max_wire_bytes(total.numel, torch.float32), dtype=torch.uint8) for total in totals
            ]
            native.encode_sums(totals, to[1], outs, seed=9)
            for total, out in zip(totals, outs, strict=True):
                wanted = reference.decode_sum_into(total, torch.empty(total.numel))
                assert torch.equal(out, to[0].encode(wanted)) or not total.numel
            for add in (False, True):
                made, wanted = (
                    one.decode_slices(rows, torch.ones(len(rows), numel), add=add) for one in (native, reference)
                )
                assert same(made, wanted)
            between = native.decode_sum_encode(rows, numel, to[1], scale=0.5)
            composed = to[0].encode(reference.decode_sum(rows, numel, scale=0.5))
            assert torch.equal(between, composed)
            for dtype in DTYPES:
                piece, lost = x[:numel].to(dtype), x[numel : 2 * numel] / 9
                wanted = lost + piece
                left, left_natively = lost.clone(), lost.clone()
                wire = native.encode_feedback(piece, left_natively, seed=9)
                assert torch.equal(wire, reference.encode(wanted, seed=9))
                assert torch.equal(wire, reference.encode_feedback(piece, left, seed=9))
                assert torch.equal(left_natively, left)
                missed = wanted - reference.decode(wire, numel, torch.float32)
                assert torch.equal(left, missed)
                left, left_natively = lost.clone(), lost.clone()
                assert torch.equal(wire, native.encode_feedback(piece, left_natively, gain=0.1, seed=9))
                assert torch.equal(wire, reference.encode_feedback(piece, left, gain=0.1, seed=9))
                assert torch.equal(left_natively, left)
                torch.testing.assert_close(left, 0.9 * lost + 0.1 * missed, atol=1e-5, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", FIXED)
def test_a_block_with_nan_or_infinity_decodes_to_nothing_finite(name: str, backend: str) -> None:
    codec = codecs.get(name, backend=backend)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(20_000)
        x[4321] = bad
        y = codec.decode(codec.encode(x, seed=1), x.numel(), torch.float32)
        assert not y[4321].isfinite()


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", FIXED)
def test_messages_of_another_length_are_refused(name: str, backend: str) -> None:
    codec = codecs.get(name, backend=backend)
    wire = codec.encode(torch.randn(1000), seed=1)
    for other in (wire[:-1], torch.cat((wire, wire[:16])), wire[:0]):
        with pytest.raises(WireError, match="a message of 1000 values has"):
            codec.decode(other, 1000, torch.float32)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", EVERY)
def test_an_empty_tensor_is_an_empty_message(name: str, backend: str) -> None:
    codec = codecs.get(name, backend=backend)
    for dtype in dtypes_of(name):
        wire = codec.encode(torch.empty(0, dtype=dtype), seed=1)
        assert wire.numel() == 0
        assert codec.decode(wire, 0, dtype).numel() == 0


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", EVERY)
def test_tensors_that_are_not_contiguous_or_begin_anywhere(name: str, backend: str) -> None:
    codec = codecs.get(name, backend=backend)
    for dtype in dtypes_of(name):
        values = torch.randn(26, 21).to(dtype)
        for x in (values.t(), values[:, ::2], values.view(-1)[1:], values.view(-1)[3:-2]):
            wire = codec.encode(x, seed=1)
            assert torch.equal(wire, codec.encode(x.contiguous().clone(), seed=1))
            room = torch.full((x.numel() + 2,), 77.0, dtype=dtype)
            decoded = codec.decode(wire, x.numel(), dtype, out=room[1:-1])
            assert same(decoded, codec.decode(wire, x.numel(), dtype))
            assert (room[[0, -1]] == 77).all()


@pytest.mark.parametrize("name", EVERY)
def test_signs_that_torch_has_not_applied_yet(name: str) -> None:
    """The imaginary part of a conjugate, for example, is a view of values with the other sign."""
    codec, seen = codecs.get(name, backend="cpp"), torch._neg_view(torch.arange(300, dtype=dtypes_of(name)[0]))
    assert seen.is_neg()
    assert torch.equal(codec.encode(seen, seed=1), codec.encode(seen.clone(), seed=1))


def test_denormals_are_kept_whatever_the_thread_is_set_to() -> None:
    """torch sets it for one thread, and the pool has others."""
    codec, threads = codecs.get("none", backend="cpp"), torch.get_num_threads()
    wires = torch.stack([codec.encode(torch.full((1 << 20,), 1e-40))] * 2)
    torch.set_num_threads(4)
    try:
        before = codec.decode_sum(wires, 1 << 20)
        torch.set_flush_denormal(True)
        after = [codec.decode_sum(wires, 1 << 20).view(torch.int32) for _ in range(5)]
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert all(torch.equal(before.view(torch.int32), one) for one in after)
    assert before.count_nonzero() == 1 << 20


def test_the_halves_of_a_long_seed_both_count() -> None:
    seeds = [0, 5, 5 << 32, 5 << 32 | 5, 1 << 63]
    assert len({fold_seed(seed) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize("name", EVERY)
def test_zeros_stay_zeros_and_keep_their_sign_where_bits_do(name: str, backend: str) -> None:
    codec = codecs.get(name, backend=backend)
    for dtype in dtypes_of(name):
        x = torch.tensor([0.0, -0.0] * 150, dtype=dtype)
        y = codec.decode(codec.encode(x, seed=1), x.numel(), dtype)
        assert (y == 0).all()
        if codec.spec.is_lossless or codec.spec.family in {"bf16", "fp16"}:
            assert y.signbit().equal(x.signbit())


def test_random_rounding_needs_a_seed_and_has_no_bias() -> None:
    codec = codecs.get("int4:256,stochastic")
    with pytest.raises(UsageError, match="pass seed="):
        codec.encode(torch.ones(8))
    x = torch.linspace(-1, 1, 256)
    mean = torch.stack([codec.decode(codec.encode(x, seed=seed), 256, torch.float32) for seed in range(1000)]).mean(0)
    # A step is 1/7, so the mean of 1000 roundings has a deviation of at most 1/14/sqrt(1000) = 0.0023.
    assert (mean - x).abs().max() < 6 * 0.0023


@pytest.mark.parametrize(("name", "least"), [("int8:256", 43.1), ("int4:256", 19.8), ("int4:256,hadamard", 19.8)])
def test_error_on_normal_values(name: str, least: float) -> None:
    codec = codecs.get(name)
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    error = (x - codec.decode(codec.encode(x), x.numel(), torch.float32)).double()
    assert 10 * torch.log10(x.double().square().sum() / error.square().sum()) > least


@pytest.mark.parametrize("backend", ["reference", "cpp"])
@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_lossless_codecs_return_every_bit(name: str, dtype: torch.dtype, backend: str) -> None:
    codec = codecs.get(name, backend=backend)
    size = 8 * dtype.itemsize
    integer = torch.int32 if size == 32 else torch.int16
    for numel in (1, 2, 31, 33, 511, 1025, 70_000):
        patterns = torch.randint(-(1 << (size - 1)), (1 << (size - 1)) - 1, (numel,)).to(integer)
        for bits in (patterns, torch.arange(numel).to(integer), torch.randn(numel).to(dtype).view(integer)):
            wire = codec.encode(bits.view(dtype))
            assert wire.numel() <= codec.max_wire_bytes(numel, dtype)
            assert torch.equal(codec.decode(wire, numel, dtype).view(integer), bits)
            with pytest.raises(WireError):
                codec.decode(wire[:-4], numel, dtype)


def test_wire_sizes_of_the_spec_are_the_natives() -> None:
    for name in FIXED:
        spec = CodecSpec(name)
        native = codecs.get(name, backend="cpp")
        for numel in (0, 1, 63, 1000):
            assert native.encode(torch.zeros(numel), seed=0).numel() == spec.max_wire_bytes(numel, "float32")
