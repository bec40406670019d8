"""ARM: GCC and Clang compile the codecs without a warning, and each target writes and reads the same bytes in QEMU."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.codecs.building import build
from tests.support.codecs.samples import mixture, same
from tests.support.codecs.wire_format import CODECS, FILE, tensor
from torch import Tensor

from thinwire import codecs
from thinwire.codecs.seeds import fold_seed
from thinwire.spec import CodecSpec
from thinwire.spec.codec import DTYPES, FAMILIES, encodable_dtypes

TRIPLE = "aarch64-linux-gnu"
COMPILERS = {
    "gcc": [f"-DCMAKE_CXX_COMPILER={TRIPLE}-g++"],
    "clang": ["-DCMAKE_CXX_COMPILER=clang++", f"-DCMAKE_CXX_COMPILER_TARGET={TRIPLE}"],
}
NEEDED = [f"{TRIPLE}-g++", "qemu-aarch64"]
TARGETS = ["baseline", "neon", "sve"]
SEED = 1234567890123

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, NEEDED)), reason="apt-get install g++-aarch64-linux-gnu qemu-user for this test"
    ),
]


def job(name: str, x: Tensor) -> bytes:
    """A job of ``thinwire_messages``."""
    spec = CodecSpec(name)
    family, dtype = FAMILIES[spec.family], str(x.dtype).removeprefix("torch.")
    numbers = [DTYPES.index(dtype), x.numel(), fold_seed(SEED), *family.parameters(spec, dtype)]
    return f"{family.module} {' '.join(map(str, numbers))}\n".encode() + x.view(torch.uint8).numpy().tobytes()


def answers(program: Path, jobs: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor, str, Tensor, Tensor]]:
    """Of each job and target: name, values, target, message, and the values that it decodes to."""
    done = subprocess.run(
        ["qemu-aarch64", "-cpu", "max", "-L", f"/usr/{TRIPLE}", program],
        input=b"".join(job(name, x) for name, x in jobs),
        capture_output=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    output = bytearray(done.stdout)
    for name, x in jobs:
        for _ in TARGETS:
            end = output.index(b"\n")
            target, nbytes = output[:end].decode().split()
            sizes = [end + 1, int(nbytes), x.numel() * x.element_size()]
            _, wire, values = (output[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(3))
            del output[: sum(sizes)]
            yield name, x, target, torch.frombuffer(wire, dtype=torch.uint8), torch.frombuffer(values, dtype=x.dtype)
    assert not output


def dtypes_of(name: str) -> list[torch.dtype]:
    return [getattr(torch, dtype) for dtype in DTYPES if dtype in encodable_dtypes(CodecSpec(name))]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_same_bytes(compiler: str, tmp_path: Path) -> None:
    if compiler == "clang" and shutil.which("clang++") is None:
        pytest.skip("clang++ is not installed")
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    build(tmp_path, *system, *COMPILERS[compiler], "-DTHINWIRE_PYTHON=OFF", "-DTHINWIRE_MESSAGES=ON")
    program = tmp_path / "csrc/thinwire_messages"
    golden = json.loads(FILE.read_text())
    seen = set()
    for name, x, target, wire, values in answers(program, [(n, tensor(d)) for n in CODECS for d in dtypes_of(n)]):
        dtype = str(x.dtype).removeprefix("torch.")
        digest = hashlib.sha256(wire.numpy().tobytes()).hexdigest()[:16]
        assert golden[f"{name} {dtype}"] == f"{wire.numel()} bytes, sha256 {digest}", target
        assert same(values, codecs.get(name, backend="cpp").decode(wire, x.numel(), x.dtype)), (name, dtype, target)
        seen.add(target)
    assert seen == set(TARGETS)
    # Blocks of every kind, so many that they are encoded together.
    several = [
        (name, mixture(20_000, dtype, poisoned=True))
        for name in ("int8:256", "int4:256", "int4:1024,hadamard", "int3:128", "int5:256", "int4:tensor")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    for name, x, target, wire, values in answers(program, several):
        codec = codecs.get(name, backend="cpp")
        assert torch.equal(wire, codec.encode(x, seed=SEED)), (name, x.dtype, target)
        assert same(values, codec.decode(wire, x.numel(), x.dtype)), (name, x.dtype, target)
