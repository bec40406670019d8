"""One rank's trainer in this process: skipped steps, measurements, positions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from thinwire.collectives import group
from thinwire.errors import DataError, NonFiniteError
from thinwire.spec.factor import Factor
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.checkpoint import Checkpoint
from thinwire.train.data.packing import Dataset
from thinwire.train.data.tokens import TokenBin
from thinwire.train.directory import RunDirectory
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.trainer import Trainer, make_trainer

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


def make(directory: Path, *settings: str, fingerprint: str = "x") -> Trainer:
    (directory / "recipe.toml").write_text(RECIPE)
    recipe = Recipe.read(directory / "recipe.toml", settings)
    tokens = np.random.default_rng(0).integers(0, 50, 2000).astype(np.uint16)
    stream = TokenBin(path=directory / "t.bin", tokens=tokens, vocab=50)
    dataset = Dataset(stream, stream, 50, 3.9, fingerprint, None)
    plan = PlanTemplate.read(recipe).resolve(Factor())
    return make_trainer(ResolvedRun(recipe, plan, RunDirectory(directory), node_ranks=1), dataset, torch.device("cpu"))


def poison(trainer: Trainer, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Make the loss of some steps infinite, gradients included."""
    honest = trainer.model._mean_loss

    def loss(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return honest(ids, labels) * (math.inf if trainer.position.step in steps else 1.0)

    monkeypatch.setattr(trainer.model, "_mean_loss", loss)


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
    record, _ = trainer.step(wants_stop=False)
    assert record is not None
    assert record.skipped
    assert record.to_dict()["loss"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert (trainer.position.step, trainer.position.loss) == (2, loss)
    record, _ = trainer.step(wants_stop=False)
    assert record is not None
    assert not record.skipped
    assert not torch.equal(before[0], weights(trainer)[0])


def test_skipping_for_ever_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, "train.on_nonfinite=skip")
    monkeypatch.setattr("thinwire.train.trainer.MOST_SKIPPED", 2)
    poison(trainer, monkeypatch, *range(10))
    for _ in range(2):
        trainer.step(wants_stop=False)
    with pytest.raises(NonFiniteError):
        trainer.step(wants_stop=False)


def test_steps_are_logged_when_asked_and_when_they_validate(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    logged: dict[int, Any] = {}
    while trainer.position.step < 6:
        record, stop = trainer.step(wants_stop=trainer.position.step == 4)
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


def losses(trainer: Trainer, number: int) -> list[float | None]:
    result = []
    for _ in range(number):
        trainer.step(wants_stop=False)
        result.append(trainer.position.loss)
    return result


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
