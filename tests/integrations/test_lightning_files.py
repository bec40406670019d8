"""Checkpoints that are ordinary files of Lightning: they go from DDP to thinwire and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from tests.support.frameworks.lightning import Blocks, loader, trainer
from tests.support.frameworks.stateful import weights
from torch.optim.lr_scheduler import ChainedScheduler

from thinwire.integrations.lightning import ThinwireStrategy
from thinwire.testing import run_ranks


class Saved(Blocks):
    """Has hyper-parameters, a state that is no tensor, and a schedule inside another."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words = "untouched"

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["lr_scheduler"]["scheduler"] = ChainedScheduler([made["lr_scheduler"]["scheduler"]])
        return made

    def get_extra_state(self) -> Any:
        return {"words": self.words}

    def set_extra_state(self, state: Any) -> None:
        self.words = state["words"]


def strategy_of(kind: str) -> Any:
    return ThinwireStrategy("zero3", state_dict_type=kind) if kind in ("full", "sharded") else kind


def options_of(precision: str) -> dict[str, Any]:
    """Plugins of a run; float16 begins with a scale that grows and overflows."""
    if precision == "32-true":
        return {}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    return {"plugins": [TorchElasticEnvironment(), MixedPrecision(precision, "cpu", scaler)]}


def save(folder: str, kind: str, precision: str, world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train two epochs of five steps with a file after each; return later losses and last weights."""
    model = Saved()
    model.words = "saved"
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", save_on_train_epoch_end=True, save_top_k=-1)
    run = trainer(
        world,
        strategy_of(kind),
        folder,
        enable_checkpointing=True,
        callbacks=[saving],
        max_epochs=2,
        **options_of(precision),
    )
    run.fit(model, loader(world, 5))
    return model.losses[5:], weights(model)


def resume(folder: str, kind: str, precision: str, world: int) -> tuple[list[float], dict[str, torch.Tensor], str]:
    model = Saved()
    run = trainer(world, strategy_of(kind), folder, max_epochs=2, **options_of(precision))
    run.fit(model, loader(world, 5), ckpt_path=f"{folder}/step=5.ckpt")
    return model.losses, weights(model), model.words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "precision", "world"),
    [
        ("full", "ddp", "32-true", 2),
        ("ddp", "sharded", "32-true", 2),
        ("full", "full", "16-mixed", 2),
        ("full", "ddp", "16-mixed", 2),
        ("ddp", "full", "16-mixed", 2),
        ("sharded", "full", "32-true", 2),
        ("sharded", "thinwire_zero1", "32-true", 4),
    ],
)
def test_files_go_between_strategies(tmp_path: Path, first: str, second: str, precision: str, world: int) -> None:
    """From so many ranks to two."""
    later, final = run_ranks(world, save, str(tmp_path), first, precision, world)[0]
    assert (tmp_path / "step=5.ckpt").is_dir() == (first == "sharded")
    losses, resumed, words = run_ranks(2, resume, str(tmp_path), second, precision, 2)[0]
    assert losses == pytest.approx(later, rel=1e-5)
    assert words == "saved"
    for name, value in final.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6, msg=name)
    if first != "sharded":
        alone = Saved.load_from_checkpoint(str(tmp_path / "step=10.ckpt"), map_location="cpu")
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(parameter.detach(), final[name], rtol=1e-5, atol=1e-6, msg=name)
