"""The part of a step that was most wrong is named, on ranks whose link, codec or processor is slow."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
from tests.support.paths import ROOT
from tests.support.small import DATA, write_text
from typer.testing import CliRunner

import thinwire.plan as planner
from thinwire.cli.main import app
from thinwire.parallel import ParallelModel
from thinwire.plan.after.culprit import measured_parts, slow_stretch
from thinwire.record import read_run
from thinwire.sharding.lanes.lanes import ThreadWorker, Ticket
from thinwire.sharding.lanes.streams import Body
from thinwire.spec import Plan
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe
from thinwire.testing import run_ranks
from thinwire.train.data.packing import prepare
from thinwire.train.directory import RunDirectory
from thinwire.train.environment import versions
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.processes.worker import train

pytestmark = pytest.mark.ranks

PROFILE = ROOT / "docs" / "results" / "planner" / "profile-200mbit.json"
Slow = Literal["link", "codec", "rank"]
SLEEP = 0.3
"""Seconds that a step loses: far more than a busy machine takes."""
FIRST, LAST = 16, 30
"""Steps during which the link is slow."""

RECIPE = f"""
plan = {{ preset = "thinwire", compute_dtype = "float32" }}
[model]
layers = 2
hidden = 32
heads = 2
ffn = 48
{DATA}[train]
steps = 40
seq = 32
global_batch = 16
validate_every = 0
validation_samples = 4
tensorboard = false
[checkpoint]
background = false
[cluster]
device = "cpu"
timeout = "60s"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("culprit")
    write_text(directory / "text.txt", words=400)
    (directory / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    prepare(Recipe.read(directory / "recipe.toml").data)
    return directory / "recipe.toml"


def disturbed(recipe: str, out: str, slow: Slow, rank: int | None = None) -> None:
    """A whole run on this rank among the others, with something slow."""
    from thinwire.collectives.group import control

    read, mine = Recipe.read(recipe, [] if slow == "link" else ["train.steps=16"]), control().rank
    plan = Plan.preset("thinwire", nodes=2, local=2, compute_dtype="float32", micro_batch=4)
    run = ResolvedRun(read, plan, RunDirectory(Path(out)), node_ranks=2).with_plan(plan)
    if mine == 0:
        shape = read.model.shape(vocab=prepare(read.data).vocab, seq=read.train.seq)
        job = planner.profiled_job(shape, read.train.seq, plan, Profile.read(PROFILE), clip=True)
        expected = planner.expectation(job, planner.price_plan(job, plan))
        run.directory.open(run.recipe, plan, versions(), expected=expected)
    step, make, submit = [0], ParallelModel.step, ThreadWorker.submit

    def stepping(model: ParallelModel, batches: Any) -> Any:
        step[0] += 1
        if slow == "rank" and mine == rank:
            time.sleep(SLEEP)
        return make(model, batches)

    def slowed(worker: ThreadWorker, body: Body, after: Sequence[Ticket], label: str) -> Ticket:
        is_link = slow == "link" and worker.name == "sync gather-across" and FIRST <= step[0] <= LAST
        is_codec = slow == "codec" and worker.name == "reduce encode"

        def late() -> None:
            if is_link or is_codec:
                time.sleep(SLEEP)
            body()

        return submit(worker, late, after, label)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ParallelModel, "step", stepping))
        stack.enter_context(mock.patch.object(ThreadWorker, "submit", slowed))
        # Ranks that sleep need no cores of their own to be compared.
        stack.enter_context(mock.patch("thinwire.train.trainer.shares_cores", return_value=False))
        train(run, launched=False)


def found(recipe: Path, slow: Slow, rank: int | None = None) -> tuple[planner.Culprit, str]:
    """The part that is named, and what ``thinwire report`` prints."""
    out = recipe.parent / slow
    run_ranks(4, disturbed, str(recipe), str(out), slow, rank, timeout=200.0)
    run = read_run(out)
    assert run.expected is not None
    named = planner.culprit(run, planner.compare_expected(run, run.expected))
    assert named is not None
    printed = CliRunner().invoke(app, ["report", str(out)])
    assert printed.exit_code == 0, printed.output
    assert named.sentence in printed.output
    assert named.command in printed.output
    return named, printed.output


def test_a_link_that_was_slow_in_the_middle_is_named_with_its_steps(recipe: Path) -> None:
    named, _ = found(recipe, "link")
    assert named.part == "transfers of sync"
    assert named.stretch is not None
    assert abs(named.stretch[0] - FIRST) <= 2
    assert abs(named.stretch[1] - LAST) <= 2
    assert named.measured - named.expected > SLEEP / 2
    assert "across nodes" in named.sentence
    assert " profile --out " in named.command


@pytest.mark.slow
def test_a_slow_codec_is_named_and_not_what_waits_for_it(recipe: Path) -> None:
    named, _ = found(recipe, "codec")
    assert (named.part, named.stretch) == ("codecs of reduce", None)
    assert named.measured - named.expected > SLEEP / 2


@pytest.mark.slow
def test_a_slow_rank_is_named_and_not_the_transfers_that_wait_for_it(recipe: Path) -> None:
    named, _ = found(recipe, "rank", 2)
    assert (named.part, named.rank) == ("the slowest rank", 2)
    assert named.measured > SLEEP / 2
    assert "thinwire kernels" in named.command


def noisy(number: int, spread: float, slow: range = range(0)) -> tuple[int, int] | None:
    """The stretch that is named where seconds are noise, and twice as many in some records."""
    chance = random.Random(number)
    return stretch(*(chance.lognormvariate(0, spread) * (2 if at in slow else 1) for at in range(200)))


def test_noise_is_no_stretch_and_hides_none() -> None:
    assert [noisy(number, 0.3) for number in range(10)] == [None] * 10
    for number in range(5):
        named = noisy(number, 0.2, range(100, 120))
        assert named is not None
        assert abs(named[0] - 100) + abs(named[1] - 119) <= 6


def test_a_rank_is_named_by_several_records_only() -> None:
    rows = [({"own": {"median": 1.0, "slowest": 2.0, "rank": 1}}, 1)] * 5
    assert [measured_parts(rows[:number], 2)["the slowest rank"] for number in (4, 5)] == [0.0, 1.0]


def stretch(*seconds: float) -> tuple[int, int] | None:
    return slow_stretch([({"step": step, "step_seconds": taken}, 1) for step, taken in enumerate(seconds, 1)])


def test_a_stretch_is_several_records_and_not_all_of_them() -> None:
    assert stretch(*[1.0] * 10, *[2.0] * 5, *[1.0] * 10) == (10, 14)
    assert stretch(*[1.0] * 20, *[1.5] * 8) == (20, 27)
    assert stretch(*[1.0] * 10, 50.0, *[1.0] * 10) is None
    assert stretch(*[1.0, 1.1] * 15) is None
    assert stretch(1.0, *[3.0] * 30) is None
