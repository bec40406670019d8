"""Part: the tests that need a CUDA device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.gpu.case import GIB, Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale

from thinwire.report.sheet import Sheet

__all__ = ["cases", "outcome_of", "pytest"]

_ROOT = Path(__file__).parents[2]
_CODECS: Final = "tests/gpu/test_codecs_cuda.py"
_LARGE: Final = "more_than_two_to_the_31"
_BYTES: Final = "messages or fused or 64_mebibytes"
_PRESETS: Final = "tests/gpu/test_cuda.py::test_every_preset_agrees_with_the_cpu"
"""The part ``presets`` does the same and keeps the differences."""

_ELSEWHERE: Final = ("tests/gpu/test_nccl.py", "tests/gpu/test_delays.py")
"""The parts ``contact`` and ``streams`` run these."""

_SHOWN, _KEPT = 300, 8000
"""Characters of a failed test's message that the table shows, and those of its text that the record keeps."""

_CONTEXTS: Final = 6
"""Processes that use the card at once. When there were about thirty, those of other parts included, an H200 refused
some with `out of memory`, though it had memory left."""

_REHEARSED: Final = ["tests/spec/plan_parts/test_presets.py"]
"""Tests of a few seconds without a GPU: a rehearsal tries how outcomes are read."""


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """The tests of ``tests/gpu``: bytes first, then streams and interception, tensors beyond 2^31 values, the rest."""
    del stack
    workers = min(_CONTEXTS, os.cpu_count() or 1)
    ignored = [word for file in (_CODECS, *_ELSEWHERE) for word in ("--ignore", file)]
    chosen: list[tuple[str, list[str], int, float, int]] = [
        ("bytes of the codecs", [_CODECS, "-k", f"({_BYTES}) and not {_LARGE}"], workers, 70, 0),
        ("runtime", ["tests/gpu", *ignored, "--deselect", _PRESETS], 1, 60, 0),
        ("more than 2^31 values", [_CODECS, "-k", _LARGE], 1, 60, 40 * GIB),
        ("everything else of the codecs", [_CODECS, "-k", f"not ({_BYTES} or {_LARGE})"], workers, 60, 0),
    ]
    if scale.device == "cpu":
        chosen = [("rehearsed", _REHEARSED, 1, 5, 0)]
    compiling = [Case("kernels compiled by many processes", _compile, 60)] if scale.device == "cuda" else []
    return compiling + [
        Case(name, partial(_run, tests, workers), seconds, needs) for name, tests, workers, seconds, needs in chosen
    ]


def _compile(report: Report) -> Outcome:
    """Every kernel, into the cache that all later parts read."""
    from benchmarks.gpu.compile import compile_all

    from thinwire_bench.codecs.bench import CODECS

    failed: list[str] = []

    def told(line: str) -> None:
        report(line)
        if "Error" in line:
            failed.append(line)

    seconds = compile_all(CODECS, ("float32", "bfloat16", "float16"), min(_CONTEXTS, os.cpu_count() or 1), told)
    check = Check("codecs and dtypes compiled", f"{len(seconds)}, {len(failed)} failed", "0 failed", not failed)
    return Outcome(checks=(check,), notes=tuple(failed), data={"compiled": seconds})


def _run(tests: Sequence[str], workers: int, report: Report) -> Outcome:
    report("pytest " + " ".join(tests))
    return pytest(tests, workers)


def pytest(tests: Sequence[str], workers: int) -> Outcome:
    """The outcome of a run of pytest in the checkout.

    Args:
        tests: What to run.
        workers: Processes.
    """
    with tempfile.TemporaryDirectory() as directory:
        report_file = Path(directory) / "junit.xml"
        # A warning that only CUDA gives is not what these tests are about.
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", *tests]
        command += [*(["-n", str(workers)] if workers > 1 else []), f"--junitxml={report_file}"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if not report_file.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        return outcome_of(report_file.read_text(encoding="utf-8"))


def outcome_of(junit: str) -> Outcome:
    """The outcome of a run of pytest, from its JUnit XML.

    Args:
        junit: The text of the file.
    """
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    rows, texts = [], {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        problem = next((case.find(tag) for tag in ("failure", "error", "skipped") if case.find(tag) is not None), None)
        kind = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        counts[kind] += 1
        if problem is not None:
            name = f"{case.get('classname')}::{case.get('name')}"
            text = problem.text or ""
            texts[name] = text if len(text) <= _KEPT else f"{text[: _KEPT // 2]}\n...\n{text[-_KEPT // 2 :]}"
            # An error of a rank comes after the lines that led to it.
            message = re.sub(r"\s+", " ", problem.get("message") or problem.text or "")
            shown = message if len(message) <= _SHOWN else f"{message[: _SHOWN // 3]} ... {message[-2 * _SHOWN // 3 :]}"
            rows.append([name, kind, shown.replace("|", "\\|")])
    text = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    met = counts["passed"] > 0 and counts["failed"] == 0
    check = Check("tests that need a GPU", text, "at least 1 passed, 0 failed", met)
    sheets = (Sheet("tests that did not pass", ("test", "", "message"), 3, rows),) if rows else ()
    return Outcome(sheets, (check,), data={"counts": counts, "texts": texts})
