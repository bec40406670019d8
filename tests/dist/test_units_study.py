"""What ``thinwire bench units`` measures, on real ranks and on made-up times."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from thinwire.testing.ranks import run_ranks
from thinwire_bench.cli.commands import bench
from thinwire_bench.study.units import MODEL, PARAMETERS_OF_A_BLOCK, Chain, Times, Workload, costs_of, measure, missed

SMALL = Workload(blocks=3, dtype="float32", rounds=2, steps=1)


def test_a_block_has_ten_parameters() -> None:
    assert len(list(Chain(3).parameters())) == 3 * PARAMETERS_OF_A_BLOCK


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_systems_take_turns_and_compute_the_same_loss(dtype: str) -> None:
    of_ranks = run_ranks(2, measure, (MODEL, "zero1", "zero3"), replace(SMALL, dtype=dtype))
    for times in of_ranks:
        costs = {cost.system: cost for cost in costs_of(times | {"ddp": times[MODEL], "fsdp2": times[MODEL]}, 2, 3)}
        assert all(len(times[name].wall) == SMALL.rounds for name in times)
        assert all(value > 0 for name in times for value in (*times[name].forward, *times[name].process))
        assert len(costs["zero3"].over_partner) == SMALL.rounds


def made_up(forward: float, backward: float, wall: float, loss: float = 1.0) -> Times:
    return Times([forward], [backward], [0.001], [wall], [wall], loss)


def test_a_cost_is_what_a_unit_takes_beyond_the_model_alone() -> None:
    times = {
        MODEL: made_up(0.010, 0.020, 0.05),
        "ddp": made_up(0.010, 0.022, 0.06),
        "fsdp2": made_up(0.030, 0.050, 0.20),
        "zero1": made_up(0.012, 0.024, 0.06),
        "zero3": made_up(0.012, 0.034, 0.10),
    }
    costs = {cost.system: cost for cost in costs_of(times, 2, 200)}
    assert costs["zero1"].forward == pytest.approx([10.0])
    assert costs["zero1"].backward == pytest.approx([20.0])
    assert costs["zero3"].backward == pytest.approx([70.0])
    assert costs["zero3"].over_partner == pytest.approx([0.5])
    assert not missed(costs["zero1"])
    assert missed(costs["zero3"])  # above its budget in the backward
    assert missed(replace(costs["zero1"], over_partner=[1.1]))
    assert not missed(costs["ddp"])


def test_another_loss_is_refused() -> None:
    times = {MODEL: made_up(0.01, 0.02, 0.05), "ddp": made_up(0.01, 0.02, 0.05, loss=1.1)}
    with pytest.raises(ValueError, match="ddp computes the loss 1.1"):
        costs_of(times, 2, 200)


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
        (ranks, name) for ranks in (1, 2) for name in (MODEL, "ddp", "fsdp2", "zero1", "zero3")
    }
    assert content["command"].startswith("thinwire") or content["command"]
    assert "| 2 | zero3 |" in page.read_text(encoding="utf-8")
