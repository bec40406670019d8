"""One rank's trainer in this process: skipped steps, measurements, positions."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional

import thinwire as tw
from thinwire.cli.training.train import summary_table
from thinwire.collectives import group
from thinwire.errors import DataError, NonFiniteError, UsageError
from thinwire.parallel import ParallelModel
from thinwire.program import Lane, Scope
from thinwire.record import read_run
from thinwire.sharding import api
from thinwire.spec.factor import Factor
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.testing import check_streams
from thinwire.train.checkpoint import Checkpoint, checkpoints
from thinwire.train.data.packing import Dataset
from thinwire.train.data.tokens import TokenBin
from thinwire.train.directory import RunDirectory
from thinwire.train.export.files import export
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.loop import StopRequest, train_rank
from thinwire.train.observing.metrics import MetricsLog, StepRecord, read, tracked
from thinwire.train.observing.progress import ProgressReport
from thinwire.train.observing.trackers import Trackers
from thinwire.train.trainer import Trainer

RECIPE = """
plan = { preset = "ddp", compute_dtype = "float32" }
[model]
layers = 1
hidden = 16
heads = 2
[train]
steps = 6
seq = 8
micro_batch = 2
micro_batches = 2
validate_every = 4
log_every = 3
peak_tflops = 0.001
[optimizer]
lr = 1e-2
"""


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    group.init("gloo")
    yield
    group.shutdown()


def prepared(directory: Path, *settings: str, fingerprint: str = "x") -> tuple[ResolvedRun, Dataset]:
    (directory / "recipe.toml").write_text(RECIPE)
    recipe = Recipe.read(directory / "recipe.toml", settings)
    tokens = np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint16)
    stream = TokenBin(path=directory / "t.bin", tokens=tokens, vocab=50)
    dataset = Dataset(stream, stream, 50, 3.9, fingerprint, None)
    plan = PlanTemplate.read(recipe).resolve(Factor())
    return ResolvedRun(recipe, plan, RunDirectory(directory), node_ranks=1), dataset


def make(directory: Path, *settings: str, fingerprint: str = "x") -> Trainer:
    return Trainer(*prepared(directory, *settings, fingerprint=fingerprint), torch.device("cpu"))


def trains(run: ResolvedRun, dataset: Dataset) -> dict[str, Any]:
    """Open the directory and train to the end; the summary."""
    run.directory.open(run.recipe, run.plan, {})
    with StopRequest(run.directory.stop_file, launched=True) as stop:
        train_rank(run, dataset, torch.device("cpu"), stop)
    summary: dict[str, Any] = json.loads(run.directory.summary.read_text())
    return summary


def test_a_finished_run_that_is_resumed_keeps_what_it_measured(tmp_path: Path) -> None:
    run, dataset = prepared(tmp_path, "train.steps=2", "train.tensorboard=false")
    summary = trains(run, dataset)
    assert summary["tokens_per_second"] > 0
    again = dataclasses.replace(run, resume=True)
    assert trains(again, dataset) == summary
    longer = dataclasses.replace(again, recipe=run.recipe.with_(train={"steps": 3}))
    assert trains(longer, dataset)["steps"] == 3
    with pytest.raises(UsageError, match=r"train\.steps = 2 is less than the 3 steps of .*; set it to at least 3"):
        trains(again, dataset)


def test_an_island_that_enters_at_the_last_step_of_the_others_validates_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[int] = []
    monkeypatch.setattr(Trainer, "enter_islands", lambda trainer: setattr(trainer.position, "step", 6))
    monkeypatch.setattr(Trainer, "_follow_islands", lambda trainer: None)
    monkeypatch.setattr(ParallelModel, "join_islands", lambda model: joined.append(1))
    run, dataset = prepared(tmp_path, "train.tensorboard=false")
    run = dataclasses.replace(run, plan=run.plan.with_(islands={"count": 2, "elastic": True}))
    assert trains(run, dataset)["final_val_loss"] > 0
    assert [saved.step for saved in checkpoints(run.directory.checkpoints)] == [6]
    assert joined


def test_a_slow_island_that_jumps_over_a_multiple_validates_and_saves(tmp_path: Path) -> None:
    trainer = make(tmp_path, "checkpoint.every=4")
    trainer.position.step = 5
    due = {}
    for trainer._before in (3, 4):
        due[trainer._before] = (trainer.validates, trainer.saves)
    assert due == {3: (True, True), 4: (False, False)}


def test_a_last_validation_of_nan_completes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def validated(trainer: Trainer) -> float:
        trainer.position.val_loss = math.nan
        return math.nan

    run, dataset = prepared(tmp_path, "train.steps=1", "train.tensorboard=false")
    monkeypatch.setattr(Trainer, "validate", validated)
    assert trains(run, dataset)["final_val_loss"] is None
    complete = read_run(tmp_path)
    assert complete.summary is not None
    assert summary_table(complete)


def test_fewer_samples_to_validate_on_than_wanted_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wanted in (249, 250):
        run, dataset = prepared(tmp_path, f"train.validation_samples={wanted}", "train.tensorboard=false")
        trains(dataclasses.replace(run, stream="stdout"), dataset)
        note = "train.validation_samples = 250: there are 249, and each validation takes them all"
        assert (note in capsys.readouterr().out) == (wanted == 250)


def poison(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the loss of some steps infinite, gradients included."""
    honest = trainer.model._mean_loss

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return honest(ids, labels) * (math.inf if trainer.position.step in steps else 1.0)

    monkeypatch.setattr(trainer.model, "_mean_loss", loss)


