"""The ablation of overlap switches: its settings, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.lab.cluster import needs_lab
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.spec import Plan
from thinwire_bench.systems.overlap import SETTINGS, SwitchRow, ladder

LANES = ("gather", "reduce", "sync", "spread")


def row(setting: str, plan: str = "30b", **waited: float) -> SwitchRow:
    waits = {lane: waited.get(lane, 0.0) for lane in LANES}
    return SwitchRow(
        plan=plan,
        factors="",
        micro_batches=1,
        setting=setting,
        step_ms=100.0 + sum(waits.values()),
        step_ms_min=0.0,
        step_ms_max=0.0,
        tokens_per_second=1.0,
        exposed_ms=sum(waits.values()),
        waited_ms=waits,
        waited_ms_min={lane: 0.9 * value for lane, value in waits.items()},
        waited_ms_max={lane: 1.1 * value for lane, value in waits.items()},
        internode_bytes=0.0,
    )


def test_each_setting_turns_on_what_the_one_before_leaves_off() -> None:
    on = [sum(switches.values()) for switches in SETTINGS.values()]
    assert on == [0, 2, 3, 4]
    for before, after in zip(list(SETTINGS.values())[:-1], list(SETTINGS.values())[1:], strict=True):
        assert all(after[name] for name, is_on in before.items() if is_on)


def test_a_step_of_the_ladder_compares_the_lanes_it_concerns() -> None:
    plan = Plan.preset("amsp-30b", nodes=2, local=4)
    rows = [
        row("none", gather=50, reduce=30, sync=0, spread=20),
        row("gather+reduce", gather=10, reduce=20, sync=0, spread=21),
        row("+sync", gather=11, reduce=5, sync=0, spread=19),
        row("+spread", gather=11, reduce=5, sync=0, spread=18),
        row("none", plan="7b"),
    ]
    steps = list(ladder(rows, {"30b": plan, "7b": plan}))
    assert [(step.setting, step.off_ms, step.on_ms) for step in steps] == [
        ("gather+reduce", 80, 30),
        ("+sync", 20, 5),
        ("+spread", 19, 18),
    ], "and plans are not compared with each other"
    assert [step.apart for step in steps] == [True, True, False]
    assert all(step.traffic for step in steps)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("zero1-node", [False, True, True]), ("zero3", [True, False, False]), ("ddp", [False, True, False])],
)
def test_it_knows_which_traffic_a_plan_has(preset: str, expected: list[bool]) -> None:
    rows = [row(setting, plan="x") for setting in SETTINGS]
    plan = Plan.preset(preset, nodes=2, local=2)
    assert [step.traffic for step in ladder(rows, {"x": plan})] == expected


def test_unknown_plans_and_numbers_are_refused_before_anything_starts() -> None:
    result = CliRunner().invoke(app, ["bench", "overlap", "--plans", "7b,70b", "--micro-batches", "1,x"])
    assert result.exit_code != 0
    assert "there is no plan '70b'; valid are 7b, 13b, 30b" in result.output
    assert "'x' is not a number" in result.output


@needs_lab
@pytest.mark.slow
def test_a_run_writes_rows_and_traces(tmp_path: Path) -> None:
    arguments = ["--plans", "7b", "--micro-batches", "1,2", "--model", "llama-1m", "--ranks", "2", "--seq", "16"]
    arguments += ["--rounds", "1", "--steps", "2", "--bandwidth", "200mbit"]
    arguments += ["--json", str(tmp_path / "out.json"), "--trace", str(tmp_path / "traces")]
    result = CliRunner().invoke(app, ["bench", "overlap", *arguments])
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(r["micro_batches"], r["setting"]) for r in written["rows"]] == [(m, s) for m in (1, 2) for s in SETTINGS]
    assert all(r["internode_bytes"] > 0 and r["tokens_per_second"] > 0 for r in written["rows"])
    assert len(written["steps"]) == 6
    traces = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert traces == ["7b-gather+reduce.json", "7b-none.json", "7b-spread.json", "7b-sync.json"]
    events = json.loads((tmp_path / "traces" / "7b-spread.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert any(event["name"].startswith("sync ") for event in events)
