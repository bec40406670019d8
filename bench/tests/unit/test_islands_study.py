"""The study of islands: its arms as systems, time to a loss, what was measured in files, and the loop for peers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.lab.cluster import needs_lab
from torch import nn
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.errors import SpecError, UsageError
from thinwire.spec import Plan
from thinwire.spec.factor import Factor
from thinwire.spec.recipe import Recipe
from thinwire.train.directory import RunDirectory
from thinwire_bench.peers.catalog import MODELS, named_plan
from thinwire_bench.peers.inner import MuonWithAdamW, muon_groups
from thinwire_bench.peers.interface import SystemKind
from thinwire_bench.peers.workload import batches, make_model
from thinwire_bench.study.arms import LossStudy, StudyRun
from thinwire_bench.study.curves import Curve, Curves
from thinwire_bench.study.islands import (
    ALONE,
    ArmTime,
    arm_times,
    by_ranks,
    reached,
    reached_steps,
    step_systems,
    target_loss,
    timed_systems,
)
from thinwire_bench.study.islands_chart import draw
from thinwire_bench.study.islands_sheets import goal_sheet, plain, reached_sheet, step_sheets, time_sheet
from thinwire_bench.study.islands_times import TimeFile
from thinwire_bench.study.loop import Loop
from thinwire_bench.study.queue import Queue
from thinwire_bench.systems.rows import SystemRow

ROOT = Path(__file__).parents[3]
STUDY = ROOT / "recipes/islands/study.toml"

needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed: run `make bench-peers`"
)


@pytest.fixture(scope="module")
def study() -> LossStudy:
    return LossStudy.read(STUDY, {})


def curve(run: StudyRun, losses: dict[int, float]) -> Curve:
    """A run with validations at some steps."""
    record: dict[str, Any] = {"loss": 4.0, "grad_norm": 1.0, "lr": 0.1, "skipped": False}
    records = [{**record, "step": step, "tokens": 1024 * step, "val_loss": loss} for step, loss in losses.items()]
    loop = None if run.loop is None else run.loop.to_dict()
    versions = {"torch": "2", "thinwire": "0"}
    about = run.recipe.to_dict(), run.plan.to_dict(), "tokens", versions, False
    trunk = None if run.trunk is None else run.trunk.seed
    return Curve(run.arm, run.seed, *about, records, loop, run.trunk_steps, trunk)


def row(system: str, bandwidth: str, step_ms: float, sent: float = 1e6) -> SystemRow:
    values: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(SystemRow)}
    spread = {"step_ms": step_ms, "step_ms_min": 0.9 * step_ms, "step_ms_max": 1.1 * step_ms, "samples": (step_ms,)}
    kept = {"kind": SystemKind.CHANGED, "refused": None, "waited_ms": {}, "by_axis": {}, "clip": None}
    return SystemRow(**{**values, **kept, **spread, "system": system, "bandwidth": bandwidth, "internode_bytes": sent})


def test_arms_train_on_the_same_samples_whatever_their_islands(study: LossStudy) -> None:
    runs = {run.arm: run for run in study.runs}
    assert len(study.spec.seeds) >= 5
    assert {run.recipe.train.global_batch for run in study.runs} == {128}
    for run in runs.values():
        assert run.plan.data_ranks * run.plan.micro_batch * run.plan.micro_batches == 128, run.arm
        assert run.plan.data_ranks == run.recipe.cluster.without_gpu.ranks
        if run.plan.islands is not None:
            assert run.steps % run.plan.islands.every == 0, "the last step ends with an exchange"
            assert run.trunk_steps % run.plan.islands.every == 0, "and so does the first"
        assert run.trunk_steps == 384
        assert (run.trunk is None) == (run.name == "exact-seed0")
        assert run.trunk is None or run.trunk.name == "exact-seed0"
    counts = {(runs[arm].plan.num_islands, runs[arm].plan.islands.every) for arm in runs if "islands-" in arm}  # type: ignore[union-attr]
    assert {(islands, every) for islands in (2, 4, 8) for every in (8, 32, 128)} <= counts
    assert runs["islands-muon"].loop == Loop(inner="muon")
    assert runs["torchft-diloco"].loop == Loop(system="diloco", outer_lr=1.0, outer_momentum=0.0)
    outers = {(i.outer.lr, i.outer.momentum) for run in study.runs if (i := run.plan.islands) is not None}
    assert outers == {(1.0, 0.0)}, "torchft's and ours take the mean"
    assert runs["torchft-diloco"].loop.every == runs["islands-32"].plan.islands.every  # type: ignore[union-attr]


def test_arms_are_timed_on_as_many_hosts_as_they_have_nodes(study: LossStudy) -> None:
    groups = by_ranks(study)
    assert {ranks.nodes for ranks in groups} == {2, 4, 8}
    assert sum(len(runs) for runs in groups.values()) == len(study.spec.arms)
    runs = groups[Factor(nodes=4)]
    ours = [run for run in runs if run.loop is None or run.loop.system in ("plan", "ddp", "powersgd")]
    systems = {system.label: system for system in timed_systems(ours)}
    assert list(systems)[:2] == ["local", ALONE]
    assert set(systems) == {"local", ALONE, *(run.arm for run in ours)}
    assert {system.options["sequences"] for system in systems.values()} == {32}
    assert (systems["exact"].cycle, systems["islands-128"].cycle, systems[ALONE].cycle) == (1, 128, 1)
    assert (systems["islands-streaming"].cycle, systems["islands-streaming"].gap) == (32, 8)
    assert Plan.from_toml(systems["islands-4bit"].options["plan"]) == next(
        run.plan for run in runs if run.arm == "islands-4bit"
    )
    assert systems["islands-muon"].options["inner"] == "muon"


@needs_torchft
def test_peers_are_timed_as_they_train(study: LossStudy) -> None:
    runs = [run for run in study.runs if run.seed == 0 and run.loop is not None and run.loop.system == "diloco"]
    systems = {system.label: system for system in timed_systems(runs)}
    streaming = systems["torchft-streaming"]
    assert (streaming.cycle, streaming.gap, streaming.options["fragments"], streaming.options["delay"]) == (32, 8, 4, 5)
    assert [system.label for system in step_systems(Factor(nodes=2), {"model": "llama-1m", "seq": 8})][-3:] == [
        "tw:islands", "tw:islands-4bit", "tw:islands-streaming",
    ]  # fmt: skip


def test_a_loss_is_reached_between_two_validations(study: LossStudy) -> None:
    run = study.runs[0]
    made = dataclasses.replace(curve(run, {64: 5.0, 128: 4.0, 192: 4.2, 256: 3.0}), trunk_steps=0)
    assert reached_steps(made, 4.5) == 96.0
    assert reached_steps(made, 3.6) == 224.0
    assert reached_steps(made, 5.5) == 64.0, "at the first validation"
    assert reached_steps(made, 2.9) is None
    assert reached_steps(dataclasses.replace(made, trunk_steps=64), 3.6) == 160.0, "counted from the trunk on"


def test_time_to_a_loss_has_intervals_over_seeds(study: LossStudy) -> None:
    ends = {"exact": 0.0, "islands-32": 0.005, "torchft-diloco": 0.008, "islands-128": 1.0}
    made = [curve(run, {448: 5.0, 512: 3.0 + ends[run.arm] + run.seed / 1000}) for run in study.runs if run.arm in ends]
    target = target_loss(study.spec, made)
    assert target == pytest.approx(1.005 * 3.002)
    times = [ArmTime("exact", "50mbit", 1.0, 1.0, 1.0, 1e6), ArmTime("islands-32", "50mbit", 0.1, 0.1, 0.1, 1e4)]
    times += [ArmTime(arm, "50mbit", 0.2, 0.2, 0.2, 1e4) for arm in ("torchft-diloco", "islands-128")]
    when = {one.arm: one for one in reached(study.spec, made, times, target)}
    assert when["exact"].seconds[0] == pytest.approx(64 + 64 * (5 - target) / 2.0)
    assert when["islands-32"].mean == pytest.approx(12.8, rel=0.02)
    assert 0.0 < when["islands-32"].half_width < 0.1  # type: ignore[operator]
    assert (when["islands-128"].mean, when["islands-128"].half_width) == (None, None)
    sheet = reached_sheet(study, list(when.values()), target)
    cells = {line[0]: line[1] for line in sheet.rows}
    assert cells["islands-128"] == "not with seed 0, 1, 2, 3, 4"
    assert "±" in cells["exact"]
    goals = {line[0]: line[3] for line in goal_sheet(study.spec, [], list(when.values())).rows}  # type: ignore[union-attr]
    assert goals == {"islands-32 reaches the loss before torchft-diloco, 50mbit": "reached"}
    assert json.loads(json.dumps(plain(list(when.values()), target)))["reached"][0]["arm"] == "exact"
    assert target_loss(study.spec, made[1:2]) is None


def test_goals_for_steps_are_missed_and_reached(study: LossStudy) -> None:
    def goals(fast: float, sent: float) -> list[str]:
        rows = [row(ALONE, "200mbit", 100.0), row("tw:islands-4bit", "200mbit", fast, sent)]
        rows += [row("tw:islands", "200mbit", 300.0, 8e6)]
        rows += [row("tw:thinwire", "50mbit", 1700.0), row("tw:islands-4bit", "50mbit", 3 * fast, sent)]
        return [line[3] for line in goal_sheet(study.spec, rows, []).rows]  # type: ignore[union-attr]

    assert goals(110.0, 0.29 * 2**20) == ["reached", "reached", "reached"]
    assert goals(116.0, 0.31 * 2**20) == ["missed", "missed", "missed"]
    assert goal_sheet(study.spec, [], []) is None


def test_tables_and_picture_have_every_arm_that_was_measured(study: LossStudy, tmp_path: Path) -> None:
    rows = [row(ALONE, link, 50.0) for link in ("50mbit", "1gbit")]
    rows += [row("islands-32", link, 60.0, 2e5) for link in ("50mbit", "1gbit")]
    times = arm_times(rows)
    ranks_of = {run.arm: ranks for ranks, runs in by_ranks(study).items() for run in runs}
    sheet = time_sheet(study.spec, {Factor(nodes=4): times}, ranks_of)
    assert sheet.rows == [["islands-32", "4", "195.3 KiB", "60.0 (1.20)", "60.0 (1.20)"]]
    assert [table.rows[1][4] for table in step_sheets(rows)] == ["1.20", "1.20"]
    made = [curve(run, {448: 5.0, 512: 3.0 + run.seed / 10}) for run in study.runs if run.arm == "islands-32"]
    draw(study.spec, made, times, 3.5, tmp_path / "islands.png")
    assert (tmp_path / "islands.png").read_bytes().startswith(b"\x89PNG")


def test_times_of_other_systems_are_not_mixed_in(study: LossStudy, tmp_path: Path) -> None:
    systems = timed_systems(list(study.runs[:2]))
    file = TimeFile(tmp_path / "times.json", systems)
    assert file.read() == []
    rows = [row(system.label, "50mbit", 10.0) for system in systems]
    file.path.write_text(json.dumps(file.content(rows)))
    assert [one.system for one in file.read()] == [system.label for system in systems]
    fewer = [system for system in systems if system.label != "thinwire"]
    assert [one.system for one in TimeFile(file.path, fewer).read()] == [system.label for system in fewer]
    file.path.write_text(json.dumps(TimeFile(file.path, fewer).content(rows[:-1])))
    assert [one.system for one in file.read()] == [system.label for system in fewer], "an arm that was not timed"
    changed = dataclasses.replace(systems[2], cycle=7)
    with pytest.raises(UsageError, match=r"other systems \(exact\)"):
        TimeFile(file.path, [*systems[:2], changed]).read()
    file.path.write_text("{}")
    with pytest.raises(UsageError, match="holds no times"):
        file.read()


def test_a_run_of_another_loop_is_not_taken_for_this_one(study: LossStudy, tmp_path: Path) -> None:
    run = next(run for run in study.runs if run.arm == "torchft-diloco")
    curves = Curves(tmp_path / "results")
    queue = Queue(study, curves, tmp_path, Console(quiet=True))
    command = queue._command(run, RunDirectory(tmp_path / run.name))
    assert command[2] == "thinwire_bench.study.loops"
    assert Loop.parse(json.loads(Path(command[4]).read_text())) == run.loop
    directory = RunDirectory(tmp_path / run.name)
    directory.open(run.recipe, run.plan, {"torch": "2"})
    (directory.path / "loop.json").write_text(json.dumps(Loop(system="local-sgd").to_dict()))
    with pytest.raises(UsageError, match="holds another run"):
        queue._belongs(run, directory)
    other = dataclasses.replace(run, loop=Loop(system="diloco", every=8))
    curve(other, {512: 3.0}).save(curves.path(run))
    with pytest.raises(UsageError, match=r"another way.*loop\.every"):
        curves.read([run])


def test_one_optimizer_is_torchs_two() -> None:
    def trained(combined: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)]), "head": nn.Linear(8, 4)})
        parameters = dict(model.named_parameters())
        bare = [name for name, p in parameters.items() if p.ndim < 2]
        groups = [
            {**group, "params": [parameters[name] for name in group["params"]]} for group in muon_groups(model, bare)
        ]
        assert [len(group["params"]) for group in groups] == [1, 1, 4]
        if combined:
            optims: list[torch.optim.Optimizer] = [MuonWithAdamW(groups, lr=0.1)]
        else:
            muon, rest = groups[0]["params"], [{k: v for k, v in g.items() if k != "muon"} for g in groups[1:]]
            settings: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}
            optims = [
                torch.optim.Muon(muon, lr=0.1, weight_decay=0.1, **settings),
                torch.optim.AdamW(rest, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
            ]
        for step in range(3):
            for optim in optims:
                for group in optim.param_groups:
                    group["lr"] = 0.1 / (step + 1)
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
            model["head"](model["layers"][1](model["layers"][0](x))).square().sum().backward()
            for optim in optims:
                optim.step()
                optim.zero_grad()
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_workload_takes_a_model_and_several_sequences() -> None:
    fields = {**MODELS["llama-1m"], "vocab": 512}
    options = {"model": fields, "seq": 8, "sequences": 3}
    ids = next(batches(options, 0))
    assert ids.shape == (3, 9)
    assert int(ids.max()) < 512
    assert make_model(options).config.vocab == 512
    assert torch.equal(
        next(batches({"model": "llama-1m", "seq": 8}, 0)), next(batches({"model": "llama-17m", "seq": 8}, 0))
    )


def test_plans_of_islands_fill_the_lab(tmp_path: Path) -> None:
    assert named_plan("islands", 4, 2).num_islands == 4
    four = tmp_path / "four.toml"
    four.write_text(Plan.preset("islands", nodes=4, local=1).to_toml())
    with pytest.raises(SpecError, match="with 4 islands is not that of --nodes 2"):
        named_plan(str(four), 2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "loss,speed"], "there is no part 'speed'; valid are none, loss, times, steps"),
        (["--arms", "exact"], "name its directory with --results"),
        (["--arms", "exact,island", "--results", "x"], "there is no arm 'island'; valid are exact, thinwire"),
        (["--arms", "thinwire", "--results", "x"], "baseline names 'exact', which is no arm"),
        (["--seeds", "a", "--results", "x"], "'a' is not a list of whole numbers"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "islands", *options])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())


def small(plan: dict[str, Any]) -> Recipe:
    recipe = Recipe.read(STUDY.parent / "llama-150k.toml", ["cluster.without_gpu.nodes=2", "train.global_batch=4"])
    train = recipe.train.with_(steps=12, validate_every=6, validation_samples=8)
    model = recipe.model.with_(layers=1, hidden=32, heads=2, ffn=64)
    return recipe.with_(plan=plan, train=train, model=model)


def train(recipe: Recipe, loop: Loop, directory: RunDirectory) -> None:
    """As the queue does, in a process of its own."""
    files = [directory.path.with_suffix(".toml"), directory.path.with_suffix(".json")]
    files[0].write_text(recipe.to_toml())
    files[1].write_text(json.dumps(loop.to_dict()))
    command = [sys.executable, "-m", "thinwire_bench.study.loops", *map(str, files), str(directory.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr


def losses(directory: RunDirectory) -> list[tuple[float, float | None]]:
    records = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
    return [(record["loss"], record["val_loss"]) for record in records]


@pytest.mark.slow
def test_the_loop_trains_as_thinwire_train_does(tmp_path: Path) -> None:
    recipe = small({"preset": "islands-4bit", "islands": {"every": 4}})
    ours = RunDirectory(tmp_path / "loop")
    train(recipe, Loop(), ours)
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    command = ["train", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "train")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert losses(ours) == losses(RunDirectory(tmp_path / "train"))


@needs_torchft
@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "lr", "momentum"),
    [(4, 0.7, 0.9), (5, 1.0, 0.0)],
    ids=["ends with an exchange", "ends with the mean between two"],
)
def test_torchft_and_our_islands_are_one_algorithm(tmp_path: Path, every: int, lr: float, momentum: float) -> None:
    """In fp32, where only the order of additions differs."""
    ours, theirs = RunDirectory(tmp_path / "ours"), RunDirectory(tmp_path / "theirs")
    islands = {"every": every, "outer": {"lr": lr, "momentum": momentum, **({} if momentum else {"name": "sgd"})}}
    train(small({"preset": "islands", "compute_dtype": "float32", "islands": islands}), Loop(), ours)
    loop = Loop(system="diloco", every=every, outer_lr=lr, outer_momentum=momentum)
    train(small({"preset": "ddp", "compute_dtype": "float32"}), loop, theirs)
    for own, other in zip(losses(ours), losses(theirs), strict=True):
        assert own[0] == pytest.approx(other[0], rel=1e-5)
        assert own[1] == (None if other[1] is None else pytest.approx(other[1], rel=1e-5))


TRUNK = """
recipe = "recipe.toml"
tokens = 3072
trunk = 0.5
seeds = [0]
baseline = "exact"

