"""Native codecs of variable length: the reference's bytes, every bit pattern back, no harm from any message."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from tests.support.codecs.samples import LOSSLESS, with_word
from torch import Tensor

from thinwire.codecs.codec import Codec
from thinwire.codecs.cpp import _native
from thinwire.codecs.cpp.native import LosslessCodec
from thinwire.codecs.registry import get
from thinwire.errors import WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import FAMILIES

SIZES = [*range(1, 201), *range(511, 514), *range(1023, 1058), 2047, 4097, 100000]
NUMBER = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FEW_SIZES = [1, 31, 63, 64, 127, 512, 513, 1024, 1087, 2049, 100001]
POISON = 0xA5


pytestmark = pytest.mark.usefixtures("target")


def native(name: str) -> Codec:
    return LosslessCodec(CodecSpec(name))


def reference(name: str) -> Codec:
    return get(name, backend="reference")


def any_bits(dtype: torch.dtype, n: int) -> Tensor:
    return torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def few_values(dtype: torch.dtype, n: int) -> Tensor:
    return torch.tensor([0.0, -0.0, 1.0, float("nan"), float("inf"), 1e-40])[torch.randint(0, 6, (n,))].to(dtype)


KINDS: dict[str, Callable[[torch.dtype, int], Tensor]] = {
    "any bits": any_bits,
    "zeros": lambda dtype, n: torch.zeros(n, dtype=dtype),
    "constant": lambda dtype, n: torch.full((n,), -1.5, dtype=dtype),
    "ramp": lambda dtype, n: torch.arange(n).to(dtype),
    "gaussian": lambda dtype, n: torch.randn(n).to(dtype),
    "denormal": lambda dtype, n: (torch.randn(n) * 1e-39).to(dtype),
    "sparse": lambda dtype, n: (torch.randn(n) * (torch.rand(n) < 0.2)).to(dtype),
    "all exponents": lambda dtype, n: torch.randn(n).mul(torch.exp2(torch.randint(-150, 120, (n,)))).to(dtype),
    "few values": few_values,
}


@functools.cache
def sample(kind: str, name: str, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
    """Values, and the reference's message of them."""
    torch.default_generator.manual_seed(numel)
    x = KINDS[kind](dtype, numel)
    return x, reference(name).encode(x)


def misaligned(x: Tensor, by: int) -> Tensor:
    """A copy that begins `by` bytes after an aligned address, which a torch tensor of its dtype cannot for itself."""
    room = torch.empty(x.nbytes + 64, dtype=torch.uint8)
    at = -room.data_ptr() % 64 + by
    room[at : at + x.nbytes] = x.view(torch.uint8)
    return room[at : at + x.nbytes]


def same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def encode(name: str, x: Tensor) -> Tensor:
    """The message, in a buffer of the largest one's size whose rest must stay as it is."""
    codec = native(name)
    room = torch.full((codec.max_wire_bytes(x.numel(), x.dtype) + 64,), POISON, dtype=torch.uint8)
    wire = codec.encode(x, out=room)
    assert room[-64:].eq(POISON).all()
    return wire


