"""Train a small regression with Lightning's Trainer over thinwire.

torchrun --nproc-per-node 4 examples/lightning_trainer.py --plan zero3
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.lightning import ThinwireStrategy


class Regression(pl.LightningModule):
    """Sums the first four of 32 numbers."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        """Build the layers; no rank holds them whole."""
        if self.layers is None:
            blocks = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4))
            self.layers = nn.Sequential(*blocks, nn.Linear(32, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Mean squared error of a batch."""
        assert self.layers is not None
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Loss of a micro-batch."""
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the loss of a validation batch."""
        self.log("validation_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW with a cosine schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams["steps"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "rate"}}


def batches(number: int, seed: int) -> DataLoader[Any]:
    """Batches of eight, the same on every rank; the trainer gives each rank its own."""
    x = torch.randn(8 * number, 32, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :4].sum(1, keepdim=True)), batch_size=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/lightning")
    options = parser.parse_args()
    environment = TorchElasticEnvironment()
    world = environment.world_size()
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=world,
        strategy=ThinwireStrategy(options.plan),
        plugins=[environment],
        max_steps=options.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=options.steps // 2,
        callbacks=[ModelCheckpoint(options.out, save_last=True, monitor="validation_loss"), LearningRateMonitor()],
        logger=CSVLogger(options.out),
        log_every_n_steps=10,
        enable_progress_bar=False,
    )
    model = Regression(options.steps)
    trainer.fit(model, batches(2 * options.steps * world, seed=1), batches(4 * world, seed=2))
    trainer.print(f"validation loss {trainer.callback_metrics['validation_loss']:.3f}")
    trainer.print(f"saved {options.out}/last.ckpt")


if __name__ == "__main__":
    main()