def recorded(trainer: Trainer) -> StepRecord:
    """The record of a step that is logged."""
    record = trainer.step(wants_stop=False).record
    assert record is not None
    return record


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.chunks[0].parameters()]


def test_a_loss_that_is_not_finite_stops_before_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    poison(trainer, monkeypatch, 1)
    trainer.step(wants_stop=False)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss of rank 0 is not finite .* no checkpoint has"):
        trainer.step(wants_stop=False)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert trainer.position.step == 1


def test_a_checkpoint_follows_a_validation_that_ends_in_nan(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.step(wants_stop=False)
    trainer.position.val_loss = math.nan
    trainer.load(Checkpoint(trainer.position.step, trainer.save()))
    assert trainer.position.val_loss is None


def test_a_skipped_step_changes_nothing_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, "train.on_nonfinite=skip", "train.log_every=1")
    poison(trainer, monkeypatch, 1)
    trainer.step(wants_stop=False)
    before, loss = weights(trainer), trainer.position.loss
    record = recorded(trainer)
    assert record.skipped
    assert record.to_dict()["loss"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert (trainer.position.step, trainer.position.loss) == (2, loss)
    record = recorded(trainer)
    assert not record.skipped
    assert not torch.equal(before[0], weights(trainer)[0])


def test_skipping_for_ever_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, "train.on_nonfinite=skip")
    monkeypatch.setattr("thinwire.train.updates.MOST_SKIPPED", 2)
    poison(trainer, monkeypatch, *range(10))
    for _ in range(2):
        trainer.step(wants_stop=False)
    with pytest.raises(NonFiniteError):
        trainer.step(wants_stop=False)


