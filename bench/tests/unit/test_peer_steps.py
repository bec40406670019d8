"""Predicted steps of other frameworks beside measured ones, as the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire.errors import UsageError
from thinwire_bench.study.peer_steps import bases, compared, sheets_of

ROOT = Path(__file__).parents[3]
RESULTS = [ROOT / f"docs/results/emit/{model}/step.json" for model in ("llama-17m", "llama-5m")]


def test_the_page_has_what_follows_from_the_results() -> None:
    pairs = compared(RESULTS)
    page = (ROOT / "docs/emit.md").read_text(encoding="utf-8")
    every, means = sheets_of(pairs)
    for row in (*every.rows, *means.rows):
        assert f"| {' | '.join(row)} |" in page, row
    assert {(pair.model, pair.peer) for pair in pairs} == {
        (model, peer) for model in ("llama-17m", "llama-5m") for peer in ("fsdp2", "hsdp", "hpz")
    }


def test_the_memory_of_a_process_without_a_model_counts(tmp_path: Path) -> None:
    first = compared(RESULTS[:1])[0]
    for path in RESULTS[0].parent.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads(RESULTS[0].read_text(encoding="utf-8"))
    for row in content["rows"]:
        if row["system"].startswith("base:"):
            row["needed_rss"] += 1 << 20
    (tmp_path / "step.json").write_text(json.dumps(content), encoding="utf-8")
    more = compared([tmp_path / "step.json"])[0]
    assert more.predicted_bytes - first.predicted_bytes == 1 << 20
    assert more.predicted_ms == first.predicted_ms
    assert bases(["local", "fsdp2", "hpz", "deepspeed3"]) == ["fsdp2", "deepspeed3"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="should be what thinwire bench step --profiles"):
        compared([path])
