"""``--plan auto`` on real ranks: a run executes what the search chose, in every field."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.paths import ROOT
from tests.support.small import DATA, records, thinwire, write_text

import thinwire.plan as planner
from thinwire.spec import Plan
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe
from thinwire.train.data.packing import prepare

pytestmark = pytest.mark.ranks

PROFILE = ROOT / "docs" / "results" / "planner" / "profile-200mbit.json"

RECIPE = f"""
plan = {{ preset = "zero1", compute_dtype = "float32", bucket_bytes = "1MiB" }}
[model]
layers = 4
hidden = 32
heads = 2
ffn = 48
{DATA}[train]
steps = 2
seq = 32
micro_batch = 2
micro_batches = 2
validate_every = 0
validation_samples = 4
[cluster]
nodes = 2
nproc = 2
timeout = "60s"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("auto")
    write_text(directory / "text.txt", words=400)
    (directory / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return directory / "recipe.toml"


def answer(recipe: Path, profile: Path, codecs: planner.CodecLevel, *, recompute: bool | None = None) -> Plan:
    """What the search answers for the recipe, apart from any run."""
    read = Recipe.read(recipe, [])
    shape = read.model.shape(vocab=prepare(read.data).vocab, seq=32)
    own = Plan.preset("zero1", nodes=2, local=2, compute_dtype="float32", micro_batches=4)
    free = planner.Freedom(cuts=True, codecs=codecs, recompute=recompute)
    job = planner.profiled_job(shape, 32, own, Profile.read(profile), clip=read.optimizer.clip is not None, free=free)
    return planner.choose(job, own, "--plan auto", free=free).plan


def train(recipe: Path, name: str, *arguments: str) -> tuple[Plan, str]:
    """The plan of a run that has ended, and its output."""
    out = recipe.parent / name
    output = thinwire("train", str(recipe), "--out", str(out), *arguments)
    tokens = {row["tokens"] - before["tokens"] for before, row in itertools.pairwise(records(out))}
    assert tokens <= {4 * 4 * 32}
    return Plan.load(out / "plan.toml"), output


def test_a_run_trains_as_the_search_chose(recipe: Path) -> None:
    """With consent to lossy codecs; the batch of the recipe is divided anew, and its buckets are replaced."""
    plan, output = train(recipe, "chosen", "--plan", "auto", "--profile", str(PROFILE), "--codecs", "standard")
    want = answer(recipe, PROFILE, "standard")
    assert plan == want
    assert (plan.micro_batch, plan.micro_batches) != (2, 2)
    assert not plan.wire.is_none
    assert "lossy codecs, as --codecs standard allows: " in output
    assert "auto decides bucket_bytes: " in output


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_chosen(recipe: Path) -> None:
    want, _ = train(recipe, "kept", "--plan", "auto", "--profile", str(PROFILE), "--codecs", "standard")
    again, output = train(recipe, "kept", "--plan", "auto", "--resume", "--set", "train.steps=3")
    assert again == want
    assert "auto:" not in output


@pytest.mark.slow
def test_a_run_is_cut_where_no_data_parallel_plan_fits(recipe: Path) -> None:
    """Tensor or pipeline parallelism and recomputation, under a cap on memory."""
    read, profile = Recipe.read(recipe, []), Profile.read(PROFILE)
    shape = read.model.shape(vocab=prepare(read.data).vocab, seq=32)
    own = Plan.preset("zero1", nodes=2, local=2, compute_dtype="float32", micro_batches=4)
    free = planner.Freedom(cuts=True, recompute=True)
    job = planner.profiled_job(shape, 32, own, profile, clip=read.optimizer.clip is not None, free=free)
    room = planner.Search(job).smallest()[1].total - 1
    tight = recipe.parent / "tight.json"
    tight.write_text(json.dumps(profile.with_(memory=room, memory_margin=0.0).to_dict()), encoding="utf-8")
    plan, _ = train(recipe, "cut", "--plan", "auto", "--profile", str(tight), "--set", "plan.recompute=true")
    assert plan == answer(recipe, tight, "lossless", recompute=True)
    assert plan.tp * plan.pp > 1
    assert plan.recompute


@pytest.mark.slow
def test_options_of_auto_need_auto(recipe: Path) -> None:
    command = [sys.executable, "-m", "thinwire.cli.main", "train", str(recipe), "--codecs", "standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert "--codecs standard requires --plan auto" in " ".join(done.stderr.split())
