"""A module of Lightning, and trainers for it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thinwire as tw
from thinwire.integrations.lightning import ThinwireStrategy

STEPS, GLOBAL_BATCH, WIDTH = 20, 8, 16


class Blocks(pl.LightningModule):
    """Regression by three blocks; records the loss and the norm of every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def mean_loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.mean_loss(batch)
        self.log("loss", loss)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        loss = self.mean_loss(batch)
        self.log("validation_loss", loss, sync_dist=True)
        self.validated.append(float(self.trainer.strategy.reduce(loss.clone())))

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        value = options["gradient_clip_val"]
        strategy = self.trainer.strategy
        if isinstance(strategy, ThinwireStrategy):
            self.clip_gradients(optimizer, **options)
            norm = strategy.gradient_norm if value else tw.clip_grad_norm_(self, float("inf"))
        else:
            norm = nn.utils.clip_grad_norm_(self.parameters(), value or float("inf"))
        self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        biases = [p for name, p in self.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in self.named_parameters() if not name.endswith("bias")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append([group["lr"] for group in self.optimizers().param_groups][1])


class Plain(Blocks):
    """Leaves clipping to the trainer."""

    def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
        self.clip_gradients(optimizer, **options)


def loader(world: int, steps: int, accumulate: int = 1) -> DataLoader[Any]:
    torch.manual_seed(1)
    count = steps * GLOBAL_BATCH * accumulate
    data = TensorDataset(torch.randn(count, WIDTH), torch.randn(count, 4))
    return DataLoader(data, batch_size=GLOBAL_BATCH // world, shuffle=False)


def trainer(world: int, strategy: Any, folder: str, **options: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # Ranks of the tests have torchrun's variables, which Lightning's own environment would delete.
    quiet = {
        "plugins": [TorchElasticEnvironment()],
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = {"enable_checkpointing": False, "max_epochs": 1, "use_distributed_sampler": True} | quiet | options
    return pl.Trainer(accelerator="cpu", devices=world, strategy=strategy, default_root_dir=folder, **options)
