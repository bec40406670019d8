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
from tests.codecs.process import own_process
from tests.codecs.samples import dtype_for, of_every_family

from thinwire import codecs
from thinwire.errors import UsageError

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

TARGETS = {
    "ampere": ("cuda", 80, 32),
    "hopper": ("cuda", 90, 32),
    "mi300": ("hip", "gfx942", 64),
}
FEW = of_every_family(["int4:256,hadamard", "int8:tensor", "zfp:25"])  # of every kernel the longer form
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
    compiled = compiler(compile_codecs, "hopper", FEW, [torch.float32], [4100], False)
    assert set(compiled) == launched()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ampere", "mi300"])
def test_every_kernel_compiles_for_other_gpus(compiler: Callable[..., Any], target: str) -> None:
    compiled = compiler(compile_codecs, target, FEW, [torch.float32], [4100], True)
    assert set(compiled) == launched()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, *MANY])
def test_every_codec_compiles(compiler: Callable[..., Any], name: str) -> None:
    # A length of 1 is a constant to the compiler, and other lengths are not.
    assert compiler(compile_codecs, "hopper", [name], [torch.float32], [1, 4100], True)
    assert compiler(compile_codecs, "hopper", [name], [torch.bfloat16], [8192], True)
    assert compiler(compile_codecs, "hopper", [name], [torch.float16], [4100], False)


def compile_codecs(
    target: str, names: list[str], dtypes: list[torch.dtype], lengths: list[int], fused: bool
) -> list[str]:
    """Call everything that codecs can do; names of the kernels that were compiled for it."""
    import triton
    from triton.backends.compiler import GPUTarget

    from thinwire.codecs.triton import launch

    kernels: list[str] = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, warmup=True, **kwargs)
        assert {"cubin", "hsaco"} & set(kernel.asm), f"{self.__name__} is no machine code"
        assert not kernel.metadata.enable_fp_fusion, f"{self.__name__} fuses products and sums"
        assert ".ftz" not in kernel.asm.get("ptx", ""), f"{self.__name__} takes denormal values for zero"
        kernels.append(self.__name__)

    triton.runtime.driver.set_active(_Driver(GPUTarget(*TARGETS[target])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
        patch.setattr(launch, "INTERPRETED", True)  # tensors of the CPU are welcome
        # What a kernel would have written is zeros: messages of zeros, which are the ones used here, need no more.
        patch.setattr(torch, "empty", torch.zeros)
        for name, dtype, numel in itertools.product(names, dtypes, lengths):
            _call_everything(name, dtype_for(name) if dtype_for(name) != torch.float32 else dtype, numel, fused)
    return kernels


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


class _Driver:
    """As much of a GPU as it takes to compile for it."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        return self.target.arch  # compiled kernels are kept by device

    def get_current_stream(self, device: Any) -> int:
        return 0


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
