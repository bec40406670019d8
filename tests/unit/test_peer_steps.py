"""Predicted steps of other frameworks beside measured ones, as the page says."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire_bench.study.peer_steps import compared

ROOT = Path(__file__).parents[2]


def test_steps_are_right_where_links_are_the_limit_and_the_page_says_so() -> None:
    pairs = compared(ROOT / "docs/results/step.json", ROOT / "docs/results/planner")
    page = (ROOT / "docs/emit.md").read_text()
    for pair in pairs:
        assert f"| {pair.predicted_ms:.0f} | {pair.measured_ms:.0f} | {pair.error:+.1%} |" in page, pair
    slow = [abs(pair.error) for pair in pairs if pair.bandwidth == "200mbit"]
    assert statistics.fmean(slow) < 0.05


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text("{}")
    with pytest.raises(UsageError, match="should be what thinwire bench step --json"):
        compared(path, tmp_path)
