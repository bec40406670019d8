"""Mixed precision in Lightning's ``Trainer`` and ``Fabric``: what their own DDP computes under autocast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from tests.support.frameworks.fabric import STEPS, fabric_of, loop, parts
from tests.support.frameworks.lightning import Blocks, loader, trainer
from tests.support.frameworks.stateful import PLANNED, assert_runs_alike, weights
from tests.support.ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.testing import run_ranks

LARGE = 1e6
"""Factor of the targets, which takes them beyond the range of float16."""


def plugin(kind: Any, precision: str, scale: float) -> Any:
    """A plugin of Lightning, which runs float16 on the CPU as well: its connectors would turn that into bfloat16."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4) if precision == "16-mixed" else None
    return kind(precision, device="cpu", scaler=scaler)


class Watched(Blocks):
    """Has large targets, and records the loss scale and the largest gradient that hooks see."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []
        self.gradients: list[float] = []
        self.skipped: list[bool] = []
        self.before: torch.Tensor | None = None

    def mean_loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1] / LARGE)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        precision = self.trainer.precision_plugin
        loss_scale = getattr(precision, "loss_scale", None)
        scaler = getattr(precision, "scaler", None)
        self.scales.append(loss_scale.value if loss_scale is not None else scaler.get_scale() if scaler else 1.0)
        gradient = self.blocks[0][0].weight.grad
        self.gradients.append(float(gradient.abs().max()))

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        if self.trainer.global_step == len(self.skipped):
            return  # more micro-batches of the step follow
        weight = weights(self)["head.bias"].clone()
        self.skipped.append(self.before is not None and torch.equal(weight, self.before))
        self.before = weight


def large(batches: DataLoader[Any]) -> DataLoader[Any]:
    x, y = batches.dataset.tensors
    return DataLoader(TensorDataset(x, y * LARGE), batch_size=batches.batch_size, shuffle=False)


def train(
    strategy: Any, folder: str, precision: str, scale: float, clip: float | None, accumulate: int
) -> dict[str, Any]:
    model = Watched()
    plugins = [TorchElasticEnvironment(), plugin(MixedPrecision, precision, scale)]
    run = trainer(
        2, strategy, folder, gradient_clip_val=clip, plugins=plugins, accumulate_grad_batches=accumulate,
        val_check_interval=5 * accumulate, limit_val_batches=2,
    )  # fmt: skip
    run.fit(model, large(loader(2, STEPS, accumulate)), large(loader(2, 2)))
    assert run.precision_plugin.precision == precision
    names = ("losses", "validated", "norms", "rates", "scales", "gradients", "skipped")
    return {name: getattr(model, name) for name in names} | {"weights": weights(model), "steps": run.global_step}


def check(case: Any, reference: dict[str, Any], result: dict[str, Any], keys: Sequence[str]) -> None:
    """Compare a run with Lightning's own. Steps that overflow have no norm, and are skipped in both."""
    for key in keys:
        assert len(result[key]) == len(reference[key]) > 0, (case, key)
        assert [math.isfinite(value) for value in result[key]] == [math.isfinite(value) for value in reference[key]]
    assert_runs_alike(result, reference, keys, str(case))


def of_steps_made(run: dict[str, Any]) -> dict[str, list[float]]:
    """Norms and gradients of the steps that were not skipped. Of others, one run says infinity and another NaN."""
    return {
        key: [value for value, skipped in zip(run[key], run["skipped"], strict=True) if not skipped]
        for key in ("norms", "gradients")
    }


OVERFLOWING = ("16-mixed", 2.0**25, 0.5, 1)
"""Precision, loss scale of the first step, clipping and accumulation: the first steps overflow."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "names"),
    [
        ([OVERFLOWING, ("bf16-mixed", 1.0, 0.5, 1)], PLANNED),
        # zero1 would send sums of micro-batches in the compute dtype, and DDP sends them in float32.
        ([("16-mixed", 1024.0, None, 4), ("bf16-mixed", 1.0, None, 4)], ["thinwire_zero2", "thinwire"]),
    ],
)
@on_ranks(2)
def test_training_equals_ddp(tmp_path: Path, cases: Any, names: Any) -> None:
    for case in cases:
        reference = train("ddp", str(tmp_path), *case)
        for name in names:
            result = train(name, str(tmp_path), *case)
            runs = [{**run, **of_steps_made(run)} for run in (reference, result)]
            check((name, *case), *runs, ("losses", "validated", "norms", "gradients", "rates", "scales", "skipped"))
            assert result["steps"] == reference["steps"] == STEPS
            if case == OVERFLOWING:
                assert sum(result["skipped"]) > 5
                rates = result["rates"]
                assert rates[0] > rates[8], "Lightning's schedulers also follow steps that are skipped"


def save_midway(folder: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train in float16 with a checkpoint after each epoch of ten steps; return later losses and scales, and the last
    weights."""
    model = Watched()
    plugins = [TorchElasticEnvironment(), plugin(MixedPrecision, "16-mixed", 2.0**25)]
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
    run = trainer(2, "thinwire", folder, plugins=plugins, enable_checkpointing=True, callbacks=[saving], max_epochs=2)
    run.fit(model, large(loader(2, 10)))
    return model.losses[10:], model.scales[10:], weights(model)


def resume(folder: str, world: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = Watched()
    plugins = [TorchElasticEnvironment(), plugin(MixedPrecision, "16-mixed", 2.0)]
    run = trainer(world, "thinwire_zero1", folder, plugins=plugins, max_epochs=2)
    run.fit(model, large(loader(world, 10)), ckpt_path=f"{folder}/step=10.ckpt")
    return model.losses, model.scales, weights(model)


@pytest.mark.slow
def test_checkpoints_have_the_loss_scale(tmp_path: Path) -> None:
    later, scales, final = run_ranks(2, save_midway, str(tmp_path))[0]
    losses, resumed_scales, resumed = run_ranks(2, resume, str(tmp_path), 2)[0]
    assert resumed_scales == scales
    assert len(set(scales)) > 1
    check("resumed", {"losses": later, "weights": final}, {"losses": losses, "weights": resumed}, ["losses"])


def fabric_run(name: str, precision: str, scale: float, accumulate: int) -> dict[str, Any]:
    plugins = [TorchElasticEnvironment(), plugin(FabricMixedPrecision, precision, scale)]
    fabric = fabric_of(2, name, plugins=plugins)
    made = parts(fabric)
    result: dict[str, Any] = loop(fabric, made, accumulate, 0.1, range(STEPS), error_if_nonfinite=False)
    precision_plugin = fabric.strategy.precision
    if scaler := getattr(precision_plugin, "scaler", None):
        result["scales"] = [scaler.get_scale()]
    elif (own := getattr(precision_plugin, "loss_scale", None)) is not None:
        result["scales"] = [own.value]
    return result | {"weights": weights(made[0].module)}


@pytest.mark.slow
@on_ranks(2)
def test_fabric_equals_ddp() -> None:
    for case in itertools.product(("16-mixed", "bf16-mixed"), [2.0**25], (1, 4)):
        reference = fabric_run("ddp", *case)
        for name in ("thinwire_zero2", "thinwire"):
            result = fabric_run(name, *case)
            for run in (reference, result):
                run["norms"] = [value for value in run["norms"] if math.isfinite(value)]
            keys = ["losses", "evaluated", "rates", "norms"]
            check((name, *case), reference, result, [*keys, "scales"] if case[0] == "16-mixed" else keys)