def decode(name: str, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    room = torch.full((numel * dtype.itemsize + 64,), POISON, dtype=torch.uint8)
    out = native(name).decode(wire, numel, dtype, out=room[: numel * dtype.itemsize].view(dtype))
    assert room[-64:].eq(POISON).all()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_writes_the_bytes_of_the_reference(name: str, dtype: torch.dtype, kind: str) -> None:
    for numel in SIZES if kind in {"any bits", "gaussian"} else FEW_SIZES:
        x, want = sample(kind, name, dtype, numel)
        wire = encode(name, x)
        same_bits(wire, want)
        same_bits(decode(name, wire, numel, dtype), x)


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
@pytest.mark.usefixtures("threads")
def test_threads_write_the_same_bytes(name: str, dtype: torch.dtype) -> None:
    for kind in ("gaussian", "any bits", "sparse"):
        x, want = sample(kind, name, dtype, 500_001)
        wire = encode(name, x)
        same_bits(wire, want)
        same_bits(decode(name, wire, x.numel(), dtype), x)
        total = torch.randn(x.numel())
        expected = total + x.float()
        native(name).decode_add(wire, total, encoded=dtype)
        torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_every_pattern_of_16_bits_comes_back(name: str, dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(0)
    patterns = torch.randperm(1 << 16).to(torch.int32).to(torch.int16).view(torch.uint8)
    x = patterns.view(dtype)
    wire = encode(name, x)
    same_bits(wire, reference(name).encode(x))
    same_bits(decode(name, wire, x.numel(), dtype), x)
    # Sorted, so that exponents fit their block's base and exp3 codes them.
    x = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.uint8).view(dtype)
    wire = encode(name, x)
    assert wire.numel() < x.nbytes
    same_bits(decode(name, wire, x.numel(), dtype), x)


@pytest.mark.parametrize("by", [1, 2, 3, 7])
def test_addresses_may_be_misaligned(by: int) -> None:
    for name, dtype in LOSSLESS:
        for numel in FEW_SIZES:
            x, want = sample("gaussian", name, dtype, numel)
            capacity = native(name).max_wire_bytes(numel, dtype)
            held, out = misaligned(x, by), misaligned(torch.zeros_like(x), by)
            wire = misaligned(torch.zeros(capacity, dtype=torch.uint8), by)
            x_at, wire_at, out_at, number = held.data_ptr(), wire.data_ptr(), out.data_ptr(), NUMBER[dtype]
            spec = CodecSpec(name)
            codec = _native.Lossless(spec.family, FAMILIES[spec.family].parameters(spec, "float32"))
            size = codec.encode(x_at, number, numel, wire_at, capacity, 1)
            codec.decode(wire_at, size, numel, number, out_at, number, False, 1)
            assert torch.equal(wire[:size], want)
            assert torch.equal(out, x.view(torch.uint8))


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_adds_in_fp32(name: str, dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(1)
    for numel in FEW_SIZES:
        x, total = KINDS["few values"](dtype, numel), torch.randn(numel)
        expected = total + x.float()
        native(name).decode_add(native(name).encode(x), total, encoded=dtype)
        torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_other_bytes_may_follow_a_message(name: str, dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(2)
    for kind in ("gaussian", "any bits"):
        x = KINDS[kind](dtype, 3000)
        wire = torch.cat((native(name).encode(x), torch.full((37,), POISON, dtype=torch.uint8)))
        same_bits(decode(name, wire, x.numel(), dtype), x)


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_refuses_what_the_reference_refuses(name: str, dtype: torch.dtype) -> None:
    torch.default_generator.manual_seed(3)
    numel = 1100
    for kind in ("gaussian", "any bits", "sparse"):
        wire = native(name).encode(KINDS[kind](dtype, numel))
        broken = [wire[:size] for size in (0, 4, 8, 12, wire.numel() // 2, wire.numel() - 1)]
        broken += [with_word(wire, at, value) for at in (0, 1) for value in (0, 1, 2, 3, 0x7FFFFFFF, 0xFFFFFFFF)]
        words = wire.numel() // 4
        broken += [with_word(wire, 1, words - 1), with_word(torch.cat((wire, wire[:4])), 1, words + 1)]
        for message in broken:
            for codec in (native(name), reference(name)):
                with pytest.raises(WireError, match=f"^{CodecSpec(name).family}: "):
                    codec.decode(message, numel, dtype)
        for other in (numel - 600, numel + 600):
            for codec in (native(name), reference(name)):
                with pytest.raises(WireError, match=f"^{CodecSpec(name).family}: "):
                    codec.decode(wire, other, dtype)


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_mutated_messages_do_no_harm(name: str, dtype: torch.dtype) -> None:
    """They decode, or are refused, as the reference does it."""
    generator = torch.Generator().manual_seed(4)
    torch.default_generator.manual_seed(4)

    def number(below: int) -> int:
        return int(torch.randint(0, below, (1,), generator=generator))

    refused = 0
    for run in range(400):
        numel = 1 + number(1500)
        x = KINDS[("gaussian", "sparse", "all exponents")[run % 3]](dtype, numel)
        wire = native(name).encode(x)
        for _ in range(1 + number(3)):
            # Half of the changes go to the first bytes, where sizes, bitmaps and counts are.
            at = number(min(wire.numel(), 64 if run % 2 else wire.numel()))
            wire[at] = number(256)
        wire = wire[: number(wire.numel() + 1)] if run % 5 == 0 else wire
        try:
            got = decode(name, wire, numel, dtype)
        except WireError:
            refused += 1
            if run % 8 == 0:
                with pytest.raises(WireError):
                    reference(name).decode(wire, numel, dtype)
            continue
        if run % 8 == 0:
            same_bits(got, reference(name).decode(wire, numel, dtype))
    assert refused > 0


def test_any_bytes_after_a_header_do_no_harm() -> None:
    torch.default_generator.manual_seed(5)
    # What messages of a codec begin with: those of tensors that compress, and of those that do not.
    headers = sorted(
        {
            (name, int(encode(name, KINDS[kind](dtype, 4096)).view(torch.int32)[0]))
            for name, dtype in LOSSLESS
            for kind in ("any bits", "constant")
        }
    )
    for run in range(600):
        name, magic = headers[run % len(headers)]
        numel = int(torch.randint(1, 2000, (1,)))
        wire = torch.randint(0, 256, (8 + 4 * int(torch.randint(0, 1200, (1,))),), dtype=torch.uint8)
        wire = with_word(with_word(wire, 0, magic), 1, wire.numel() // 4)
        try:
            decode(name, wire, numel, torch.bfloat16)
        except WireError as error:
            assert str(error).startswith(f"{CodecSpec(name).family}: ")  # noqa: PT017  (either outcome is right)


@pytest.mark.parametrize("stride", [2, 5, 16, 17, 31, 32])
def test_strides_have_the_references_bytes_and_shorten_records(stride: int) -> None:
    name = f"mpc:{stride}"
    torch.default_generator.manual_seed(stride)
    for numel in FEW_SIZES:
        # Records of unlike places, each of which changes little from record to record.
        x = (torch.arange(numel) % stride) * 1000.0 + torch.randint(0, 4, (numel,)) * 0.25
        wire = native(name).encode(x)
        assert torch.equal(wire, reference(name).encode(x))
        same_bits(decode(name, wire, numel, torch.float32), x)
        if numel > 2000 and stride > 2:
            assert wire.numel() < 0.8 * native("mpc").encode(x).numel()


def test_a_message_of_another_stride_is_refused() -> None:
    wire = native("mpc:3").encode(torch.randn(100))
    for name in ("mpc", "mpc:4"):
        for codec in (native(name), reference(name)):
            with pytest.raises(WireError, match=r"mpc: a message starts with 0x3.43504d, this one with 0x3343504d"):
                codec.decode(wire, 100, torch.float32)
