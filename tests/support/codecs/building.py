"""Other builds of the native codecs than the one that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

__all__ = ["build", "run"]


def run(*command: str | Path, timeout: float = 500, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def build(directory: Path, *options: str) -> None:
    """Configure and build, warnings as errors."""
    tools = Path(sys.executable).parent
    ninja = tools / "ninja"
    run(
        tools / "cmake", "-S", ROOT, "-B", directory, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        "-DTHINWIRE_WERROR=ON", *options,
    )  # fmt: skip
    run(ninja, "-C", directory)
