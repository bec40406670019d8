"""Deltas: the reference's bytes, every bit pattern back, and no result from a wrong tensor or message."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.codecs import delta_reference as reference
from tests.support.codecs.steps import bits, trained, whole
from torch import Tensor

from thinwire.codecs import registry
from thinwire.codecs.delta import NUMBERS, Delta
from thinwire.errors import SpecError, UsageError, WireError

DTYPES = list(NUMBERS)
LENGTHS = [0, 1, 2, 63, 64, 65, 127, 1000, 1024, 1025, 3001]
POISON = 0xA5

Pair = tuple[Tensor, Tensor]


def any_bits(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def few_changed(numel: int, dtype: torch.dtype) -> Pair:
    """Any old bits, of which few change: NaNs, infinities and zeros as well."""
    old = any_bits(numel, dtype, 1)
    changed = torch.arange(numel) % 37 == 5
    return old, torch.where(changed, bits(any_bits(numel, dtype, 2)), bits(old)).view(dtype)


def special(numel: int, dtype: torch.dtype) -> Pair:
    numbers = torch.tensor([0.0, -0.0, 1.0, float("nan"), float("inf"), -float("inf"), 1e-40, 2.0**-16]).to(dtype)
    index = torch.arange(numel)
    return numbers[index % 8], numbers[index * 5 // 7 % 8]


KINDS: dict[str, Callable[[int, torch.dtype], Pair]] = {
    "none changed": lambda numel, dtype: (any_bits(numel, dtype),) * 2,
    "all changed": lambda numel, dtype: (x := trained(numel, dtype, 0.0)[0], (bits(x) + 1).view(dtype)),
    "unlike": lambda numel, dtype: (any_bits(numel, dtype, 1), any_bits(numel, dtype, 2)),
    "few changed": few_changed,
    "special": special,
    "integers": whole,
    "1e-5": lambda numel, dtype: trained(numel, dtype, 1e-5),
    "1e-2": lambda numel, dtype: trained(numel, dtype, 1e-2),
}


@functools.cache
def sample(kind: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Old and new values, and the reference's message."""
    old, new = KINDS[kind](numel, dtype)
    return old, new, reference.encode(old, new, block=1024)


def same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))


def round_trip(old: Tensor, new: Tensor, block: int) -> Tensor:
    """The message, once what is around it and around its result has stayed as it is."""
    delta = Delta(block)
    room = torch.full((delta.max_wire_bytes(old.numel(), old.dtype) + 64,), POISON, dtype=torch.uint8)
    message = delta.encode(old, new, out=room)
    assert room[-64:].eq(POISON).all()
    out = torch.full((new.nbytes + 64,), POISON, dtype=torch.uint8)
    same_bits(delta.apply(old, message, out[: new.nbytes].view(new.dtype)), new)
    assert out[-64:].eq(POISON).all()
    return message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("target")
def test_writes_the_bytes_of_the_reference(dtype: torch.dtype, kind: str) -> None:
    for numel in LENGTHS if kind in {"few changed", "1e-5"} else LENGTHS[::3]:
        old, new, message = sample(kind, numel, dtype)
        assert torch.equal(round_trip(old, new, 1024), message)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_reads_what_it_writes(dtype: torch.dtype, kind: str) -> None:
    for numel in LENGTHS[::3]:
        old, new, message = sample(kind, numel, dtype)
        same_bits(reference.apply(old, message), new)


@pytest.mark.usefixtures("threads")
def test_threads_write_the_same_bytes() -> None:
    old, new = trained(100_001, torch.bfloat16, 1e-5)
    assert torch.equal(round_trip(old, new, 1 << 14), reference.encode(old, new, block=1 << 14))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_pattern_of_16_bits_turns_into_others(dtype: torch.dtype) -> None:
    old = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(dtype)
    for new in (old.flip(0), (bits(old) ^ 1).view(dtype), (bits(old) ^ -(1 << 15)).view(dtype)):
        round_trip(old, new, 1 << 16)


def test_a_step_over_zero_is_short() -> None:
    """Zeros of both signs are neighbours, and so are the numbers on both sides of them."""
    old = torch.zeros(1024, dtype=torch.bfloat16)
    assert Delta().encode(old, -old).numel() < 1024 // 8 + 100


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 300),
    st.binary(min_size=1, max_size=40),
    st.binary(min_size=1, max_size=40),
    st.integers(1, 40),
)
def test_any_tensors_round_trip(dtype: torch.dtype, numel: int, a: bytes, b: bytes, period: int) -> None:
    def tensor(pattern: bytes) -> Tensor:
        size = numel * dtype.itemsize
        return torch.tensor(list((pattern * (size + 1))[:size]), dtype=torch.uint8).view(dtype)

    old = tensor(a)
    changed = torch.arange(numel) % period == 0
    new = torch.where(changed, bits(tensor(b)), bits(old)).view(dtype)
    message = round_trip(old, new, 64)
    assert torch.equal(message, reference.encode(old, new, block=64))
    same_bits(reference.apply(old, message), new)


def test_shapes_strides_and_gradients_do_not_matter() -> None:
    old, new = (x.view(30, 100) for x in trained(3000, torch.bfloat16, 1e-4))
    message = Delta().encode(old.t().requires_grad_(), new.t())
    result = Delta().apply(old.t(), message)
    assert result.shape == (100, 30)
    same_bits(result, new.t().contiguous())


