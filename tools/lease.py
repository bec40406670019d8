"""Packs the GPU check for a machine without network that is lent for minutes.

    python tools/lease.py build/lease
    python tools/lease.py build/lease --python 3.12

The folder gets the part of the tree that the check runs, wheels of what such a machine lacks (for its Python, fetched
here), thinwire's own wheel, and ``start.py``. The wheel is built by an interpreter of that release if this machine has
one; without, the other machine builds it. Printed last is the one command that runs there.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

LACKING = (
    "annotated-types", "iniconfig", "pluggy", "pydantic", "pydantic-core", "pytest", "pytest-timeout", "tomli-w",
    "typing-extensions", "typing-inspection", "zfpy", "zlib-ng",
)  # fmt: skip
"""What a machine with PyTorch, Triton and transformers usually lacks, or has too old, with all that it needs."""

TREE = (
    "bench/src",
    "benchmarks",
    "csrc",
    "src",
    "tests",
    "docs/gpu.md",
    "docs/results/gpu",
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
)
FILES = ("pyproject.toml", *TREE)

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST = 60 << 20
"""Bytes that may travel."""


def main() -> None:
    """Pack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="release of Python on the other machine")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    wheels = options.folder / "wheels"
    wheels.mkdir(parents=True)
    _copy_tree(options.folder / "tree")
    shutil.copy(ROOT / "benchmarks" / "gpu" / "start.py", options.folder)
    _download(options.python, wheels)
    if (interpreter := _interpreter(options.python)) is None:
        print(f"no Python {options.python} here: the other machine builds thinwire's wheel, in about a minute")
    else:
        _build(interpreter, wheels)
    sizes = {path: path.stat().st_size for path in options.folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    print(f"{len(list(wheels.iterdir()))} wheels, {total / (1 << 20):.1f} MiB in {options.folder}")
    if total > MOST:
        largest = max(sizes, key=sizes.__getitem__)
        raise SystemExit(f"that is more than {MOST >> 20} MiB; the largest file is {largest}")
    print("run there, with Python's packages for PyTorch on the path:")
    print(f"    python3 {options.folder}/start.py --minutes 8.5 --out results")


def _copy_tree(target: Path) -> None:
    """The files of the working tree that the check needs, those that are not committed yet included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FILES],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / "docs" / "results" / "gpu").mkdir(parents=True, exist_ok=True)


def _download(python: str, wheels: Path) -> None:
    """Fetch what the other machine lacks, in the releases that the tests here run with."""
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in LACKING]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _run([*command, "--dest", str(wheels), *wanted])


def _interpreter(python: str) -> str | None:
    """An interpreter of a release on this machine, the running one or one that the search path or pyenv has."""
    roots = (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob(f"{python}.*/bin/python3")
    for candidate in (sys.executable, shutil.which(f"python{python}"), *map(str, sorted(roots))):
        release = "import sys; print('%d.%d' % sys.version_info[:2])"
        if candidate and _output([candidate, "-c", release]).strip() == python:
            return candidate
    return None


def _build(interpreter: str, wheels: Path) -> None:
    """Build thinwire's wheel. Where the running interpreter builds it, what it has compiled already is not compiled
    again."""
    with tempfile.TemporaryDirectory() as directory:
        if interpreter == sys.executable:
            options = ["--no-build-isolation", "--config-settings=build-dir=build/editable"]
            options += ["--config-settings=cmake.define.THINWIRE_WERROR=ON"]
            builder = interpreter
        else:
            builder = f"{directory}/venv/bin/python"
            _run([interpreter, "-m", "venv", f"{directory}/venv"])
            options = []
        command = [builder, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", *options]
        _run([*command, "--wheel-dir", str(wheels), str(ROOT)])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout


if __name__ == "__main__":
    main()
