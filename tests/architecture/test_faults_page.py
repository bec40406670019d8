"""Every line of the page on faults is backed by a test."""

from __future__ import annotations

import re

from tests.support.paths import ROOT


def test_every_fault_names_tests_that_exist() -> None:
    section = (ROOT / "docs/faults.md").read_text().partition("## Faults\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", written, re.MULTILINE))
    header, *lines = table
    assert header.endswith("| test |")
    assert len(lines) > 15
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line.rsplit("|", 2)[1])
        assert named, line
        assert set(named) <= there, line