def test_steps_are_logged_when_asked_and_when_they_validate(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    logged: dict[int, Any] = {}
    while trainer.position.step < 6:
        record, stop, _ = trainer.step(wants_stop=trainer.position.step == 4)
        assert stop == (trainer.position.step == 5)
        if record is not None:
            logged[record.step] = record
    assert list(logged) == [3, 4, 6]
    last = logged[6]
    assert (last.samples, last.tokens) == (24, 192)
    assert last.mfu == pytest.approx(last.tgs * trainer.token_flops / 1e9)
    assert last.tokens_per_second == pytest.approx(32 / last.step_seconds)
    assert last.memory["rss"] > 1e6


def test_validation_is_a_mean_over_tokens_and_repeats(tmp_path: Path) -> None:
    trainer = make(tmp_path, "train.validation_samples=5")
    first = trainer.validate()
    assert first == trainer.validate() == trainer.position.val_loss
    indices = np.arange(5) * trainer.validation.count // 5
    with torch.no_grad():
        batch = trainer.validation.batch(indices)
        expected = float(trainer.model._mean_loss(batch.input_ids, batch.labels))
    assert first == pytest.approx(expected, rel=1e-5)
    assert all(chunk.training for chunk in trainer.model.chunks)


def test_a_step_has_the_exchange_between_steps_and_nothing_of_validations_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, "train.log_every=1")
    sharded, evaluate = api.runtime(trainer.model.chunks[0]).sharded, trainer.model.evaluate
    exchange, aside = trainer.updates.exchange, 0.5

    def evaluated(batch: Any) -> torch.Tensor:
        time.sleep(aside)
        sharded.meter.add(Lane.GATHER, Scope.ACROSS, 1000)
        sharded.meter.add(Lane.OUTER, Scope.ACROSS, 10)
        return evaluate(batch)

    def exchanged(*arguments: Any) -> Any:
        time.sleep(0.1)
        return exchange(*arguments)

    monkeypatch.setattr(trainer.model, "evaluate", evaluated)
    monkeypatch.setattr(trainer.updates, "exchange", exchanged)
    trainer.step(wants_stop=False)
    sharded.meter.add(Lane.GATHER, Scope.ACROSS, 1)  # under way when the step ended
    trainer.validate()
    trainer.save()
    record = recorded(trainer)
    assert 0.1 <= record.step_seconds < aside
    assert record.exposed["control"] >= 0.1
    assert record.own["median"] <= record.step_seconds - 0.1
    assert record.sent["gather"]["across"] == 1
    assert record.sent["outer"]["across"] % 10 == 0 < record.sent["outer"]["across"], "islands exchange meanwhile"


def losses(trainer: Trainer, number: int) -> list[float | None]:
    result = []
    for _ in range(number):
        trainer.step(wants_stop=False)
        result.append(trainer.position.loss)
    return result


