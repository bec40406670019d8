"""Runs with pipeline stages and tensor-parallel ranks from the command line, and the pages about them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import parallel
from tests.support.small import BATCH, DATA, THINWIRE, TORCHRUN, records, thinwire, write_text
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import thinwire as tw
from thinwire.cli.main import app
from thinwire.spec.factor import Factor
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.testing import RankPool, run_ranks
from thinwire.train.data.packing import prepare
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.loop import StopRequest, train_rank
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.llama import Llama, LlamaBlock, LlamaConfig

pytestmark = pytest.mark.ranks

STEPS, SAVED = 4, 2

RECIPE = f"""
plan = {{ preset = "zero1", compute_dtype = "float32", tp = 2, pp = 2, micro_batch = 2 }}
[model]
layers = 4
hidden = 32
heads = 2
ffn = 48
{DATA}[train]
steps = {STEPS}
{BATCH}validate_every = 2
validation_samples = 6
[optimizer]
lr = 1e-2
warmup = 2
[checkpoint]
every = {SAVED}
[cluster]
nproc = 4
timeout = "60s"
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("grids")
    write_text(directory / "text.txt", words=200)
    (directory / "recipe.toml").write_text(RECIPE)
    return directory / "recipe.toml"


def trained(recipe: Path, name: str, *arguments: str, launcher: Sequence[str] = THINWIRE) -> str:
    """Train, and return the output."""
    return thinwire("train", str(recipe), "--out", str(recipe.parent / name), *arguments, launcher=launcher)


def goes_on(recipe: Path, directory: Path, mesh: Factor, settings: tuple[str, ...], node_ranks: int) -> None:
    """Be one rank of a run that continues on another grid."""
    chosen = Recipe.read(recipe, settings)
    plan = PlanTemplate.read(chosen).resolve(mesh)
    run = ResolvedRun(chosen, plan, RunDirectory(directory), node_ranks, resume=True)
    with StopRequest(run.directory.stop_file, launched=True) as stop:
        train_rank(run, prepare(chosen.data), torch.device("cpu"), stop)


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """A run on the recipe's grid; its output is in a text file next to it."""
    (recipe.parent / "whole.txt").write_text(trained(recipe, "whole"))
    return recipe.parent / "whole"


def test_a_run_over_a_grid(whole: Path) -> None:
    output = whole.with_suffix(".txt").read_text()
    assert "tp 2; pp 2" in output
    assert "inside nodes, 0 B across" in output
    assert "not counting" not in output
    lines = records(whole)
    assert lines[-1]["loss"] < lines[0]["loss"]
    for axis in ("tp", "pp"):
        assert all(record["bytes"][axis]["inside"] > 0 for record in lines)
        assert all(0.0 < record["exposed"][axis] < record["step_seconds"] for record in lines)


@pytest.mark.slow
def test_a_run_continues_on_another_grid(recipe: Path, whole: Path) -> None:
    expected = records(whole)
    other = recipe.parent / "other"
    shutil.copytree(whole, other)
    shutil.rmtree(other / "checkpoints" / f"step-{STEPS:08d}")
    # Two data-parallel ranks in each of two stages, a stage a node.
    settings = ("plan.tp=1", "plan.schedule=interleaved", "cluster.nodes=2", "cluster.nproc=2")
    run_ranks(4, goes_on, recipe, other, Factor(local=2), settings, 2)
    lines = records(other)
    for name in ("loss", "grad_norm"):
        assert [r[name] for r in lines] == pytest.approx([r[name] for r in expected], rel=2e-4)
    assert lines[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=2e-4)
    assert lines[SAVED - 1] == expected[SAVED - 1]
    sent = lines[-1]["bytes"]
    assert sent["pp"]["across"] > 0 == sent["pp"]["inside"]
    assert sent["reduce"]["inside"] > 0
    assert "tp" not in sent


@pytest.mark.slow
def test_a_run_goes_on_without_sequence_parallelism(recipe: Path, whole: Path) -> None:
    expected, other = records(whole), recipe.parent / "all-reduces"
    shutil.copytree(whole, other)
    shutil.rmtree(other / "checkpoints" / f"step-{STEPS:08d}")
    run_ranks(4, goes_on, recipe, other, Factor(), ("plan.sequence_parallel=false",), 4)
    lines = records(other)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=2e-6)
    assert lines[-1]["val_loss"] == pytest.approx(expected[-1]["val_loss"], rel=2e-6)
    # Between stages, each of the two ranks now sends all tokens.
    assert lines[-1]["bytes"]["pp"]["inside"] == 2 * expected[-1]["bytes"]["pp"]["inside"]