[[arms]]
name = "exact"
plan = { preset = "ddp", compute_dtype = "float32" }

[[arms]]
name = "islands"
plan = { preset = "islands", compute_dtype = "float32", islands = { every = 3 } }

[[arms]]
name = "loop"
plan = { preset = "islands", compute_dtype = "float32", islands = { every = 3 } }
loop = {}

[[arms]]
name = "muon"
plan = { preset = "islands", compute_dtype = "float32", islands = { every = 3 } }
loop = { inner = "muon" }

[[arms]]
name = "torchft"
plan = { preset = "ddp", compute_dtype = "float32" }
loop = { system = "diloco", every = 3 }

[[arms]]
name = "replicas"
plan = { preset = "ddp", compute_dtype = "float32" }
loop = { system = "ddp" }
"""


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arms_branch_from_a_trunk(tmp_path: Path) -> None:
    """With parameters and moments of the trunk, in which torch's DDP and torchft go on as thinwire does."""
    (tmp_path / "recipe.toml").write_text(small({"preset": "ddp"}).to_toml())
    (tmp_path / "study.toml").write_text(TRUNK)
    study = LossStudy.read(tmp_path / "study.toml", {})
    curves = Curves(tmp_path / "results")
    assert Queue(study, curves, tmp_path / "work", Console(quiet=True)).run()
    made = {one.arm: one for one in curves.read(study.runs)}
    assert [record["step"] for record in made["exact"].records] == list(range(1, 13))
    after = {name: [record["loss"] for record in one.records if record["step"] > 6] for name, one in made.items()}
    for name, one in made.items():
        assert one.trunk_steps == 6
        assert one.records[-1]["step"] == 12
        assert name == "exact" or one.records[0]["step"] == 7
        rounds = 1e-3 if name == "replicas" else 1e-6  # these compute in bf16, under autocast
        assert after[name][0] == pytest.approx(after["exact"][0], rel=rounds), f"{name} before its first update"
    assert after["loop"] == pytest.approx(after["islands"], rel=1e-6)
    assert after["torchft"] == pytest.approx(after["islands"], rel=1e-5)
    assert after["replicas"] == pytest.approx(after["exact"], rel=1e-3)
    assert after["islands"][1:] != pytest.approx(after["exact"][1:], rel=1e-5)
    other = LossStudy.read(tmp_path / "study.toml", {"trunk": 0.25})
    with pytest.raises(UsageError, match=r"another way.*trunk"):
        curves.read([run for run in other.runs if run.arm != "exact"])
    curves.path(next(run for run in study.runs if run.arm == "islands")).unlink()
    elsewhere = Queue(study, curves, tmp_path / "elsewhere", Console(quiet=True))
    assert elsewhere.run()
    assert not (tmp_path / "elsewhere/exact-seed0").exists(), "the trunk is beside the results"
    again = next(one for one in curves.read(study.runs) if one.arm == "islands")
    assert again == made["islands"]


