"""What `thinwire bench data` measures and how its tables judge it."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire_bench.study.text import (
    ENCODE_BATCH,
    ENCODE_BATCH_FAST,
    THINWIRE,
    Encoder,
    TextTimes,
    sheets,
    speeds,
    study,
)


def measured(seconds: float, waits: int) -> TextTimes:
    ways = (
        Encoder(ENCODE_BATCH, 10 << 20, (1.0, 2.0, 3.0), (1 << 30,) * 3),
        Encoder(ENCODE_BATCH_FAST, 10 << 20, (0.5, 1.0, 1.5), (1 << 30,) * 3),
        Encoder(THINWIRE, 100 << 20, (seconds, 2 * seconds, 3 * seconds), (1 << 20, 3 << 20, 2 << 20)),
    )
    return TextTimes(100 << 20, ways, 50, waits, waits / 1000)


def test_speeds_are_those_of_a_round() -> None:
    """Bytes a second, however much text each way takes."""
    expected = {ENCODE_BATCH: 1.0, ENCODE_BATCH_FAST: 2.0, THINWIRE: 1.25}
    assert speeds(measured(8.0, 0)) == {name: pytest.approx((ratio,) * 3) for name, ratio in expected.items()}
    assert speeds(measured(8.0, 0), ENCODE_BATCH_FAST)[THINWIRE] == pytest.approx((0.625,) * 3)


@pytest.mark.parametrize(
    ("seconds", "waits", "marks"), [(6.2, 0, ["", "", ""]), (6.3, 0, ["", "missed", ""]), (12.6, 1, ["missed"] * 3)]
)
def test_goals_are_judged(seconds: float, waits: int, marks: list[str]) -> None:
    text, goals = sheets(measured(seconds, waits))
    assert [row[-1] for row in goals.rows] == marks
    assert goals.rows[2][1] == f"{waits} ({waits:.1f} ms)"
    assert text.rows[2][-1] == "3 MiB"


@pytest.mark.slow
def test_every_way_is_measured_once_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = study(size=300_000, sample=50_000, rounds=2, steps=3, directory=Path(), report=str)
    assert result.text_bytes == 300_000
    assert [len(way.seconds) for way in result.ways] == [2, 2, 2]
    assert all(50_000 <= way.text_bytes < 200_000 for way in result.ways[:2])
    assert result.ways[2].text_bytes == 300_000
    assert all(min(way.seconds) > 0 for way in result.ways)
    assert result.waits >= 0
    assert not list(tmp_path.iterdir()), "what it wrote is gone"
