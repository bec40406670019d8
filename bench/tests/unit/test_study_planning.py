"""The planner's study: the pairs that it measures, and its goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from thinwire.spec import Plan
from thinwire_bench.cli.planner import planner
from thinwire_bench.study.pairs import Choice, Pair, sheets
from thinwire_bench.study.planning import _add, _raced

ROOT = Path(__file__).parents[3]


def pair(plan: str, predicted: float, measured: float, **changes: Any) -> Pair:
    fields: dict[str, Any] = {
        "model": "m", "bandwidth": "1gbit", "cap": None, "plan": plan, "factors": plan,
        "local_ms": 50.0, "pace": 1.0,
        "predicted_ms": predicted, "measured_ms": measured, "spread_ms": 0.0, "predicted_bytes": 104,
        "measured_bytes": 100, "held_bytes": 130,
    }  # fmt: skip
    return Pair(**{**fields, **changes})


def choice(ratio: float, **changes: Any) -> Choice:
    fields: dict[str, Any] = {"model": "m", "bandwidth": "1gbit", "cap": None, "plan": "own", "best": "ddp"}
    return Choice(**{**fields, "memory": 90, "raced": "ddp", "raced_ratio": 1.0, **changes}, ratio=ratio)


def goals(pairs: list[Pair], choices: list[Choice]) -> dict[str, list[str]]:
    return {row[0]: list(row[1:]) for row in sheets(pairs, choices)[-1].rows}


def test_goals_follow_from_pairs_and_choices() -> None:
    reached = goals([pair("ddp", 120, 100), pair("zero3", 90, 100), pair("own", 95, 102)], [choice(1.02), choice(1.2)])
    assert reached["step time, mean error over 3 pairs"] == ["12.3%", "5.0%", "missed"]
    assert reached["peak memory, mean error over 3 plans"] == ["4.0%", "2.0%", "missed"]
    assert reached["choice over the fastest, mean of 2"] == ["1.110", "1.030", "missed"]
    assert reached["choice over the fastest, worst"] == ["1.200", "1.030", "missed"]
    assert reached["choice after a race over the fastest, worst"] == ["1.000", "1.030", "reached"]
    assert "memory of choices over their cap, worst" not in reached


def test_errors_are_tabulated_by_model_and_link() -> None:
    pairs = [
        pair("ddp", 80, 100), pair("zero3", 110, 100), pair("ddp", 100, 100, bandwidth="none"),
        pair("ddp", 70, 100, model="n"),
    ]  # fmt: skip
    _, table, *_ = sheets(pairs, [choice(1.0)])
    assert table.columns[1:] == ["1gbit", "none", "all links"]
    assert table.rows == [
        ["m", "15.0% (-5.0%)", "0.0% (+0.0%)", "10.0% (-3.3%)"],
        ["n", "30.0% (-30.0%)", "", "30.0% (-30.0%)"],
        ["all models", "20.0% (-13.3%)", "0.0% (+0.0%)", "15.0% (-10.0%)"],
    ]


def test_near_ties_and_presets_race_with_the_choice() -> None:
    ranked = [pair("for 1gbit, 2.", 120, 90), pair("for none", 110, 95), pair("for 1gbit", 100, 99)]
    assert _raced(ranked, "for 1gbit") == "for none"
    assert _raced([pair("zero3", 200, 80), *ranked], "for 1gbit") == "zero3"
    assert _raced(ranked[::2], "for 1gbit") == "for 1gbit"


def test_choices_are_held_to_their_caps() -> None:
    reached = goals([pair("own", 1, 1)], [choice(1.0, cap=100), choice(1.0, cap=90, memory=99)])
    assert reached["memory of choices over their cap, worst"] == ["1.100", "1.000", "missed"]


def test_memory_counts_the_link_on_which_most_was_needed() -> None:
    pairs = [pair("own", 1, 1, predicted_bytes=50), pair("own", 1, 1, bandwidth="none", predicted_bytes=100)]
    assert goals(pairs, [choice(1.0)])["peak memory, mean error over 1 plans"] == ["0.0%", "2.0%", "reached"]


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_a_choice_that_is_a_preset_is_measured_once(name: str) -> None:
    plans = {preset: Plan.preset(preset, nodes=2, local=2) for preset in ("zero1", "zero3")}
    chosen = plans[name].with_(name="plan")
    assert _add(plans, chosen, "for 1gbit") == name
    assert len(plans) == 2
    assert _add(plans, chosen.with_(bucket_bytes=1 << 23), "for 1gbit") == "for 1gbit"
    assert len(plans) == 3


@pytest.mark.slow
def test_the_model_as_it_is_now_says_what_the_page_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of the pairs that were measured for it, whatever has been changed since."""
    results = ROOT / "docs" / "results"
    page = tmp_path / "planner.md"
    page.write_text((ROOT / "docs" / "results" / "planner.md").read_text(encoding="utf-8"), encoding="utf-8")
    planner(again=results / "planner.json", profiles=results / "planner", json_path=tmp_path / "now.json", page=page)
    assert "reached" in capsys.readouterr().out
    now, then = (json.loads(path.read_text()) for path in (tmp_path / "now.json", results / "planner.json"))
    assert [now["environment"], now["command"]] == [then["environment"], then["command"]]
    assert [Choice(**row) for row in now["choices"]] == [Choice(**row) for row in then["choices"]]
    error, *_ = goals([Pair(**row) for row in now["pairs"]], [Choice(**row) for row in now["choices"]])[
        f"step time, mean error over {len(now['pairs'])} pairs"
    ]
    assert float(error.rstrip("%")) <= 10
    assert page.read_text(encoding="utf-8") == (ROOT / "docs" / "results" / "planner.md").read_text(encoding="utf-8")


def test_results_of_other_plans_are_not_predicted_again(tmp_path: Path) -> None:
    results = ROOT / "docs" / "results"
    other = json.loads((results / "planner.json").read_text())
    other["pairs"][0]["factors"] = "something else"
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(typer.Exit):
        planner(again=tmp_path / "other.json", profiles=results / "planner")
    with pytest.raises(typer.Exit):
        planner(again=tmp_path / "other.json")