def test_other_bytes_may_follow_a_message() -> None:
    old, new = trained(3000, torch.bfloat16, 1e-4)
    message = torch.cat((Delta().encode(old, new), torch.full((37,), POISON, dtype=torch.uint8)))
    same_bits(Delta().apply(old, message), new)


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_a_step_takes_little_more_than_its_entropy_given_the_exponents(rate: float) -> None:
    old, new = trained(1 << 17, torch.bfloat16, rate)
    exponent, step = bits(old) >> 7 & 0xFF, bits(new).int() - bits(old).int()
    entropy = 0.0
    for value in exponent.unique():
        count = step[exponent == value].unique(return_counts=True)[1].double()
        entropy -= float((count * (count / count.sum()).log2()).sum())
    assert 8 * Delta().encode(old, new).numel() < 1.08 * entropy


def test_incompressible_blocks_cost_their_size() -> None:
    for dtype in DTYPES:
        old, new = KINDS["unlike"](4096, dtype)
        assert Delta(1024).encode(old, new).numel() <= new.nbytes + 32 + 16 * 4


# ------------------------------------------------------------------------------------------------------- refusals


def refuses(old: Tensor, message: Tensor, match: str = r"^delta: ") -> None:
    with pytest.raises(WireError, match=match):
        Delta().apply(old, message)
    with pytest.raises(WireError, match=match):
        reference.apply(old, message)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_old_tensor_is_refused(dtype: torch.dtype) -> None:
    """Whatever differs: a value that changes, one that does not, or all of them."""
    old, new = KINDS["integers"](3000, dtype)
    message = Delta(1024).encode(old, new)
    for place in (int((bits(old) != bits(new)).nonzero()[3]), int((bits(old) == bits(new)).nonzero()[-1])):
        for flipped in (1, 1 << (8 * dtype.itemsize - 2)):
            other = bits(old).clone()
            other[place] ^= flipped
            refuses(other.view(dtype), message, "the old tensor is not the one that block")
    refuses(torch.zeros_like(old), message, "the old tensor is not the one that block")
    refuses(old[:-1].clone(), message, "3000 values")
    refuses(old.to(torch.float16 if dtype == torch.bfloat16 else torch.bfloat16), message, "values of dtype")


@pytest.mark.parametrize("kind", ["few changed", "1e-5", "unlike", "none changed"])
def test_truncated_messages_are_refused(kind: str) -> None:
    old, new = KINDS[kind](2000, torch.bfloat16)
    message = Delta(1024).encode(old, new)
    for size in [*range(0, 80, 3), message.numel() // 2, message.numel() - 1]:
        refuses(old, message[: min(size, message.numel() - 1)])


def test_every_flipped_bit_is_refused() -> None:
    old, new = trained(1000, torch.bfloat16, 1e-5)
    message = Delta(512).encode(old, new)
    for place in range(8 * message.numel()):
        broken = message.clone()
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(WireError, match=r"^delta: "):
            Delta().apply(old, broken)
        if place % 40 == 0:
            refuses(old, broken)


def resealed(body: bytes, old: Tensor) -> Tensor:
    """A message of one block with right checksums of its bytes, so that the decoder of blocks gets them."""
    head = struct.pack("<IBBBBQQ", 0x4C445754, 1, NUMBERS[old.dtype], 20, 0, old.numel(), 48 + len(body))
    head += struct.pack("<IIQ", len(body), reference.checksum(body) & 0xFFFFFFFF, 0)
    return torch.tensor(list(head + struct.pack("<Q", reference.checksum(head)) + body), dtype=torch.uint8)


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_of_a_block_do_no_harm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    for run in range(60):
        old, new = KINDS["integers" if run % 2 else "few changed"](1 + 31 * run, dtype)
        body = bytearray(Delta(1 << 20).encode(old, new)[48:].numpy().tobytes())
        if run % 3 == 0:
            body = bytearray(torch.randint(0, 256, (old.nbytes // 2,), dtype=torch.uint8, generator=generator).tolist())
        for _ in range(min(len(body), 3)):
            body[int(torch.randint(0, len(body), (1,), generator=generator))] ^= 1 << run % 8
        out = torch.full((old.nbytes + 64,), POISON, dtype=torch.uint8)
        with pytest.raises(WireError, match="the old tensor is not the one that block 0"):
            Delta().apply(old, resealed(bytes(body), old), out[: old.nbytes].view(dtype))
        assert out[-64:].eq(POISON).all()
        if run % 10 == 0:
            refuses(old, resealed(bytes(body), old))


def test_a_refused_message_leaves_the_old_tensor() -> None:
    old, new = trained(3000, torch.bfloat16, 1e-4)
    message, before = Delta(1024).encode(old, new), old.clone()
    message[-1] ^= 1
    refuses(old, message, "damaged in block 2")
    same_bits(old, before)


def test_arguments_are_checked() -> None:
    old, new = trained(100, torch.bfloat16, 1e-4)
    message = Delta().encode(old, new)
    for block in (0, 32, 100, 1 << 21):
        with pytest.raises(UsageError, match="power of two"):
            Delta(block)
    with pytest.raises(UsageError, match="no deltas of"):
        Delta().encode(old.double(), new.double())
    for other in (new[:-1], new.half()):
        with pytest.raises(UsageError, match="new should be of 100 values"):
            Delta().encode(old, other)
    with pytest.raises(UsageError, match="at least"):
        Delta().encode(old, new, out=message[:10])
    with pytest.raises(UsageError, match="message should be"):
        Delta().apply(old, message.float())
    with pytest.raises(UsageError, match="out should be contiguous"):
        Delta().apply(old, message, torch.empty(99, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="share no memory"):
        Delta().apply(old, message, old)


def test_no_plan_can_name_it() -> None:
    with pytest.raises(SpecError):
        registry.get("delta")
