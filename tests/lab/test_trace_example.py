"""``examples/trace.py`` in the lab: the trace of compressed reductions on slow links."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.support.cluster import needs_lab
from tests.support.paths import ROOT
from tests.support.small import THINWIRE

pytestmark = needs_lab

Piece = tuple[str, float, float]
"""A span: which collective, from when to when, in microseconds."""


def pieces(path: Path, rank: int) -> dict[str, list[Piece]]:
    """The spans of one rank by track."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == rank}
    by_track: dict[str, list[Piece]] = {name: [] for name in tracks.values()}
    for event in events:
        if event["ph"] == "X" and event["pid"] == rank:
            by_track[tracks[event["tid"]]].append((event["name"], event["ts"], event["ts"] + event["dur"]))
    return by_track


def overlaps(some: list[Piece], others: list[Piece]) -> bool:
    """Whether one of some runs while another collective's of others does."""
    return any(a < d and c < b for name, a, b in some for other, c, d in others if name != other)


@pytest.mark.slow
def test_hop_one_runs_under_hop_two_of_the_bucket_before(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    example = [str(ROOT / "examples/trace.py"), "zeropp", str(out), "--hidden", "128", "--bucket-bytes", "200000"]
    subprocess.run(
        [*THINWIRE, "lab", "--nodes", "2", "--ranks", "2", "--bandwidth", "5mbit", "--", "torchrun", *example],
        check=True,
        timeout=120,
        capture_output=True,
    )
    for rank in range(4):
        track = pieces(out, rank)
        assert len(track["reduce scatter-across"]) > 3
        assert overlaps(track["reduce scatter-inside"], track["reduce scatter-across"])
        assert overlaps(track["reduce encode"], track["reduce scatter-across"])
        assert overlaps(track["compute"], track["reduce scatter-across"])
