"""Durations are measured by clocks that do not jump: the time of day is only written down."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

SOURCE = ROOT / "src" / "thinwire"

WRITTEN_DOWN = {
    "report/page.py", "train/directory.py", "train/observing/metrics.py", "train/observing/trackers.py",
    "train/processes/worker.py", "lab/job.py",
}  # fmt: skip
"""Files that note when something happened, for people to read."""


def test_no_decision_reads_the_time_of_day() -> None:
    pattern = re.compile(r"\btime\.(time|time_ns|localtime|gmtime|strftime)\b|\bdatetime\.(now|utcnow|today)\b")
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert readers <= WRITTEN_DOWN, readers - WRITTEN_DOWN
