"""Clang compiles the native codecs without a warning, and its build writes the same bytes as GCC's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nanobind
import pytest
from tests.support.codecs.building import build, run
from tests.support.paths import ROOT

SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*.cpp") if not path.name.startswith("bind"))
CLANG = shutil.which("clang++")
COMPILER = ["-DCMAKE_CXX_COMPILER=clang++"]

pytestmark = pytest.mark.skipif(CLANG is None, reason="clang++ is not installed")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.relative_to(ROOT / "csrc").as_posix())
def test_no_warning(source: Path, tmp_path: Path) -> None:
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-DTHINWIRE_LIBFUZZER"]
    native = os.uname().machine == "x86_64"
    flags += ["-DTHINWIRE_X86_64"] * native
    vbmi = [f"-mavx512{name}" for name in ("vbmi", "vbmi2", "vnni", "bitalg")]
    forms: list[list[str]] = []
    if source.parent.name != "kernels":  # compiled once
        forms.append([])
    if source.parent.name in {"kernels", "codecs"}:  # compiled for each instruction set
        forms.append(["-DTHINWIRE_TARGET=baseline"])
        forms += [["-DTHINWIRE_TARGET=sse4", "-march=x86-64-v2"]] * native
        forms += [["-DTHINWIRE_TARGET=avx2", "-march=x86-64-v3"]] * native
        forms += [["-DTHINWIRE_TARGET=avx512", "-march=x86-64-v4"]] * native
        forms += [["-DTHINWIRE_TARGET=avx512vbmi", "-march=x86-64-v4", "-mgfni", *vbmi]] * native
    names = [path.stem for path in SOURCES if path.parent.name == "codecs"]
    (tmp_path / "codec_list.inc").write_text("".join(f"THINWIRE_CODEC({name})\n" for name in names))
    for form in forms:
        run("clang++", "-fsyntax-only", *flags, *form, f"-I{ROOT / 'csrc'}", f"-I{tmp_path}", source)


@pytest.mark.slow
def test_same_bytes(tmp_path: Path) -> None:
    python = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    build(tmp_path, *COMPILER, *python)
    (module,) = tmp_path.glob("csrc/_native*.so")
    tests = [
        "tests/golden/test_wire_format.py",
        "tests/codecs/test_backends.py",
        "tests/codecs/cpp/test_lossless.py",
    ]
    output = run(
        sys.executable, "-m", "pytest", "-q", "-p", "native_module", *tests,
        THINWIRE_NATIVE_MODULE=str(module),
        PYTHONPATH=str(ROOT / "tests/support/codecs"),
    )  # fmt: skip
    assert " passed" in output
    assert "failed" not in output


def require_sanitizers(directory: Path) -> None:
    """Skip where Clang has no fuzzer and sanitizers to link: Debian packs them apart from the compiler."""
    source = directory / "fuzz.cpp"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
    command = ["clang++", "-fsanitize=fuzzer,address,undefined", str(source), "-o", str(directory / "fuzz")]
    linked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if linked.returncode != 0 and "libclang_rt" in linked.stderr:
        version = subprocess.run(["clang++", "-dumpversion"], capture_output=True, text=True, timeout=60, check=True)
        major = version.stdout.partition(".")[0]
        pytest.skip(f"Clang's sanitizers are not installed: apt-get install libclang-rt-{major}-dev")


@pytest.mark.slow
def test_libfuzzer_finds_nothing(tmp_path: Path) -> None:
    require_sanitizers(tmp_path)
    sanitizers = "address,undefined,float-cast-overflow"
    build(tmp_path, *COMPILER, "-DTHINWIRE_PYTHON=OFF", "-DTHINWIRE_FUZZ=ON", f"-DTHINWIRE_SANITIZE={sanitizers}")
    output = run(tmp_path / "csrc/thinwire_fuzz", "-max_total_time=10", "-max_len=4096")
    # The number of features grows only where the code is instrumented for coverage.
    assert " ft: " in output