@pytest.mark.slow
def test_eight_ranks_under_torchrun_and_a_plan_file(recipe: Path) -> None:
    plan = tw.Plan.preset(
        "zero2", nodes=1, local=2, tp=2, pp=2, compute_dtype="float32", wire={"policy": "zhybrid:24-8"}
    )
    plan.with_(schedule="interleaved").save(recipe.parent / "plan.toml")
    torchrun = (*TORCHRUN, "--nproc-per-node", "8")
    # torchrun takes --nproc for the short form of one of its own options.
    settings = ("--nodes", "2", "--set", "cluster.nproc=4", "--plan", str(recipe.parent / "plan.toml"))
    output = trained(recipe, "three", *settings, launcher=(*torchrun, "-m", "thinwire.cli.main"))
    assert "interleaved" in output
    sent = records(recipe.parent / "three")[-1]["bytes"]
    assert sent["tp"]["inside"] > 0 == sent["tp"]["across"]
    assert sent["pp"]["across"] > 0 == sent["pp"]["inside"]
    output = trained(recipe, "three", "--resume", "--nproc", "2", "--set", "plan.tp=1", "--set", "plan.pp=1",
                     "--set", f"train.steps={STEPS + 2}")  # fmt: skip
    assert "resumed from" in output
    losses = [record["loss"] for record in records(recipe.parent / "three")]
    assert len(losses) == STEPS + 2
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["plan.tp=3"], "--nodes 1 --nproc 6 would do"),
        (["plan.micro_batch=8", "train.global_batch=1"], "set it to a multiple of 2"),
        (["train.seq=15"], "seq = 15 should be a multiple of plan.tp = 2"),
    ],
)
def test_impossible_settings_are_refused_before_ranks_start(recipe: Path, settings: list[str], message: str) -> None:
    out = recipe.parent / "never"
    changes = [word for setting in settings for word in ("--set", setting)]
    result = CliRunner().invoke(app, ["train", str(recipe), "--out", str(out), *changes])
    assert result.exit_code == 1
    assert message in result.stderr
    assert not out.exists()


def rank_counts(plan: tw.Plan, own: bool) -> list[int]:
    """How often each block of this rank runs in a step."""
    config = LlamaConfig(vocab=32, hidden=16, layers=4, heads=2, kv_heads=2, ffn=24, seq=8)
    ran: dict[LlamaBlock, int] = {}
    forward = LlamaBlock.forward

    def counted(self: LlamaBlock, *inputs: Any) -> torch.Tensor:
        ran[self] = ran.get(self, 0) + 1
        return forward(self, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaBlock, "forward", counted)
        whole = Llama(config)
        for block in whole.layers if own else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        model = tw.parallelize(whole, plan, loss=cross_entropy)
        tokens = torch.arange(9).expand(1, 9) % 32
        batch = parallel.Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        model.step([batch] * plan.micro_batches)
    return list(ran.values())


@pytest.mark.slow
@pytest.mark.parametrize("ways", [{}, {"tp": 2}, {"pp": 2}], ids=["data", "tp", "pp"])
@pytest.mark.parametrize("own", [False, True], ids=["", "model-too"])
def test_recomputed_blocks_run_twice(ways: dict[str, int], own: bool) -> None:
    """Once forward, once again in backward, also where the model recomputes by itself."""
    local = 1 if ways else 2
    for recompute in (False, True):
        plan = tw.Plan.preset("zero1", nodes=1, local=local, micro_batches=2, recompute=recompute, **ways)
        times = 2 * (2 if recompute or own else 1)
        for ran in run_ranks(2, rank_counts, plan, own):
            assert ran == [times] * (2 if "pp" in ways else 4)


@pytest.mark.parametrize("policy", ["none", "hybrid"])
@pytest.mark.slow
def test_the_example_learns(policy: str) -> None:
    pool = RankPool(4)  # ranks of their own: torch remembers the meshes of a process's earlier jobs
    try:
        results = pool.run(parallel.train, policy, 6)
    finally:
        pool.close()
    losses = results[3][0]
    assert losses[-1] < losses[0] - 0.05
    for _, traffic in results:
        assert traffic["tp"].codecs == traffic["pp"].codecs == ({"int8:256"} if policy == "hybrid" else set())
