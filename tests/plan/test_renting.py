"""Goodput under failures, prices of nodes, and the sweep over their number."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from tools.reference import UNLIKE
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.plan import offers
from thinwire.plan.renting import best_interval, goodput, useful_share
from thinwire.spec import ClusterSpec

HOUR = 3600.0
JOB = ["--model", "llama-7b", "--tokens-per-step", "512k", "--seq", "2048", "--micro-batch", "1", "--codecs", "none"]


def plan(*options: str, fails: bool = False) -> dict[str, Any]:
    outcome = CliRunner().invoke(app, ["plan", *JOB, *options, "--json"])
    assert (outcome.exit_code != 0) is fails, outcome.output
    return dict(json.loads(outcome.stdout))


def sentence(*options: str) -> str:
    outcome = CliRunner().invoke(app, ["plan", *JOB, *options])
    assert outcome.exit_code == 1
    return " ".join(outcome.output.split())


@pytest.mark.parametrize(("hours", "checkpoint"), [(2000, 30), (50, 30), (10, 60), (1, 120), (0.1, 300)])
def test_no_other_interval_loses_less(hours: float, checkpoint: float) -> None:
    mean_time = hours * HOUR
    best = best_interval(mean_time, checkpoint)
    share = useful_share(mean_time, checkpoint, 300.0, best)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert useful_share(mean_time, checkpoint, 300.0, best * factor) < share
    # Young's estimate is the limit for rare failures; Daly's second-order term is a third of the relative cost's root.
    ratio = math.sqrt(checkpoint / 2 / mean_time)
    assert best == pytest.approx(
        math.sqrt(2 * checkpoint * mean_time) * (1 + ratio / 3) - checkpoint, rel=max(0.001, ratio**2)
    )


def test_the_share_is_what_a_job_with_failures_achieves() -> None:
    mean_time, checkpoint, restart, interval = 5000.0, 100.0, 400.0, 1500.0
    chance = random.Random(7)
    now = progress = 0.0
    failure = chance.expovariate(1 / mean_time)
    while progress < 4e6:
        if now + interval + checkpoint <= failure:
            now += interval + checkpoint
            progress += interval
            continue
        now = failure
        failure = now + chance.expovariate(1 / mean_time)
        while now + restart > failure:  # failures during a restart
            now = failure
            failure = now + chance.expovariate(1 / mean_time)
        now += restart
    assert useful_share(mean_time, checkpoint, restart, interval) == pytest.approx(progress / now, rel=0.02)


def test_goodput_at_its_ends() -> None:
    assert goodput(math.inf, 30.0, 300.0).share == 1.0
    assert goodput(math.inf, 30.0, 300.0, 270.0).share == 0.9
    assert goodput(1.0, 1e6, 1e6).share == 0.0


def test_spot_nodes_cost_less_and_are_taken_away() -> None:
    machine = ClusterSpec.from_toml(UNLIKE)
    on_demand, spot = offers(machine)
    assert on_demand.per_hour == pytest.approx(16 * 4.0 + 16 * 1.5)
    assert spot.per_hour == pytest.approx(16 * 4.0 + 16 * 1.5 * 0.4)
    assert on_demand.goodput.mean_time == pytest.approx(2000 * HOUR / 4)
    assert spot.goodput.mean_time == pytest.approx(1 / (4 / 2000 / HOUR + 2 * 0.02 / HOUR))
    assert spot.goodput.share < on_demand.goodput.share


@pytest.mark.slow
def test_a_sweep_has_a_row_for_every_number_of_nodes(tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    cluster = ["--cluster", "a100-80g:1x8", "--price", "2", "--mtbf", "1000h"]
    result = plan(*cluster, "--sweep", "nodes=1,2,3,4", "--plot", str(picture))
    rows = result["sweep"]
    assert [row["nodes"] for row in rows] == [1, 2, 3, 4]
    assert rows[2]["plan"] is None
    assert "not a multiple of seq x GPUs" in rows[2]["reason"]
    found = [rows[0], rows[1], rows[3]]
    for row in found:
        assert row["tokens_per_second"] == pytest.approx(512 * 1024 / row["step_seconds"] * row["goodput"])
        price = 2.0 * 8 * row["nodes"] / 3600 / row["tokens_per_second"] * 1e9
        assert row["cost_per_billion_tokens"] == pytest.approx(price)
        mean_time = row["mean_seconds_between_failures"]
        assert mean_time == pytest.approx(1000 * HOUR / row["nodes"])
        assert row["checkpoint_interval_seconds"] == pytest.approx(best_interval(mean_time, 30.0))
    assert result["best"]["nodes"] == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    cheapest = plan(*cluster, "--sweep", "nodes=1,4", "--objective", "cost")
    assert cheapest["best"]["nodes"] == min(found, key=lambda row: row["cost_per_billion_tokens"])["nodes"]


@pytest.mark.slow
def test_cost_leaves_groups_out_where_they_do_not_pay(tmp_path: Path) -> None:
    path, chosen = tmp_path / "unlike.toml", tmp_path / "plan.toml"
    path.write_text(UNLIKE)
    result = plan("--cluster", str(path), "--objective", "cost", "--out", str(chosen), "--recompute", "off")
    assert {row["label"] for row in result["sweep"]} == {"all", "new", "old"}
    costs = {row["label"]: row["cost_per_billion_tokens"] for row in result["sweep"]}
    assert result["best"]["label"] == min(costs, key=lambda label: costs[label])
    assert "mesh" in chosen.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sweep", "nodes=5..3"], "--sweep nodes=5..3 is empty: 5 is more than 3"),
        (["--sweep", f"nodes=1..{10**20}"], "of at most 9 digits each"),
        (["--sweep", "nodes=1..999999999"], "should have 1 to 4096 numbers of nodes"),
        (["--sweep", "nodes=0..3"], "should have 1 to 4096 numbers of nodes, each at least 1"),
        (["--sweep", "gpus=1..3"], "should be nodes=A..B"),
        (["--sweep", "nodes=1..5", "--cluster", "unlike.toml"], "describes 4 nodes one by one"),
        (["--objective", "cost"], "--objective cost needs the price of a GPU"),
        (["--mtbf", "0h"], "failures.mtbf = '0h': it should be greater than 0"),
        (["--spot-discount", "0.5"], "spot.interruptions_per_hour is missing"),
        (["--spot-discount", "1.5", "--spot-interruptions", "0.1"], "spot.discount = 1.5: it should be less than 1"),
        (["--plot", "a.png"], "--plot a.png needs --sweep"),
    ],
)
def test_bad_options_are_one_sentence(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unlike.toml").write_text(UNLIKE, encoding="utf-8")
    cluster = [] if "--cluster" in options else ["--cluster", "a100-80g:1x8"]
    assert words in sentence(*cluster, *options)


def test_nodes_that_fail_before_they_make_progress_have_no_price() -> None:
    cluster = ["--cluster", "a100-80g:1x8"]
    for setting in ("price_per_gpu_hour=2", "failures.mtbf=5s"):
        cluster += ["--set", f"cluster.{setting}"]
    swept = CliRunner().invoke(app, ["plan", *JOB, *cluster, "--sweep", "nodes=1,2"])
    assert swept.exit_code == 1
    said = " ".join(swept.output.split())
    assert "1 node: fails every 5 s, before it makes progress 2 nodes: fails every 2.5 s, before it makes" in said
    assert said.endswith("nothing fits and makes progress on any of them")
    (rental,) = plan(*cluster, "--top", "1")["rent"]
    assert (rental["goodput"], rental["cost_per_billion_tokens"]) == (0.0, None)
    alone = CliRunner().invoke(app, ["plan", *JOB, *cluster, "--top", "1"])
    assert "on demand (16.00 an hour): it fails every 5 s, before it makes progress\n" in alone.output


def test_the_answer_says_what_its_plan_costs() -> None:
    cluster = ["--cluster", "a100-80g:2x8", "--price", "2", "--spot-discount", "0.6", "--spot-interruptions", "0.05"]
    on_demand, spot = plan(*cluster, "--top", "1")["rent"]
    assert on_demand["goodput"] == 1.0
    assert on_demand["checkpoint_interval_seconds"] is None
    assert spot["goodput"] < 1.0
    assert spot["cost_per_billion_tokens"] < on_demand["cost_per_billion_tokens"]
