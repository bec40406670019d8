"""What ``thinwire bench units`` measures, on real ranks and on made-up times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire_bench.cli.commands import bench
from thinwire_bench.study.units import (
    BOUND,
    PASSES,
    TENSORS,
    SmallBlock,
    Turn,
    costs_of,
    goals_of,
    goals_sheet,
    measure,
)
from thinwire_bench.systems.protocol import BenchError


def turn(forward: float, backward: float, wall: float, loss: float = 1.0) -> Turn:
    return Turn(loss, {"forward": forward, "backward": backward, "update": 0.001}, all_threads=0.05, wall=wall)


def test_a_block_has_as_many_parameters_as_the_table_says() -> None:
    assert len(list(SmallBlock().parameters())) == TENSORS


def test_a_cost_is_what_a_unit_takes_beyond_the_model_by_itself() -> None:
    turns = {
        BOUND: [turn(0.010, 0.020, 0.05)],
        "DDP": [turn(0.010, 0.022, 0.06)],
        "zero1": [turn(0.012, 0.024, 0.06)],
        "FSDP2": [turn(0.030, 0.050, 0.20)],
        "zero3": [turn(0.012, 0.044, 0.30)],
    }
    costs = {cost.system: cost for cost in costs_of(turns, 2, 200)}
    assert costs["zero1"].passes["forward"] == pytest.approx([10.0])
    assert costs["zero1"].per_pass == pytest.approx([15.0])
    assert costs["zero3"].per_pass == pytest.approx([65.0])
    assert costs["zero3"].over_peer == pytest.approx([1.5])
    assert costs["DDP"].over_peer == []
    assert [goal.reached for goal in goals_of(list(costs.values()))] == [True, True, False, False]
    assert [row[-1] for row in goals_sheet(list(costs.values())).rows] == ["reached", "reached", "missed", "missed"]


@pytest.mark.parametrize("loss", [1.1, math.nan])
def test_a_system_with_another_loss_is_refused(loss: float) -> None:
    turns = {BOUND: [turn(0.01, 0.02, 0.05)], "DDP": [turn(0.01, 0.02, 0.05)], "zero1": [turn(0.01, 0.02, 0.05, loss)]}
    with pytest.raises(BenchError, match="zero1 has the loss"):
        costs_of(turns, 2, 200)


def test_systems_take_turns_on_real_ranks() -> None:
    lines: list[str] = []
    costs = measure(2, ["zero3"], 3, 2, 1, lines.append)
    assert [cost.system for cost in costs] == [BOUND, "FSDP2", "zero3"]
    assert "FSDP2, zero3 in turns" in lines[0]
    for cost in costs:
        assert len(cost.wall) == 2
        assert all(value > 0 for value in (*cost.wall, *cost.all_threads))
        assert set(cost.passes) == set(PASSES)
    assert costs[-1].over_peer == [ours / theirs for ours, theirs in zip(costs[2].wall, costs[1].wall, strict=True)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--plans", "zero2"], "zero2"), (["--plans", "zero1,zero1"], "once each"), (["--ranks", "1,0"], "from 1")],
)
def test_wrong_options_are_refused(arguments: list[str], message: str) -> None:
    outcome = CliRunner().invoke(bench, ["units", *arguments])
    assert outcome.exit_code != 0
    assert message in outcome.output


@pytest.mark.slow
def test_the_command_writes_every_figure_and_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    mark = "<!-- results: begin (written by `thinwire bench units --page`) -->\n<!-- results: end -->\n"
    page.write_text(mark, encoding="utf-8")
    arguments = ["units", "--blocks", "4", "--rounds", "2", "--steps", "1"]
    outcome = CliRunner().invoke(bench, [*arguments, "--json", str(tmp_path / "units.json"), "--page", str(page)])
    assert outcome.exit_code == 0, outcome.output
    content = json.loads((tmp_path / "units.json").read_text(encoding="utf-8"))
    assert {(row["ranks"], row["system"]) for row in content["rows"]} == {
        (ranks, name) for ranks in (1, 2) for name in (BOUND, "DDP", "FSDP2", "zero1", "zero3")
    }
    assert len(content["goals"]) == 8
    assert "| zero3 | 2 |" in page.read_text(encoding="utf-8")
