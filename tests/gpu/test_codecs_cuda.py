"""The Triton codecs on a CUDA device: the bytes and values of the cpp backend, at sizes that occur."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from tests.support.codecs.samples import (
    LOSSLESS,
    POISON,
    dtype_for,
    mixture,
    of_every_family,
    of_every_fixed_family,
    same,
    with_word,
)
from torch import Tensor

from thinwire import codecs
from thinwire.codecs import ops
from thinwire.codecs.codec import Codec
from thinwire.errors import UsageError, WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]

FIXED = of_every_fixed_family(
    [
        *("zfp:2.25", "zfp:4", "zfp:8", "zfp:10", "zfp:15.3", "zfp:16", "zfp:24", "zfp:25", "zfp:32"),
        *("int8:256", "int8:256,hadamard", "int4:256", "int4:256,hadamard", "int4:256,stochastic", "int8:tensor"),
        *("int4:tensor", "int4:tensor,stochastic", "int2:32", "int3:24", "int3:2048", "int5:128", "int6:256"),
        *("int7:24", "int4:4104", "int8:8,hadamard", "int8:8192,hadamard", "int2:8192,hadamard"),
        "int8:64,hadamard,stochastic",
    ]
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 3, 5, 9, 31, 255, 257, 1000, 2049, 8191, 100_003]
MEBIBYTE = 1 << 20


def pair(name: str) -> tuple[Codec, Codec]:
    return codecs.get(name, backend="cpp"), codecs.get(name, device="cuda")


def encode(codec: Codec, x: Tensor, *, by: int = 0) -> Tensor:
    """The message, made ``by`` bytes after an aligned address; what is around it must stay as it is."""
    nbytes = codec.max_wire_bytes(x.numel(), x.dtype)
    room = torch.full((nbytes + by + 64,), POISON, dtype=torch.uint8, device="cuda")
    wire = codec.encode(x.cuda(), seed=5, out=room[by : by + nbytes])
    assert room[:by].eq(POISON).all()
    assert room[by + nbytes :].eq(POISON).all()
    return wire


def decode(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    room = torch.full((numel * dtype.itemsize + 64,), POISON, dtype=torch.uint8, device="cuda")
    values = codec.decode(wire.cuda(), numel, dtype, out=room[: numel * dtype.itemsize].view(dtype))
    assert room[numel * dtype.itemsize :].eq(POISON).all()
    return values.cpu()


def check(name: str, x: Tensor, to: list[torch.dtype]) -> None:
    """Messages, values and sums of one tensor."""
    native, codec = pair(name)
    case = (name, x.numel(), x.dtype)
    wire = native.encode(x, seed=5)
    assert torch.equal(encode(codec, x).cpu(), wire), case
    for dtype in to:
        assert same(decode(codec, wire, x.numel(), dtype), native.decode(wire, x.numel(), dtype)), (*case, dtype)
    total = torch.linspace(-1, 1, x.numel())
    wanted = native.decode_add(wire, total.clone(), encoded=x.dtype)
    assert same(codec.decode_add(wire.cuda(), total.cuda(), encoded=x.dtype).cpu(), wanted), case


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("name", FIXED)
def test_messages_and_values_are_the_natives(name: str) -> None:
    for numel, dtype, poisoned in itertools.product(LENGTHS, DTYPES, (False, True)):
        x = mixture(numel, dtype, poisoned=poisoned)
        check(name, x, [dtype] if name == "none" else DTYPES if dtype == torch.float32 else [])


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_lossless_messages_are_the_natives(name: str, dtype: torch.dtype) -> None:
    for numel in [*LENGTHS, *range(200, 215), 511, 512, 513, 1024, 1025]:
        for poisoned in (False, True):
            check(name, mixture(numel, dtype, poisoned=poisoned), [dtype])
        check(name, torch.zeros(numel, dtype=dtype), [dtype])
        check(name, torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype), [dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", of_every_family(FIXED))
def test_64_mebibytes(name: str, dtype: torch.dtype) -> None:
    if str(dtype).removeprefix("torch.") not in encodable_dtypes(CodecSpec(name)):
        pytest.skip(f"{name} does not take {dtype}")
    # Values that need no care, then values that do.
    numel = 64 * MEBIBYTE // dtype.itemsize + 7
    x = torch.randn(numel).to(dtype)
    x[-100_003:] = mixture(100_003, dtype, poisoned=True)
    check(name, x, [dtype])


def room_or_skip(gibibytes: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gibibytes << 30:
        pytest.skip(f"it takes {gibibytes} GiB, {free >> 30} are free")


BEYOND, EDGE = (1 << 31) + 3 * 8192 + 77, 24 * 8192
"""More values than 32 bits count, and those at both ends that are no zeros."""
LAST = BEYOND // EDGE * EDGE - EDGE
"""The last values, from where a block starts with every codec."""


def zeros_between_edges() -> Tensor:
    x = torch.zeros(BEYOND, dtype=torch.bfloat16, device="cuda")
    x[:EDGE] = torch.randn(EDGE, device="cuda")
    x[-EDGE:] = torch.randn(EDGE, device="cuda")
    return x


@pytest.mark.parametrize(
    "name",
    ["none", "bf16", "fp16", "int4:256", "int3:24", "int8:8192,hadamard", "zfp:8", "zfp:15.3", "exp3", "mpc"],
)
def test_more_than_two_to_the_31_values(name: str) -> None:
    room_or_skip(32)
    codec = codecs.get(name, device="cuda")
    x = zeros_between_edges()
    y = codec.decode(codec.encode(x), BEYOND, torch.bfloat16)
    for part in (slice(0, EDGE), slice(LAST, BEYOND)):
        alone = codec.decode(codec.encode(x[part]), x[part].numel(), torch.bfloat16)
        assert torch.equal(y[part], alone)
    assert not y[EDGE:LAST].any()


def test_one_scale_for_more_than_two_to_the_31_values() -> None:
    room_or_skip(32)
    codec = codecs.get("int8:tensor", device="cuda")
    x = zeros_between_edges()
    x[-1] = 100.0  # the largest value is the last one
    y = codec.decode(codec.encode(x), BEYOND, torch.bfloat16)
    ends = torch.cat((x[:EDGE], x[LAST:]))
    assert torch.equal(torch.cat((y[:EDGE], y[LAST:])), codec.decode(codec.encode(ends), ends.numel(), ends.dtype))
    assert not y[EDGE:LAST].any()


def test_slices_sums_and_feedback_beyond_two_to_the_31_values() -> None:
    room_or_skip(48)
    codec = codecs.get("int8:256", device="cuda")
    x = zeros_between_edges()
    bounds = [(0, EDGE), (LAST, BEYOND), (LAST, LAST + 512)]
    wires = codec.encode_slices(x, bounds, seed=3)
    parts = codec.encode_slices(
        torch.cat((x[:EDGE], x[LAST:])), [(0, EDGE), (EDGE, EDGE + BEYOND - LAST), (EDGE, EDGE + 512)], seed=3
    )
    for row, (start, stop) in enumerate(bounds):
        used = codec.max_wire_bytes(stop - start, x.dtype)
        assert torch.equal(wires[row, :used], parts[row, :used])
    wire = codec.encode(x)
    total = codec.decode_sum(wire.view(1, -1), BEYOND, torch.bfloat16, scale=0.5, encoded=x.dtype)
    alone = codec.decode_sum(codec.encode(x[LAST:]).view(1, -1), BEYOND - LAST, x.dtype, scale=0.5, encoded=x.dtype)
    assert torch.equal(total[LAST:], alone)
    del wire, total
    lost = torch.zeros(BEYOND, device="cuda")  # 8 GiB, beside 4 of values and 2 of the message
    sent = codec.encode_feedback(x, lost, gain=0.5, seed=3)
    lost_alone = torch.zeros(BEYOND - LAST, device="cuda")
    codec.encode_feedback(x[LAST:], lost_alone, gain=0.5, seed=3)
    assert torch.equal(lost[LAST:], lost_alone)
    assert not lost[EDGE:LAST].any()
    values = codec.decode(sent, BEYOND, torch.bfloat16)
    assert torch.equal(values[LAST:], codec.decode(codec.encode(x[LAST:]), BEYOND - LAST, torch.bfloat16))


# ------------------------------------------------------------------------------------------------------ fused forms


@pytest.mark.parametrize("numel", [1, 1000, 100_003, 1 << 22])
@pytest.mark.parametrize("name", of_every_family(FIXED))
def test_fused_forms_are_their_composition(name: str, numel: int) -> None:
    native, codec = pair(name)
    dtype = dtype_for(name)
    x = mixture(numel * 3, dtype, poisoned=numel == 100_003)
    everywhere = [
        [(2 * numel, 3 * numel), (numel, 2 * numel), (0, numel)],
        [(2 * numel, 3 * numel), (0, numel), (numel, numel), (numel, 2 * numel - numel // 3), (numel // 2, numel)],
    ]
    for bounds in everywhere:
        want = native.encode_slices(x, bounds, seed=9)
        room = torch.full(want.shape, POISON, dtype=torch.uint8, device="cuda")
        got = codec.encode_slices(x.cuda(), bounds, seed=9, out=room).cpu()
        for row, (start, stop) in enumerate(bounds):
            used = native.max_wire_bytes(stop - start, dtype)
            if codec.spec.is_variable_length:
                used = native.encode(x[start:stop]).numel()
            assert torch.equal(got[row, :used], want[row, :used]), bounds[row]
            assert codec.spec.is_variable_length or got[row, used:].eq(POISON).all(), bounds[row]
    rows = native.encode_slices(x, everywhere[0], seed=9)
    wide = torch.zeros(3, rows.shape[1] + 8, dtype=torch.uint8, device="cuda")[:, 8:].copy_(rows)
    for wires, out in itertools.product((rows.cuda(), wide, rows[:1].cuda()), DTYPES):
        fused = codec.decode_sum(wires, numel, out, scale=1 / 3, encoded=dtype)
        assert same(fused.cpu(), native.decode_sum(rows[: len(wires)], numel, out, scale=1 / 3, encoded=dtype))
    total = native.decode_sum(rows, numel, scale=0.5, encoded=dtype)
    for target in (
        "int4:96",
        "int8:256,hadamard",
        "int8:tensor",
        "int8:64,stochastic",
        "bf16",
        "none",
        "zfp:9.5",
        "mpc",
    ):
        to, made = pair(target)
        between = codec.decode_sum_encode(rows.cuda(), numel, made, scale=0.5, seed=3, encoded=dtype)
        assert torch.equal(between.cpu(), to.encode(total, seed=3)), target


# ------------------------------------------------------------------------------------------------------ memory, waits


@pytest.mark.parametrize("by", [1, 2, 8])
@pytest.mark.parametrize(
    "name", of_every_family(["none", "bf16", "int8:256", "int7:24", "int8:tensor", "zfp:8", "zfp:10"])
)
def test_any_alignment(name: str, by: int) -> None:
    dtype = torch.bfloat16 if name == "bf16" else dtype_for(name)
    native, codec = pair(name)
    x = mixture(100_004, dtype, poisoned=False).cuda()[1:]
    wire = native.encode(x.cpu())
    assert torch.equal(encode(codec, x, by=by).cpu(), wire)
    moved = torch.cat((wire.new_zeros(by), wire)).cuda()[by:]
    out = torch.zeros(100_004, dtype=dtype, device="cuda")[1:]
    assert same(codec.decode(moved, 100_003, dtype, out=out).cpu(), native.decode(wire, 100_003, dtype))


@pytest.mark.parametrize(
    "name", of_every_family(["none", "bf16", "int4:256,hadamard", "int8:tensor", "zfp:8", "zfp:10"])
)
def test_the_host_waits_for_sizes_only(name: str) -> None:
    """Codecs of fixed length never wait for the device; the others wait once a message."""
    codec = codecs.get(name, device="cuda")
    dtype = dtype_for(name)
    x, total = torch.randn(100_003, device="cuda").to(dtype), torch.zeros(100_003, device="cuda")
    wire = codec.encode(x)
    allowed = 1 if codec.spec.is_variable_length else 0
    assert waits(lambda: codec.encode(x)) <= allowed
    assert waits(lambda: codec.encode_slices(x, [(0, 50_000), (50_000, 90_000)])) == 0
    assert waits(lambda: codec.decode(wire, x.numel(), dtype)) <= allowed
    assert waits(lambda: codec.decode_add(wire, total, encoded=dtype)) <= allowed


def waits(function: Callable[[], object]) -> int:
    function()  # compiled, and its tables copied
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


# ------------------------------------------------------------------------------------------------------ bad messages


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_refuses_what_the_native_refuses(name: str, dtype: torch.dtype) -> None:
    native, codec = pair(name)
    numel = 100_003
    for x in (torch.randn(numel).to(dtype), mixture(numel, dtype, poisoned=True)):
        wire = native.encode(x)
        words = wire.numel() // 4
        broken = [wire[:size] for size in (0, 4, 8, 12, wire.numel() // 2, wire.numel() - 1)]
        broken += [with_word(wire, at, value) for at in (0, 1) for value in (0, 3, 0x7FFFFFFF, 0xFFFFFFFF)]
        broken += [with_word(wire, 1, words - 1), with_word(torch.cat((wire, wire[:4])), 1, words + 1)]
        for message in broken:
            with pytest.raises(WireError, match=f"^{name}: "):
                codec.decode(message.cuda(), numel, dtype)
        for other in (numel - 6000, numel + 6000):
            with pytest.raises(WireError, match=f"^{name}: "):
                codec.decode(wire.cuda(), other, dtype)


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_mutated_messages_do_no_harm(name: str, dtype: torch.dtype) -> None:
    """They decode, or are refused, as the native codec does it."""
    native, codec = pair(name)
    generator = torch.Generator().manual_seed(4)

    def number(below: int) -> int:
        return int(torch.randint(0, below, (1,), generator=generator))

    runs, refused = 400, 0
    for run in range(runs):
        numel = 1 + number(3000)
        wire = native.encode(mixture(numel, dtype, poisoned=False))
        for _ in range(number(3)):
            wire[number(min(wire.numel(), 64 if run % 2 else wire.numel()))] = number(256)
        wire = wire[: number(wire.numel() + 1)] if run % 4 == 0 else wire
        try:
            want = native.decode(wire, numel, dtype)
        except WireError:
            refused += 1
            with pytest.raises(WireError, match=f"^{name}: "):
                codec.decode(wire.cuda(), numel, dtype)
            continue
        assert torch.equal(decode(codec, wire, numel, dtype).view(torch.uint8), want.view(torch.uint8))
    assert 0 < refused < runs


@pytest.mark.parametrize("bits", range(9, 129, 7))
def test_any_bytes_decode_as_the_natives(bits: int) -> None:
    native, codec = pair(f"zfp:{bits / 4}")
    wire = torch.randint(0, 256, (codec.max_wire_bytes(100_003, torch.float32),), dtype=torch.uint8)
    wire[: wire.numel() // 2] &= torch.randint(0, 256, (wire.numel() // 2,), dtype=torch.uint8)  # few ones
    assert same(decode(codec, wire, 100_003, torch.float32), native.decode(wire, 100_003, torch.float32))


# ------------------------------------------------------------------------------------------------------ devices


def test_the_device_chooses_the_backend() -> None:
    x = torch.randn(300)
    assert codecs.get("int8:256", device="cuda").backend == "triton"
    assert codecs.get("int8:256", device=torch.device("cuda", 0)).backend == "triton"
    assert codecs.get("int8:256", device="cpu").backend == "cpp"
    reference = codecs.get("int8:256", backend="reference", device="cuda")
    assert torch.equal(reference.encode(x.cuda()).cpu(), codecs.get("int8:256").encode(x))
    with pytest.raises(UsageError, match="works on CPU tensors"):
        codecs.get("int8:256", backend="cpp").encode(x.cuda())
    with pytest.raises(UsageError, match="works on GPU tensors"):
        codecs.get("int8:256", backend="triton").encode(x)
    codec = codecs.get("int8:256", device="cuda")
    wire = codec.encode(x.cuda())
    with pytest.raises(UsageError, match="out should be contiguous"):
        codec.encode(x.cuda(), out=torch.empty(1000, dtype=torch.uint8))
    with pytest.raises(UsageError, match="out should be contiguous"):
        codec.decode(wire, 300, torch.float32, out=torch.empty(300))
    with pytest.raises(UsageError, match="take both from one backend"):
        codec.decode_sum_encode(wire.view(1, -1), 300, codecs.get("int8:256", backend="cpp"))


@pytest.mark.parametrize(("name", "dtype"), [("int4:256", torch.float32), *LOSSLESS])
def test_operators_pass_torchs_checks(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3000, device="cuda").to(dtype)
    wire = codecs.get(name, device="cuda").encode(x)
    assert torch.equal(torch.ops.thinwire.encode(x, name), wire)
    torch.library.opcheck(ops.encode, (x, name))
    torch.library.opcheck(ops.decode, (wire, 3000, dtype, name))
    torch.library.opcheck(ops.decode_add, (wire, torch.zeros(3000, device="cuda"), name))


def test_a_compiled_function_encodes_and_decodes_in_one_graph() -> None:
    codec = codecs.get("int8:256", device="cuda")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def through_the_wire(x: Tensor) -> Tensor:
        wire = torch.ops.thinwire.encode(2 * x, "int8:256")
        total = torch.ones_like(x)
        torch.ops.thinwire.decode_add(wire, total, "int8:256")
        return total + torch.ops.thinwire.decode(wire, x.numel(), torch.float32, "int8:256")

    x = torch.randn(100_003, device="cuda")
    value = codec.decode(codec.encode(2 * x), x.numel(), torch.float32)
    assert torch.equal(through_the_wire(x), torch.ones_like(x) + value + value)