@pytest.mark.slow
def test_a_checkpoint_continues_exactly_and_only_on_the_same_tokens(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    losses(trainer, 2)
    path = trainer.save()
    expected = losses(trainer, 3)
    again = make(tmp_path, "train.seed=1")  # other initial weights; the order of samples is put back below
    again.train = dataclasses.replace(again.train, seed=0)
    again.load(Checkpoint(2, path))
    assert losses(again, 3) == expected
    other = make(tmp_path, fingerprint="y")
    with pytest.raises(DataError, match="trained on other tokens"):
        other.load(Checkpoint(2, path))
    other.dataset = dataclasses.replace(other.dataset, former="x")  # as versions up to 0.2 named the tokens
    other.load(Checkpoint(2, path))


def test_dropout_depends_on_the_seed_and_the_step_alone(tmp_path: Path) -> None:
    def losses(trainer: Trainer, steps: int) -> list[float]:
        torch.manual_seed(len(made))  # whatever this process has drawn before
        made.append(trainer)
        mlp = trainer.model.chunks[0].get_submodule("layers.0.mlp")
        mlp.register_forward_hook(lambda module, _, output: functional.dropout(output, 0.5, module.training))
        return [recorded(trainer).loss for _ in range(steps)]

    made: list[Trainer] = []
    settings = ("train.log_every=1", "optimizer.lr=1e-30", "train.validate_every=0", "model.ffn=512")
    first = losses(make(tmp_path, *settings), 3)
    assert losses(make(tmp_path, *settings), 3) == first
    assert losses(make(tmp_path, *settings, "plan.recompute=true"), 3) == first
    assert losses(make(tmp_path, *settings, "train.seed=1"), 3) != first
    losses(halted := make(tmp_path, *settings), 2)
    path = halted.save()
    (resumed := make(tmp_path, *settings)).load(Checkpoint(step=2, path=path))
    assert losses(resumed, 1) == first[2:]
    resumed.position.step, drawn = 0, []
    for resumed.sampler in range(2):
        resumed._seed_dropout()
        drawn.append(float(torch.rand(())))
    assert drawn[0] != drawn[1], "ranks with data of their own draw masks of their own"


def test_validations_checkpoints_and_exports_use_the_average(tmp_path: Path) -> None:
    decay = "average.decay=0.5"
    trainer, plain = make(tmp_path, decay), make(tmp_path)
    assert losses(trainer, 3) == losses(plain, 3)  # training does not
    loss = trainer.validate()
    assert loss != plain.validate()
    path = trainer.save()
    assert trainer.average is not None
    with trainer.average.applied():
        averaged = tw.full_state_dict(trainer.model.chunks[0])
    done = export(RunDirectory(tmp_path), tmp_path / "out")
    assert done.averaged
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.embed_tokens.weight"), averaged["embed_tokens.weight"])
    again = make(tmp_path, decay)
    again.load(Checkpoint(3, path))
    assert again.validate() == loss
    assert losses(again, 2) == losses(trainer, 2)
    assert again.validate() == trainer.validate()


# -- float16 ---------------------------------------------------------------------------------------------------

FP16 = ("plan.compute_dtype=float16", "train.log_every=1", "train.steps=8")
TOO_LARGE = 2.0**30
"""A loss scale with which every gradient overflows."""


def test_a_gradient_that_overflows_lowers_the_scale_and_is_reported(tmp_path: Path) -> None:
    trainer = make(tmp_path, *FP16, f"loss_scale.initial={TOO_LARGE}", "loss_scale.backoff=0.0001220703125")
    before = weights(trainer)
    first = recorded(trainer)
    assert math.isfinite(first.loss)
    assert (first.skipped, first.skipped_steps, first.loss_scale) == (True, 1, TOO_LARGE)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    second = recorded(trainer)
    assert (second.skipped, second.skipped_steps, second.loss_scale) == (False, 1, 2.0**17)
    assert 0 < second.grad_norm < 100, "the norm contains the scale"
    assert not torch.equal(before[0], weights(trainer)[0])
    log = MetricsLog(tmp_path / "metrics.jsonl", Trackers({}), 0)
    log.write(first)
    log.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert (line["skipped"], line["skipped_steps"], line["loss_scale"], line["grad_norm"]) == (True, 1, TOO_LARGE, None)
    assert {"skipped_steps": 1.0, "loss_scale": TOO_LARGE}.items() <= tracked(line).items()


def test_progress_shows_the_scale_and_the_skipped_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(tmp_path, *FP16, f"loss_scale.initial={TOO_LARGE}")
    with ProgressReport(8, 0, "stdout") as progress:
        for _ in range(2):
            progress.step(recorded(trainer))
    first, second = capsys.readouterr().out.splitlines()
    assert "scale 1.07374e+09  1 skipped" in first
    assert "scale 5.36871e+08  2 skipped" in second


def test_other_plans_have_no_scale(tmp_path: Path) -> None:
    trainer = make(tmp_path, "plan.compute_dtype=bfloat16", "train.log_every=1", "loss_scale.initial=2.0")
    record = recorded(trainer)
    assert (record.loss_scale, record.skipped_steps, trainer.optimizer.loss_scale) == (None, 0, None)
    assert "loss_scale" not in trainer.model.load(trainer.optimizer, trainer.save())


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            (f"loss_scale.floor={TOO_LARGE}",),
            r"the scale is at loss_scale.floor = 1.07374e\+09: lower optimizer.lr, or set plan.compute_dtype to "
            '"bfloat16" or "float32", and start again',
        ),
        (
            ("loss_scale.backoff=1.0",),
            r"lower loss_scale.initial = 1.07374e\+09, or let the scale shrink with loss_scale.backoff = 0.5, and",
        ),
    ],
)
def test_a_scale_that_cannot_shrink_ends_the_run(tmp_path: Path, settings: tuple[str, ...], remedy: str) -> None:
    trainer = make(tmp_path, *FP16, f"loss_scale.initial={TOO_LARGE}", *settings)
    what = r"step 1: the gradient is not finite \(gradient norm nan, loss scale 1.07374e\+09\); "
    with pytest.raises(NonFiniteError, match=what.replace("nan", "(nan|inf)") + remedy):
        trainer.step(wants_stop=False)


def test_a_smaller_scale_does_not_excuse_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, *FP16)
    poison(trainer, monkeypatch, 1)
    trainer.step(wants_stop=False)
    with pytest.raises(NonFiniteError, match=r'step 2: the loss of rank 0 .* or set train.on_nonfinite = "skip"'):
        trainer.step(wants_stop=False)


