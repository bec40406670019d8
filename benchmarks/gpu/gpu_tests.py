"""Part: the tests that need a CUDA device."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale

from thinwire.report.sheet import Sheet

__all__ = ["gpu_tests", "outcome_of"]

_ROOT = Path(__file__).parents[2]
_ELSEWHERE: Final = "tests/gpu/test_cuda.py::test_every_preset_agrees_with_the_cpu"
"""The part ``presets`` does the same and keeps the differences."""

_REHEARSED: Final = "tests/unit/test_spec_presets.py"
"""Tests of a few seconds without a GPU: a rehearsal tries how outcomes are read."""


def gpu_tests(scale: Scale, report: Callable[[str], None]) -> Outcome:
    """Part: ``pytest -m gpu``."""
    report("pytest -m gpu")
    chosen = ["-m", "gpu", "--deselect", _ELSEWHERE] if scale.device == "cuda" else [_REHEARSED]
    with tempfile.TemporaryDirectory() as directory:
        report_file = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, f"--junitxml={report_file}"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
        if not report_file.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        return outcome_of(report_file.read_text(encoding="utf-8"))


def outcome_of(junit: str) -> Outcome:
    """The outcome of a run of pytest, from its JUnit XML.

    Args:
        junit: The text of the file.
    """
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    rows = []
    for case in cases:
        problem = next((case.find(tag) for tag in ("failure", "error", "skipped") if case.find(tag) is not None), None)
        kind = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        counts[kind] += 1
        if problem is not None:
            message = re.sub(r"\s+", " ", problem.get("message") or problem.text or "")[:300].replace("|", "\\|")
            rows.append([f"{case.get('classname')}::{case.get('name')}", kind, message])
    text = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    met = counts["passed"] > 0 and counts["failed"] == 0
    check = Check("tests that need a GPU", text, "at least 1 passed, 0 failed", met)
    sheets = (Sheet("tests that did not pass", ("test", "", "message"), 3, rows),) if rows else ()
    return Outcome(sheets, (check,), data=counts)
