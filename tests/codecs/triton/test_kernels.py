"""The Triton kernels under the interpreter: the reference's bytes and values, and no harm from any message.

The kernels are defined for the interpreter or for a GPU when they are imported. So they are imported in a process of
their own, where every check below runs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.codecs import wire_format
from tests.support.codecs.process import own_process
from tests.support.codecs.samples import (
    LOSSLESS,
    POISON,
    before_a_wall,
    dtype_for,
    mixture,
    of_every_family,
    of_every_fixed_family,
    same,
    with_word,
)
from torch import Tensor

from thinwire import codecs
from thinwire.codecs.codec import Codec
from thinwire.codecs.triton import block
from thinwire.codecs.triton.slices import Slices
from thinwire.codecs.triton.warmup import warm_up
from thinwire.errors import WireError
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

# Few values a tile, for the interpreter's sake, and yet more than one; blocks that are no power of two; every width.
FIXED = of_every_fixed_family(
    [
        *("none", "bf16", "fp16", "zfp:8", "zfp:15.3"),
        *("int8:256", "int4:256", "int4:256,hadamard", "int4:256,stochastic", "int8:64,hadamard,stochastic"),
        *("int8:tensor", "int4:tensor", "int3:24", "int5:128"),
    ]
)
MORE_FIXED = [
    *("zfp:2.25", "zfp:4", "zfp:10", "zfp:16", "zfp:16.25", "zfp:24", "zfp:25", "zfp:32"),
    *("int2:32", "int6:256", "int7:24", "int8:8,hadamard", "int3:2048", "int4:4104", "int8:8192,hadamard"),
    *("int2:8192,hadamard", "int2:tensor", "int7:tensor,stochastic", "int2:32,stochastic"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Interpreter = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with own_process(TRITON_INTERPRET="1") as call:
        yield call


def pair(name: str) -> tuple[Codec, Codec]:
    return codecs.get(name, backend="reference"), codecs.get(name, backend="triton")


def encode(codec: Codec, x: Tensor, *, by: int = 0) -> Tensor:
    """The message, made ``by`` bytes after an aligned address; what is around it must stay as it is."""
    nbytes = codec.max_wire_bytes(x.numel(), x.dtype)
    room = torch.full((nbytes + by + 64,), POISON, dtype=torch.uint8)
    wire = codec.encode(x, seed=5, out=room[by : by + nbytes])
    assert room[:by].eq(POISON).all(), (codec, x.numel(), x.dtype)
    assert room[by + nbytes :].eq(POISON).all(), (codec, x.numel(), x.dtype)
    return wire


def decode(codec: Codec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    room = torch.full((numel * dtype.itemsize + 64,), POISON, dtype=torch.uint8)
    values = codec.decode(wire, numel, dtype, out=room[: numel * dtype.itemsize].view(dtype))
    assert room[numel * dtype.itemsize :].eq(POISON).all(), (codec, numel, dtype)
    return values


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIXED, *MORE_FIXED])
def test_many_lengths(interpreter: Interpreter, name: str) -> None:
    lengths = [1, 2, 3, 7, 1023, 1030] if name.startswith("zfp") else [1, 3, 10, 33, 257, 1027, 2048, 4099, 8192]
    interpreter(check_fixed, name, DTYPES, lengths)


def check_fixed(name: str, dtypes: list[torch.dtype], lengths: list[int]) -> None:
    reference, codec = pair(name)
    for numel, dtype, poisoned in itertools.product(lengths, dtypes, (False, True)):
        x = mixture(numel, dtype, poisoned=poisoned)
        case = (name, numel, dtype, poisoned)
        wire = reference.encode(x, seed=5)
        assert torch.equal(encode(codec, x), wire), case
        # What a message decodes to does not depend on the dtype that was encoded, except with `none`.
        for to in (dtype,) if name == "none" else DTYPES if dtype == torch.float32 and poisoned else ():
            assert same(decode(codec, wire, numel, to), reference.decode(wire, numel, to)), (*case, to)
        total = torch.linspace(-1, 1, numel)
        wanted = reference.decode_add(wire, total.clone(), encoded=dtype)
        assert same(codec.decode_add(wire, total, encoded=dtype), wanted), case


@pytest.mark.slow
def test_rotated_blocks_of_every_length(interpreter: Interpreter) -> None:
    interpreter(check_rotated, [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192])


def check_rotated(blocks: list[int]) -> None:
    """Blocks of 8 bits, which are rotated back by matrix products: sums as large as codes allow, and ordinary ones."""
    for values in blocks:
        reference, codec = pair(f"int8:{values},hadamard")
        numel = 3 * values + values // 2
        noise = torch.rand(numel, generator=torch.Generator().manual_seed(values)) - 0.5
        for name, x in (("equal", torch.ones(numel)), ("noise", noise)):
            wire = reference.encode(x)
            if name == "equal":
                wire[: 3 * values] = 128  # codes of -128: the first value of a block is the sum of all
            assert same(decode(codec, wire, numel, torch.float32), reference.decode(wire, numel, torch.float32)), (
                name,
                values,
            )


@pytest.mark.parametrize("name", ["int2:2048", "int3:2048", "int4:2048", "int5:4096"])
def test_errors_of_long_blocks_do_not_overflow(interpreter: Interpreter, name: str) -> None:
    interpreter(check_one_sided, name, 4096)


def check_one_sided(name: str, numel: int) -> None:
    reference, codec = pair(name)
    for share in (-1.0, -0.99, 0.74):
        x = torch.full((numel,), share)  # the codes of most values are limited, so their errors are the largest
        x[:: CodecSpec(name).block] = 1.0
        assert torch.equal(encode(codec, x), reference.encode(x, seed=5)), (name, share)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_lossless_messages_of_many_lengths(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    interpreter(
        check_lossless, name, dtype, [*range(1, 70), *range(205, 215), 511, 512, 513, 1024, 1100, 2047, 2049, 20001]
    )


def check_lossless(name: str, dtype: torch.dtype, lengths: list[int]) -> None:
    reference, codec = pair(name)
    for numel in lengths:
        noise = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        sorted_bits = (torch.arange(numel) * 37).to(torch.int16)
        ordered = sorted_bits.view(dtype) if dtype.itemsize == 2 else sorted_bits.float()
        for x in (mixture(numel, dtype, poisoned=True), noise, ordered, torch.zeros(numel, dtype=dtype)):
            wire = encode(codec, x)
            assert torch.equal(wire, reference.encode(x)), (name, dtype, numel)
            back = decode(codec, torch.cat((wire, wire.new_full((37,), POISON))), numel, dtype)
            assert torch.equal(back.view(torch.uint8), x.view(torch.uint8)), (name, dtype, numel)
        total = torch.linspace(-1, 1, numel)
        wire = reference.encode(mixture(numel, dtype, poisoned=True))
        wanted = reference.decode_add(wire, total.clone(), encoded=dtype)
        assert same(codec.decode_add(wire, total, encoded=dtype), wanted), (name, dtype, numel)


@pytest.mark.slow
def test_messages_have_the_bytes_they_always_had(interpreter: Interpreter) -> None:
    assert interpreter(wire_format.checksums, "triton") == json.loads(wire_format.FILE.read_text())


# ------------------------------------------------------------------------------------------------------ fused forms


@pytest.mark.slow
@pytest.mark.parametrize("numel", [1, 1000, 5001])
@pytest.mark.parametrize("name", of_every_family([*FIXED, "int8:8192,hadamard", "int7:24", "zfp:24", "zfp:16"]))
def test_fused_forms_of_every_codec(interpreter: Interpreter, name: str, numel: int) -> None:
    to = [
        "int4:96",
        "int8:96",
        "int8:256,hadamard",
        "int8:tensor",
        "int8:64,stochastic",
        "bf16",
        "none",
        "zfp:9.5",
        "mpc",
    ]
    interpreter(check_fused, name, dtype_for(name), numel, to)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["none", "bf16", "fp16", "int8:256", "zfp:8", "mpc"])
def test_fused_forms_of_narrow_values(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    interpreter(check_fused, name, dtype, 3001, ["int4:256"])


def check_fused(name: str, dtype: torch.dtype, numel: int, to: list[str]) -> None:
    reference, codec = pair(name)
    x = mixture(numel * 3, dtype, poisoned=numel > 1)
    everywhere = [
        [(2 * numel, 3 * numel), (numel, 2 * numel), (0, numel)],
        # In another order, one shorter, one of them empty, one that overlaps others.
        [(2 * numel, 3 * numel), (0, numel), (numel, numel), (numel, 2 * numel - numel // 3), (numel // 2, numel)],
    ]
    for bounds in everywhere:
        want = reference.encode_slices(x, bounds, seed=9)
        got = torch.full_like(want, POISON)
        assert codec.encode_slices(x, bounds, seed=9, out=got).data_ptr() == got.data_ptr()
        for row, (start, stop) in enumerate(bounds):
            used = reference.max_wire_bytes(stop - start, dtype)
            if codec.spec.is_variable_length:
                used = reference.encode(x[start:stop]).numel()
            assert torch.equal(got[row, :used], want[row, :used]), (name, numel, bounds[row])
            # A codec of variable length may use the rest of its slot.
            assert codec.spec.is_variable_length or got[row, used:].eq(POISON).all(), (name, numel, bounds[row])
    rows = reference.encode_slices(x, everywhere[0], seed=9)
    wide = torch.zeros(3, rows.shape[1] + 8, dtype=torch.uint8)[:, 8:].copy_(rows)  # rows at any address
    for wires, wanted in ((rows, (torch.float32, torch.bfloat16)), (wide, (torch.float16,)), (rows[:1], DTYPES[:1])):
        for out in wanted:
            fused = codec.decode_sum(wires, numel, out, scale=1 / 3, encoded=dtype)
            assert same(fused, reference.decode_sum(wires, numel, out, scale=1 / 3, encoded=dtype)), (name, numel, out)
    onto = torch.randn(numel)
    for start, out in ((onto, torch.float32), (onto.bfloat16(), torch.bfloat16), (onto.half(), torch.float32)):
        total = codecs.Sum(rows, numel, start, 1 / 3, dtype)
        made, wanted = (one.decode_sum_into(total, torch.empty(numel, dtype=out)) for one in (codec, reference))
        assert same(made, wanted), (name, numel, start.dtype, out)
    check_slices(name, rows, numel, dtype)
    for target in to:
        between = codec.decode_sum_encode(rows, numel, pair(target)[1], scale=0.5, seed=3, encoded=dtype)
        total = reference.decode_sum(rows, numel, scale=0.5, encoded=dtype)
        goal = pair(target)[0]
        if name.startswith("zfp") and goal.spec.is_lossless:
            # A NaN keeps its sign, which differs between kinds of processors where zfp makes it.
            assert same(goal.decode(between, numel, total.dtype), total), (name, numel, target)
        else:
            assert torch.equal(between, goal.encode(total, seed=3)), (name, numel, target)
        if not pair(target)[0].spec.is_variable_length:
            check_pieces(name, target, numel, dtype)


def check_pieces(name: str, target: str, numel: int, dtype: torch.dtype) -> None:
    """Messages of two members for four pieces. Sums of some pieces, in one launch or not, equal single sums."""
    reference, codec = pair(name)
    goal, to = pair(target)
    x = torch.randn(4 * numel).to(dtype)
    wires = reference.encode_slices(torch.cat([x, x * 2]), [(i * numel, (i + 1) * numel) for i in range(8)], seed=2)
    slot, room = wires.shape[1], goal.slot_bytes(numel, torch.float32)
    rows = wires.view(2, 4 * slot)
    for chosen in ([0, 1, 3], [1, 2, 3], [0, 2], [0, 1, 2, 3], [3, 1]):
        totals = [
            codecs.Sum(rows[:, i * slot : (i + 1) * slot], numel, x[i * numel : (i + 1) * numel], 0.5, dtype)
            for i in chosen
        ]
        got = torch.full((len(chosen), room), POISON, dtype=torch.uint8)
        with mock.patch.object(block, "transcode", wraps=block.transcode) as launched:
            codec.encode_sums(totals, to, list(got), seed=7)
        if (name, target) == ("int8:256", "int8:96"):
            assert launched.call_count == (2 if chosen == [3, 1] else 1)
        want = torch.full((len(chosen), room), POISON, dtype=torch.uint8)
        reference.encode_sums(totals, goal, list(want), seed=7)
        assert torch.equal(got, want), (name, target, numel, chosen)


def check_slices(name: str, rows: Tensor, numel: int, dtype: torch.dtype) -> None:
    reference, codec = pair(name)
    lossless = codec.spec.is_lossless
    for out in {dtype} if lossless else {dtype, torch.float32, torch.bfloat16}:
        start = torch.randn(len(rows), numel).to(out)
        for add in (False, True):
            made, wanted = (
                one.decode_slices(rows, start.clone(), encoded=dtype, add=add) for one in (codec, reference)
            )
            assert same(made.view(-1), wanted.view(-1)), (name, numel, out, add)
        # Added in fp32 and rounded once: decoding to a narrow dtype first would round twice.
        message = rows[1, : reference.max_wire_bytes(numel, dtype)]
        decoded = reference.decode(message, numel, dtype if lossless else torch.float32)
        assert same(wanted[1], (start[1].float() + decoded.float()).to(out)), (name, numel, out)


def test_tables_of_slices_are_kept() -> None:
    """A table that is given back while a kernel of another stream reads it is overwritten, and one that is made again
    makes the host wait."""
    x = torch.zeros(1)
    layouts = [[(0, 1), (7 + index, 9 + index), (3, 4)] for index in range(500)]
    addresses = [Slices.of(bounds, x).table.data_ptr() for bounds in layouts]
    assert len(set(addresses)) == len(layouts)
    assert [Slices.of(bounds, x).table.data_ptr() for bounds in layouts] == addresses


@pytest.mark.slow
@pytest.mark.parametrize("numel", [1, 1000, 5001])
@pytest.mark.parametrize("name", of_every_family([*FIXED, "int8:8192,hadamard", "int7:24"]))
def test_error_feedback_of_every_codec(interpreter: Interpreter, name: str, numel: int) -> None:
    for dtype in DTYPES:
        interpreter(check_feedback, name, dtype, numel)


def check_feedback(name: str, dtype: torch.dtype, numel: int) -> None:
    reference, codec = pair(name)
    if "float32" not in encodable_dtypes(codec.spec):
        return
    x = mixture(numel * 3, dtype, poisoned=numel > 1)
    before = torch.randn(numel * 3)
    alike = [(0, numel), (numel, 2 * numel), (2 * numel, 3 * numel)]
    others = [(2 * numel, 3 * numel), (numel, 2 * numel - numel // 3), (0, 0), (0, numel // 2)]
    for bounds, gain in itertools.product((alike, others), (1.0, 0.1)):
        want_lost, lost = before.clone(), before.clone()
        want = reference.encode_slices_feedback(x, bounds, want_lost, gain=gain, seed=9)
        with mock.patch.object(block, "transcode", wraps=block.transcode) as launched:
            got = codec.encode_slices_feedback(x, bounds, lost, gain=gain, seed=9)
        assert launched.call_count == 1 or codec.spec.per_tensor or not isinstance(codec, block.ValueCodec)
        for row, (start, stop) in enumerate(bounds):
            used = reference.encode((before + x)[start:stop], seed=1).numel()
            assert torch.equal(got[row, :used], want[row, :used]), (name, dtype, numel, bounds[row])
        assert same(lost, want_lost), (name, dtype, numel, gain)
    for by in (0, 8):
        want_lost, lost = before[:numel].clone(), before[:numel].clone()
        wire = reference.encode_feedback(x[:numel], want_lost, gain=0.3, seed=4)
        room = torch.empty(codec.max_wire_bytes(numel, torch.float32) + by, dtype=torch.uint8)[by:]
        assert torch.equal(codec.encode_feedback(x[:numel], lost, gain=0.3, seed=4, out=room), wire), (name, by)
        assert same(lost, want_lost), (name, by)


@pytest.mark.slow
def test_a_warm_up_runs_codecs(interpreter: Interpreter) -> None:
    interpreter(check_warm_up)


def check_warm_up() -> None:
    every = [codecs.get(name, backend="triton") for name in ("bf16", "int8:256", "int8:tensor", "mpc", "exp3")]
    warm_up(every, [torch.bfloat16], "cpu", gain=0.1)


# ------------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("name", of_every_family(["none", "bf16", "int8:256", "int7:24", "int8:tensor", "zfp:8"]))
def test_any_alignment(interpreter: Interpreter, name: str) -> None:
    interpreter(check_alignment, name)


def check_alignment(name: str) -> None:
    dtype = torch.bfloat16 if name == "bf16" else dtype_for(name)
    reference, codec = pair(name)
    x = mixture(601, dtype, poisoned=False)[1:]
    wire = reference.encode(x)
    for by in (1, 2, 8):
        assert torch.equal(encode(codec, x, by=by), wire), (name, by)
        moved = torch.cat((wire.new_zeros(by), wire))[by:]
        out = torch.zeros(601, dtype=dtype)[1:]
        assert same(codec.decode(moved, 600, dtype, out=out), reference.decode(wire, 600, dtype)), (name, by)


def test_empty_and_strided_tensors(interpreter: Interpreter) -> None:
    interpreter(check_empty_and_strided)


def check_empty_and_strided() -> None:
    for name in of_every_family([*FIXED, *MORE_FIXED]):
        codec = codecs.get(name, backend="triton")
        dtype = dtype_for(name)
        wire = codec.encode(torch.empty(0, dtype=dtype), seed=1)
        assert wire.numel() == 0
        assert codec.decode(wire, 0, dtype).numel() == 0
        assert codec.decode_sum(wire.view(1, 0), 0, encoded=dtype).numel() == 0
    codec = codecs.get("int8:256", backend="triton")
    x = torch.randn(20, 30).t()
    assert torch.equal(codec.encode(x), codec.encode(x.contiguous()))


# ------------------------------------------------------------------------------------------------------ bad messages


@pytest.mark.parametrize("name", ["bf16", "int8:256", "int4:tensor", "zfp:8"])
def test_messages_of_another_length_are_refused(interpreter: Interpreter, name: str) -> None:
    interpreter(check_other_lengths, name)


def check_other_lengths(name: str) -> None:
    codec = codecs.get(name, backend="triton")
    wire = codec.encode(torch.randn(300), seed=1)
    for other in (wire[:-1], torch.cat((wire, wire[:16])), wire[:0]):
        with pytest.raises(WireError, match="a message of 300 values has"):
            codec.decode(other, 300, torch.float32)


@pytest.mark.parametrize("name", ["zfp:8", "zfp:15.3"])
def test_any_bytes_decode_as_the_references(interpreter: Interpreter, name: str) -> None:
    interpreter(check_any_bytes, name, [1021])


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(9, 129))
def test_any_bytes_of_every_rate_decode_as_the_references(interpreter: Interpreter, bits: int) -> None:
    interpreter(check_any_bytes, f"zfp:{bits / 4}", [1022])


def check_any_bytes(name: str, lengths: list[int]) -> None:
    reference, codec = pair(name)
    for numel in lengths:
        wire = torch.randint(0, 256, (codec.max_wire_bytes(numel, torch.float32),), dtype=torch.uint8)
        wire[: wire.numel() // 2] &= torch.randint(0, 256, (wire.numel() // 2,), dtype=torch.uint8)  # few ones
        want = reference.decode(wire, numel, torch.float32)
        assert same(codec.decode(before_a_wall(wire), numel, torch.float32), want), (name, numel)


@pytest.mark.parametrize("name", ["zfp:8", "zfp:32"])
def test_values_become_significant_at_any_planes(interpreter: Interpreter, name: str) -> None:
    interpreter(check_significance, name)


def check_significance(name: str) -> None:
    reference, codec = pair(name)
    numel = 1022
    wire = torch.full(((numel + 3) // 4, 16), 255, dtype=torch.uint8)
    for times in range(6):  # ever fewer ones: the values of a block become significant ever further apart
        wire[times::6] = torch.randint(0, 256, wire[times::6].shape, dtype=torch.uint8)
        for _ in range(times):
            wire[times::6] &= torch.randint(0, 256, wire[times::6].shape, dtype=torch.uint8)
    wire[:, 0] = wire[:, 0] | 129  # a block with values, and an exponent that keeps them from being denormals
    x = codecs.get("zfp:32", backend="reference").decode(wire.view(-1), numel, torch.float32)
    assert torch.equal(encode(codec, x), reference.encode(x, seed=5)), name


@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_refuses_what_the_reference_refuses(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    interpreter(check_refusals, name, dtype)


def check_refusals(name: str, dtype: torch.dtype) -> None:
    reference, codec = pair(name)
    numel = 1100
    for x in (
        torch.randn(numel).to(dtype),
        torch.randint(0, 256, (numel * dtype.itemsize,)).to(torch.uint8).view(dtype),
    ):
        wire = reference.encode(x)
        words = wire.numel() // 4
        broken = [wire[:size] for size in (0, 4, 8, 16, wire.numel() // 32 * 16, wire.numel() - 1)]
        broken += [with_word(wire, at, value) for at in (0, 1) for value in (0, 3, 0x7FFFFFFF, 0xFFFFFFFF)]
        broken += [with_word(wire, 1, words - 1), with_word(torch.cat((wire, wire[:4])), 1, words + 1)]
        for message in broken:
            with pytest.raises(WireError, match=f"^{CodecSpec(name).family}: "):
                codec.decode(before_a_wall(message), numel, dtype)
        for other in (numel - 600, numel + 600):
            with pytest.raises(WireError, match=f"^{CodecSpec(name).family}: "):
                codec.decode(before_a_wall(wire), other, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), LOSSLESS)
def test_mutated_messages_do_no_harm(interpreter: Interpreter, name: str, dtype: torch.dtype) -> None:
    interpreter(check_mutations, name, dtype, 500)


def check_mutations(name: str, dtype: torch.dtype, runs: int) -> None:
    """They decode, or are refused, as the reference does it."""
    reference, codec = pair(name)
    generator = torch.Generator().manual_seed(4)

    def number(below: int) -> int:
        return int(torch.randint(0, below, (1,), generator=generator))

    refused = 0
    for run in range(runs):
        numel = 1 + number(3000)
        wire = reference.encode(mixture(numel, dtype, poisoned=False))
        for _ in range(number(3)):
            # Half of the changes go to the first bytes, where sizes, bitmaps and counts are.
            wire[number(min(wire.numel(), 64 if run % 2 else wire.numel()))] = number(256)
        wire = torch.cat((wire, wire.new_full((-wire.numel() % 16,), POISON)))  # stays where it is: see before_a_wall
        wire = wire[: 16 * number(wire.numel() // 16 + 1)] if run % 4 == 0 else wire
        try:
            want = reference.decode(wire, numel, dtype)
        except WireError:
            refused += 1
            with pytest.raises(WireError, match=f"^{CodecSpec(name).family}: "):
                codec.decode(before_a_wall(wire), numel, dtype)
            continue
        got = decode(codec, before_a_wall(wire), numel, dtype)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (name, numel, run)
    assert 0 < refused < runs


@pytest.mark.slow
def test_a_plan_compiles_the_kernels_of_its_codecs(interpreter: Interpreter) -> None:
    interpreter(check_warm_up_of_a_plan)


def check_warm_up_of_a_plan() -> None:
    from thinwire.codecs.triton import transcode
    from thinwire.sharding.params.plan_codecs import PlanCodecs
    from thinwire.spec import Plan

    launched = []
    kernel, cpu = transcode.launch, torch.device("cpu")

    def note(*args: Any, **constants: Any) -> None:
        launched.append(constants)
        kernel(*args, **constants)

    transcode.launch = note
    plan = Plan.preset("zeropp", nodes=2, local=2)
    PlanCodecs.of(plan, cpu, "reference").warm_up(plan, cpu)
    assert not launched
    PlanCodecs.of(plan, cpu, "triton").warm_up(plan, cpu)
    assert {constants["COUNT"] for constants in launched} == {1, 2}