def test_a_run_with_a_loss_scale_continues_exactly(tmp_path: Path) -> None:
    settings = (*FP16, f"loss_scale.initial={TOO_LARGE}", "loss_scale.growth_interval=2", "loss_scale.growth=16384.0")
    settings = (*settings, "loss_scale.backoff=0.00006103515625")
    trainer = make(tmp_path, *settings)
    losses(trainer, 3)
    path = trainer.save()
    expected = losses(trainer, 4)
    again = make(tmp_path, *settings, "train.seed=1")  # other initial weights
    again.train = dataclasses.replace(again.train, seed=0)
    assert again.load(Checkpoint(3, path)) is None
    assert again.position.skipped == 1
    assert losses(again, 4) == expected
    scales = [run.optimizer.loss_scale for run in (trainer, again)]
    assert all(scale is not None for scale in scales)
    assert scales[0].state() == scales[1].state()  # type: ignore[union-attr]
    assert trainer.position == again.position
    assert trainer.position.skipped == 3


def test_a_run_may_change_to_float16_and_back(tmp_path: Path) -> None:
    scaled, plain = make(tmp_path, *FP16), make(tmp_path, "plan.compute_dtype=bfloat16")
    losses(scaled, 1)
    note = plain.load(Checkpoint(1, scaled.save()))
    assert note == "the checkpoint's loss scale of 65536 has no use: the plan has no float16 gradients"
    losses(plain, 1)
    note = scaled.load(Checkpoint(2, plain.save()))
    assert note == "the checkpoint has no loss scale: it starts from loss_scale.initial = 65536"
    losses(scaled, 1)


# ---------------------------------------------------------------------------------------- decisions of the device


def curve(trainer: Trainer, steps: int) -> list[tuple[Any, ...]]:
    """What the records of steps say, and the position at the end."""
    records = []
    for _ in range(steps):
        record = trainer.step(wants_stop=False).record
        if record is not None:
            records.append((record.step, record.loss, record.grad_norm, record.skipped_steps, record.loss_scale or 1.0))
    position = trainer.position
    return [*records, (position.step, position.loss, position.skipped)]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("train.steps=8",), FP16], ids=["fp32", "fp16"])
def test_the_device_decides_as_the_host_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    settings = (*settings, "train.on_nonfinite=skip", "train.validate_every=0", "train.log_every=3")
    host = make(tmp_path, *settings)
    poison(host, monkeypatch, 1, 3)
    expected = curve(host, 7)
    with check_streams("always", nccl=True) as check:
        device = make(tmp_path, *settings)
        poison(device, monkeypatch, 1, 3)
        assert device.model.decides_on_device
        got = curve(device, 7)
        assert len(device.updates.queue) == 1, "the host has not read the last step"
        device.load(Checkpoint(7, device.save()))
        assert not device.updates.queue
        got[-1] = (device.position.step, device.position.loss, device.position.skipped)
        assert all(torch.allclose(a, b) for a, b in zip(weights(host), weights(device), strict=True))
    for one, other in zip(expected, got, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
    assert not check.hazards


def test_the_host_learns_of_a_bad_step_one_step_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with check_streams("always", nccl=True):
        trainer = make(tmp_path)
        poison(trainer, monkeypatch, 1, 2)
        trainer.step(wants_stop=False)
        before = weights(trainer)
        trainer.step(wants_stop=False)
        with pytest.raises(NonFiniteError, match=r"step 2: the loss of rank 0 is not finite .* no checkpoint has"):
            trainer.step(wants_stop=False)
        assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


@pytest.mark.parametrize("log_every", [1, 3])
def test_the_host_learns_of_a_scale_at_its_floor(tmp_path: Path, log_every: int) -> None:
    settings = (f"loss_scale.initial={TOO_LARGE}", f"loss_scale.floor={TOO_LARGE}", f"train.log_every={log_every}")
    with check_streams("always", nccl=True):
        trainer = make(tmp_path, *FP16, *settings)
        with pytest.raises(NonFiniteError, match=r"step 1: the gradient is not finite .*the scale is at"):
            curve(trainer, 2)
        assert trainer.position.step == 1
