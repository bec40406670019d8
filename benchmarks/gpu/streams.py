"""Part: what only real streams show. Losses under random delays, and NVIDIA's sanitizers over every kernel.

``python -m benchmarks.gpu.streams DEVICE`` runs every codec once, on a small tensor, beside the reference: the program
that the sanitizers watch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from typing import Final

import torch
from benchmarks.gpu.case import Case, Missing, Report
from benchmarks.gpu.gpu_tests import pytest
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale

from thinwire.codecs import get
from thinwire.spec import CodecSpec
from thinwire.spec.codec import encodable_dtypes
from thinwire_bench.codecs.bench import CODECS
from thinwire_bench.codecs.soundness import check_sample

__all__ = ["cases", "reports_of"]

_SANITIZER: Final = "compute-sanitizer"
_SUMMARY: Final = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?)")
_WATCHED: Final = {
    # Reads past a tensor stay inside the block that torch's allocator has taken, unless it takes none.
    "memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "racecheck": {},
}


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Random delays in lanes first: no other test of real streams makes a missing wait visible."""
    del stack
    delays = [Case("delays", _delays, 80)] if scale.device == "cuda" else []
    return [*delays, *(Case(tool, partial(_sanitized, scale, tool), 70) for tool in _WATCHED)]


def _delays(report: Report) -> Outcome:
    report("training with random delays")
    return pytest(["tests/gpu/test_delays.py"], 1)


def _sanitized(scale: Scale, tool: str, report: Report) -> Outcome:
    """Every kernel of the codecs under a sanitizer."""
    command = [sys.executable, "-m", "benchmarks.gpu.streams", scale.device]
    if scale.device == "cuda":
        if shutil.which(_SANITIZER) is None:
            raise Missing(f"{_SANITIZER} is not on this machine's PATH; CUDA's toolkit has it")
        command = [_SANITIZER, "--tool", tool, "--target-processes", "all", *command]
    report(" ".join(command))
    done = subprocess.run(command, env={**os.environ, **_WATCHED[tool]}, capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{tool}: status {done.returncode}: {text[-3000:]}")
    if scale.device == "cpu":
        return Outcome(notes=("A CPU has no such sanitizer: a rehearsal runs the program alone.",))
    found = reports_of(text)
    return Outcome(checks=(Check(f"{tool} over every kernel", f"{found} reports", "0 reports", found == 0),))


def reports_of(text: str) -> int:
    """Reports that a sanitizer's summary counts.

    Raises:
        RuntimeError: The text holds no summary: the sanitizer has not watched.
    """
    found = _SUMMARY.findall(text)
    if not found:
        raise RuntimeError(f"the sanitizer printed no summary: {text[-2000:]}")
    return sum(int(errors or hazards) for errors, hazards in found)


def main(device: str) -> None:
    """Run every codec in every form once."""
    wanted = CODECS if device == "cuda" else ("int8:256", "exp3")
    for name in wanted:
        codec = get(name, device=torch.device(device))
        for dtype in encodable_dtypes(CodecSpec(name)):
            if problem := check_sample(codec, getattr(torch, dtype), torch.device(device)):
                raise SystemExit(f"{name}, {dtype}: {problem}")
    print(f"{len(wanted)} codecs ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
