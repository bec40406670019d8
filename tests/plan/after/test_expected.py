"""What a plan is expected to do goes from ``thinwire plan --out`` through a run to its report."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.reports import write_run
from tests.support.small import DATA, write_text
from typer.testing import CliRunner

import thinwire.plan as planner
from thinwire.cli.main import app
from thinwire.cost import units
from thinwire.errors import SpecError
from thinwire.plan.training_job import TrainingJob
from thinwire.program import Axis, HostLane, Lane, Scope, axis_index, lower
from thinwire.record import read_run
from thinwire.spec import ClusterSpec, Factor, ModelSpec, Plan
from thinwire.spec.expectation import Expectation
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe
from thinwire.train.data.packing import prepare

pytestmark = pytest.mark.ranks

PROFILE = ROOT / "docs" / "results" / "planner" / "profile-200mbit.json"
MODEL = ModelSpec(name="small", layers=4, hidden=256, heads=4, ffn=704, vocab=2048, seq=128)
RECIPE = f"""
[model]
layers = 2
hidden = 32
heads = 2
ffn = 48
{DATA}[train]
steps = 8
seq = 32
global_batch = 16
validate_every = 0
validation_samples = 4
tensorboard = false
[cluster]
device = "cpu"
timeout = "60s"
"""


def planned(directory: Path) -> tuple[Path, Expectation]:
    """A plan file for the recipe, and what is expected of it."""
    write_text(directory / "text.txt", words=400)
    (directory / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    recipe = Recipe.read(directory / "recipe.toml")
    shape = recipe.model.shape(vocab=prepare(recipe.data).vocab, seq=32)
    shape.save(directory / "model.toml")
    out = directory / "plan.toml"
    options = ["--model", str(directory / "model.toml"), "--profile", str(PROFILE), "--seq", "32"]
    result = CliRunner().invoke(app, ["plan", *options, "--tokens-per-step", str(16 * 32), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out, Expectation.read(directory / "plan.expected.json")


def train(directory: Path, name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "thinwire.cli.main", "train", str(directory / "recipe.toml")]
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "SLURM_PROCID")}
    command += ["--out", str(directory / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=outside, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_keeps_what_was_expected_and_its_report_shows_it_beside_what_was_measured(tmp_path: Path) -> None:
    out, expected = planned(tmp_path)
    assert expected.plan == Plan.load(out).fingerprint()
    assert expected.block_parameters
    assert (tmp_path / "plan.expected.json").stat().st_size < 4096
    train(tmp_path, "run", "--plan", str(out))
    run = read_run(tmp_path / "run")
    assert run.expected == expected
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["runs"][0]["predicted"]}
    amounts = {figure.name: figure.amount for figure in expected.figures}
    assert {"step", "computation", "waiting for control", "memory of a rank"} <= rows.keys()
    assert any(name.startswith("transfers of ") and row["measured"] > 0 for name, row in rows.items())
    assert all(row["predicted"] == amounts[name] for name, row in rows.items())
    bytes_of = [name for name in rows if name.endswith((" inside", " across")) and not name.startswith("control")]
    assert bytes_of
    assert all(rows[name]["predicted"] == pytest.approx(rows[name]["measured"], rel=0.2) for name in bytes_of)


@pytest.mark.slow
def test_what_was_expected_of_another_plan_is_not_kept(tmp_path: Path) -> None:
    out, _ = planned(tmp_path)
    said = train(tmp_path, "run", "--plan", str(out), "--set", "plan.bucket_bytes=123456")
    assert "what the plan file was expected to do is not kept" in said
    assert read_run(tmp_path / "run").expected is None


def test_what_was_expected_of_other_steps_is_not_this_runs(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    tokens = run.plan.samplers * run.plan.micro_batch * run.plan.micro_batches * 32
    made = Expectation(
        plan=run.plan.fingerprint(), model="small", seq=32, tokens_per_step=tokens, rests_on="measured", figures=()
    )
    llama = run.recipe.with_(model={"preset": "llama-7b"})
    assert made.unlike(run.plan, run.recipe) is made.unlike(run.plan, llama) is None, "a file may have any name"
    for other, recipe, words in (
        (made.with_(seq=64), run.recipe, f"steps of {tokens} tokens in sequences of 64, and .* have {tokens} of 32"),
        (made.with_(tokens_per_step=7), run.recipe, "about steps of 7 tokens"),
        (made.with_(model="llama-13b"), llama, "about llama-13b, and model.preset is llama-7b"),
        (made.with_(plan="0"), run.recipe, "changes the plan"),
        (made.with_(block_parameters=7), run.recipe, "about a model of 7 parameters .* of this run has"),
    ):
        assert re.search(words, other.unlike(run.plan, recipe) or "")
    for seq, known in ((32, True), (64, False)):
        other = made.with_(seq=seq)
        (tmp_path / "run" / "expected.json").write_text(other.to_json())
        assert (read_run(tmp_path / "run").expected is not None) == known


def amounts_of(plan: Plan, profile: Profile) -> tuple[planner.PricedPlan, dict[str, float]]:
    """A plan with its price, and every figure that is expected of it."""
    job = planner.profiled_job(MODEL, 128, plan, profile, clip=True)
    priced = planner.price_plan(job, plan)
    return priced, {figure.name: figure.amount for figure in planner.expectation(job, priced).figures}


def test_what_is_expected_fits_the_step_that_is_predicted() -> None:
    own = Plan.preset("thinwire", nodes=2, local=2, micro_batch=2, micro_batches=4)
    _, amounts = amounts_of(own, Profile.read(PROFILE))
    waiting = sum(amount for name, amount in amounts.items() if name.startswith("waiting for "))
    assert amounts["step"] == pytest.approx(amounts["computation"] + waiting)
    assert amounts["codecs of reduce"] > 0
    assert amounts["codecs of control"] == 0
    _, plain = amounts_of(own.uncompressed(), Profile.read(PROFILE))
    assert plain["codecs of sync"] == 0
    assert plain["transfers of sync"] > amounts["transfers of sync"]


def test_waiting_for_states_on_the_host_is_not_computation() -> None:
    """As a run measures it: its own work is what a step takes beside waiting for any lane."""
    residence = {"optimizer": "host-stream", "gradients": "host", "params": "host"}
    hosted = Plan.preset("zero3", nodes=2, local=2, residence=residence)
    slow = Profile.read(PROFILE).with_(up_seconds=3e-8, down_seconds=3e-8)
    priced, amounts = amounts_of(hosted, slow)
    assert sum(amounts[f"waiting for {lane}"] for lane in HostLane) > 0
    assert amounts["computation"] == pytest.approx(priced.seconds - sum(priced.simulated.exposed.values()))


@pytest.mark.parametrize("params", [(1, 1), (2, 1)])
def test_bytes_are_the_mean_over_ranks_with_unequal_shares(params: tuple[int, int]) -> None:
    """Whole tensors have one owner each, so that ranks send different bytes."""
    local, nodes = params
    plan = Plan.preset("zero2", nodes=2, local=2, partition="inter", params=Factor(local=local, nodes=nodes))
    _, amounts = amounts_of(plan, Profile.read(PROFILE))
    of_ranks = []
    for position in range(4):
        held = units(MODEL, plan, axis_index(plan, Axis.PARAMS, position))
        of_ranks.append(lower(plan, held, clip=True, position=position).traffic())
    assert len({traffic[Lane.REDUCE][Scope.ACROSS] for traffic in of_ranks}) > 1
    for lane in Lane:
        for scope in Scope:
            sent = statistics.fmean(traffic[lane][scope] for traffic in of_ranks)
            assert amounts[f"{lane} {scope}"] == pytest.approx(sent), (lane, scope)


def test_bytes_of_very_many_unlike_ranks_are_left_out() -> None:
    """To count them would take minutes."""
    cluster = ClusterSpec.named("a800-80g:8x8")
    plan = Plan.preset("zero2", nodes=8, local=8, partition="inter", micro_batches=8)
    for counted, names in ((plan, False), (plan.with_(partition="intra"), True)):
        job = TrainingJob.of(MODEL, 128, cluster, None, counted, micro_batch=1)
        figures = planner.expectation(job, planner.price_plan(job, counted)).figures
        assert any(figure.name == "reduce across" for figure in figures) is names


def test_exchanges_of_islands_are_expected_as_often_as_a_step_has_them() -> None:
    islands = {"count": 2, "every": 4, "fragments": 2}
    plan = Plan.preset("islands", nodes=2, local=2, islands=islands)
    _, amounts = amounts_of(plan, Profile.read(PROFILE))
    both = lower(plan, units(MODEL, plan), clip=True, fragments=(0, 1)).traffic()[Lane.OUTER]
    assert amounts["outer across"] == both[Scope.ACROSS] / 4 > 0
    assert amounts["transfers of outer"] > 0


def test_a_damaged_expectation_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "expected.json").write_text("{", encoding="utf-8")
    with pytest.raises(SpecError, match="what a plan is expected to do"):
        read_run(run)
