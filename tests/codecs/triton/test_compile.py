"""The Triton kernels compile for GPUs that are not here: down to machine code, nothing fused, denormals kept.

The interpreter runs Python, so it accepts much that the compiler does not. Kernels are compiled as they are launched,
with the types, alignments and constants of real calls, in a process of its own without the interpreter.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.codecs.gpu_compile import compile_only
from tests.support.codecs.process import own_process
from tests.support.codecs.samples import dtype_for, of_every_family

from thinwire import codecs
from thinwire.codecs.triton.warmup import warm_up
from thinwire.errors import UsageError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FEW = of_every_family(["int4:256,hadamard", "int8:tensor", "zfp:25", "mpc", "mpc:3"])  # of every kernel the longer form
MANY = [
    *("none", "bf16", "fp16", "int8:256", "int4:256,stochastic", "int4:tensor", "int2:32", "int3:24", "int7:24"),
    *("int4:4104", "int8:8192,hadamard", "zfp:2.25", "zfp:10", "zfp:24", "zfp:31.8"),
]


def launched() -> set[str]:
    """Names of the kernels that the source launches: the first arguments of ``launch``."""
    sources = (Path(codecs.__file__).parent / "triton").glob("*.py")
    return {name for path in sources for name in re.findall(r"\blaunch\(\s*(_\w+),", path.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    cache = str(tmp_path_factory.mktemp("triton"))
    with own_process(TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache) as call:
        yield call


@pytest.mark.slow
def test_every_kernel_compiles(compiler: Callable[..., Any]) -> None:
    compiled = compiler(compile_codecs, "sm_90", FEW, [torch.float32], [4100], False)
    assert set(compiled) == launched()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_every_kernel_compiles_for_other_gpus(compiler: Callable[..., Any], target: str) -> None:
    compiled = compiler(compile_codecs, target, FEW, [torch.float32], [4100], True)
    assert set(compiled) == launched()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, *MANY])
def test_every_codec_compiles(compiler: Callable[..., Any], name: str) -> None:
    # A length of 1 is a constant to the compiler, and other lengths are not.
    assert compiler(compile_codecs, "sm_90", [name], [torch.float32], [1, 4100], True)
    assert compiler(compile_codecs, "sm_90", [name], [torch.bfloat16], [8192], True)
    assert compiler(compile_codecs, "sm_90", [name], [torch.float16], [4100], False)


def compile_codecs(
    target: str, names: list[str], dtypes: list[torch.dtype], lengths: list[int], fused: bool
) -> list[str]:
    """Call everything that codecs can do; names of the kernels that were compiled for it."""
    kernels: list[str] = []

    def check(name: str, kernel: Any, programs: int) -> None:
        assert {"cubin", "hsaco"} & set(kernel.asm), f"{name} is no machine code"
        assert not kernel.metadata.enable_fp_fusion, f"{name} fuses products and sums"
        assert not _in_32_bits(kernel.asm["ttir"]), f"{name} computes addresses in 32 bits"
        assert ".ftz" not in kernel.asm.get("ptx", ""), f"{name} takes denormal values for zero"
        kernels.append(name)

    with compile_only(target, check):
        for name, dtype, numel in itertools.product(names, dtypes, lengths):
            _call_everything(name, dtype_for(name) if dtype_for(name) != torch.float32 else dtype, numel, fused)
    return kernels


def _in_32_bits(ttir: str) -> list[str]:
    """Where a program's number is used before it has 64 bits, except as a distance from a pointer: 32 bits overflow
    in tensors of over 2^31 values, which no other test has here. The seed of a row is a hash of 32 bits."""
    numbers = re.findall(r"(%\w+) = tt\.get_program_id", ttir)
    used = [line for line in ttir.splitlines() if any(re.search(rf"{number}\b", line) for number in numbers)]
    harmless = r"tt\.get_program_id|arith\.extsi|tt\.addptr|arith\.(shrui|xori|cmpi)"
    return [line for line in used if not re.search(harmless, line)]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["_transcode", "_expand"])
def test_threads_wait_before_they_write_what_others_read(compiler: Callable[..., Any], kernel: str) -> None:
    compiler(check_barrier, kernel)


def check_barrier(wanted: str) -> None:
    """The interpreter runs one thread, and racecheck looks at shared memory, so a missing barrier shows here only."""
    found: list[str] = []
    with compile_only("sm_90", lambda name, kernel, _: found.append(kernel.asm["ttgir"]) if name == wanted else None):
        x = torch.zeros(1 << 13, dtype=torch.bfloat16)
        if wanted == "_expand":
            codecs.get("exp3", backend="triton").decode(codecs.get("exp3").encode(x), x.numel(), x.dtype)
        else:
            codecs.get("int8:256", backend="triton").encode_feedback(x, torch.zeros(1 << 13), gain=0.5, seed=1)
    assert len(found) == 1
    before, *after = re.split(r"(?:gpu|ttg)\.barrier\b", found[0])
    assert len(after) == 1, "there is no barrier, or more than one"
    assert "tt.store" in after[0]
    assert "tt.load" in before
    # Of the loss, all is read before; of what other threads have written, nothing is written before.
    assert "tt.load" not in after[0] if wanted == "_transcode" else "tt.store" in before


def _call_everything(name: str, dtype: torch.dtype, numel: int, fused: bool) -> None:
    codec, to = codecs.get(name, backend="triton"), codecs.get("int8:96", backend="triton")
    x = torch.zeros(3 * numel, dtype=dtype)
    wires = codecs.get(name, backend="reference").encode_slices(x, [(0, numel), (0, numel)], seed=1)
    wire = wires[0, : codec.max_wire_bytes(numel, dtype)]
    codec.encode(x[:numel], seed=1)
    codec.decode(wire, numel, dtype)
    codec.decode_add(wire, torch.zeros(numel), encoded=dtype)
    if not fused:
        return
    codec.encode(x[1 : numel + 1], seed=1)
    codec.encode_slices(x, [(0, numel), (numel, 2 * numel)], seed=1)
    codec.encode_slices(x, [(0, numel), (2 * numel, 3 * numel), (numel, numel)], seed=1)
    for out in (torch.float32, torch.bfloat16, torch.float16):
        codec.decode_sum(wires, numel, out, scale=0.5, encoded=dtype)
    codec.decode_sum_encode(wires, numel, to, encoded=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8:256"])
def test_a_warm_up_leaves_nothing_to_compile(compiler: Callable[..., Any], name: str) -> None:
    compiler(check_warm_up, name)


def check_warm_up(name: str) -> None:
    codec, dtype = codecs.get(name, backend="triton"), dtype_for(name)
    seen: list[set[str]] = [set(), set()]
    with compile_only("sm_90", lambda kernel, code, _: seen[0].add(f"{kernel} {code.hash}")):
        warm_up([codec], [dtype, torch.float32], "cpu", messages=(2, 4))
    with compile_only("sm_90", lambda kernel, code, _: seen[1].add(f"{kernel} {code.hash}")):
        x = torch.zeros(4 * 2048, dtype=dtype)
        wires = codec.encode_slices(x, [(i * 2048, (i + 1) * 2048) for i in range(4)])
        codec.decode_slices(wires, x.view(4, 2048), encoded=dtype)
        codec.decode_sum(wires, 2048, scale=1 / 4, encoded=dtype)
        wire = codec.encode(torch.zeros(1 << 16, dtype=dtype))
        codec.decode(wire, 1 << 16, dtype)
    assert seen[1]
    assert seen[1] <= seen[0]


@pytest.mark.slow
def test_tensors_that_kernels_cannot_reach_are_refused(compiler: Callable[..., Any]) -> None:
    compiler(check_cpu_is_refused)


def check_cpu_is_refused() -> None:
    for name in of_every_family(["int8:256", "bf16", "zfp:8"]):
        codec = codecs.get(name, backend="triton")
        x = torch.zeros(8, dtype=torch.bfloat16)
        with pytest.raises(UsageError, match="works on GPU tensors"):
            codec.encode(x)
        with pytest.raises(UsageError, match="works on GPU tensors"):
            codec.decode(codecs.get(name).encode(x), 8, torch.bfloat16)
