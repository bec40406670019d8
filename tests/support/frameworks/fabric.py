"""A loop of Lightning Fabric."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn

import thinwire.integrations.fabric  # noqa: F401 - registers the strategies by name

WIDTH, BATCH, STEPS = 16, 8, 20


class Blocks(nn.Module):
    """Regression by three blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fabric_of(world: int, strategy: Any, **options: Any) -> Fabric:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    # Ranks of the tests have torchrun's variables, which Lightning's own environment would delete.
    options = {"plugins": [TorchElasticEnvironment()]} | options
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, **options)
    fabric.launch()
    return fabric


def parts(fabric: Fabric) -> tuple[Any, Any, Any]:
    model = Blocks()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    made, over_shares = fabric.setup(model, optimizer)
    return made, over_shares, schedule


def micro_batches(fabric: Fabric, accumulate: int, steps: range) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """This rank's micro-batches of each step; all ranks together see the same for any number of ranks."""
    torch.manual_seed(1)
    data = torch.randn(STEPS, accumulate, BATCH, WIDTH), torch.randn(STEPS, accumulate, BATCH, 4)
    mine = slice(fabric.global_rank, None, fabric.world_size)
    return [[(data[0][s, i, mine], data[1][s, i, mine]) for i in range(accumulate)] for s in steps]


def loop(
    fabric: Fabric, made: tuple[Any, Any, Any], accumulate: int, clip: float | None, steps: range, **clipping: bool
) -> dict[str, list[float]]:
    """A loop of one's own, with an evaluation in the middle."""
    model, optimizer, scheduler = made
    record: dict[str, list[float]] = {"losses": [], "norms": [], "evaluated": [], "rates": []}
    for step, batches in zip(steps, micro_batches(fabric, accumulate, steps), strict=True):
        for index, (x, y) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=index + 1 < accumulate):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / accumulate)
            record["losses"].append(float(fabric.all_reduce(loss.detach())))
        if clip is not None:
            record["norms"].append(float(fabric.clip_gradients(model, optimizer, max_norm=clip, **clipping)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record["rates"].append(optimizer.param_groups[1]["lr"])
        if step % 7 == 3:
            model.eval()
            with torch.no_grad():
                record["evaluated"].append(float(fabric.all_reduce(model(batches[0][0]).square().mean())))
            model.train()
    return record