def test_runs_from_two_trunks_are_not_compared(study: LossStudy, tmp_path: Path) -> None:
    curves = Curves(tmp_path)
    runs = [run for run in study.runs if run.arm == "islands-32" and run.seed < 2]
    for run, checksum in zip(runs, ("one", "other"), strict=True):
        dataclasses.replace(curve(run, {512: 3.0}), trunk_checksum=checksum).save(curves.path(run))
        assert len(curves.read([run])) == 1
    with pytest.raises(UsageError, match="2 different trunks of seed 0"):
        curves.read(runs)


@needs_torchft
@needs_lab
@pytest.mark.slow
def test_two_arms_from_the_start_to_the_page(tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", tmp_path / "out.json"
    page.write_text("<!-- results: begin (written by `thinwire bench islands --page`) -->\n<!-- results: end -->\n")
    brief = ["--seeds", "0", "--tokens", "16384", "--rounds", "1", "--steps", "1", "--bandwidth", "200mbit"]
    place = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--json", str(out)]
    model = ["--model", "llama-1m", "--seq", "16", "--plot", str(tmp_path / "out.png"), "--page", str(page)]
    arms = ["--arms", "exact,torchft-diloco"]
    done = CliRunner().invoke(app, ["bench", "islands", str(STUDY), *arms, *brief, *place, *model])
    assert done.exit_code == 0, done.output
    results = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert results == [
        "exact-seed0.jsonl", "steps-llama-1m-2x1-200mbit.json", "times-4x1-200mbit.json", "torchft-diloco-seed0.jsonl",
        "trunk-seed0",
    ]  # fmt: skip
    rows = {one["system"]: one for one in json.loads((tmp_path / "results/times-4x1-200mbit.json").read_text())["rows"]}
    assert 0 < rows["torchft-diloco"]["internode_bytes"] < rows["exact"]["internode_bytes"] / 8
    assert rows[ALONE]["internode_bytes"] == 0
    measured = json.loads((tmp_path / "results/steps-llama-1m-2x1-200mbit.json").read_text())
    steps = {one["system"]: one for one in measured["rows"]}
    for preset in ("tw:islands", "tw:islands-4bit", "tw:islands-streaming"):
        assert 1.0 < steps[preset]["internode_bytes"] / steps[preset]["predicted_bytes"] < 1.05, preset
    assert [one["arm"] for one in json.loads(out.read_text())["reached"]] == ["exact", "torchft-diloco"]
    assert "Time to a validation loss" in page.read_text()
    again = CliRunner().invoke(app, ["bench", "islands", str(STUDY), *arms, *brief, *place, *model, "--parts", "none"])
    assert again.exit_code == 0, again.output
