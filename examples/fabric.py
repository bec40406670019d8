"""Train a small regression in a loop of one's own with Lightning's Fabric over thinwire.

torchrun --nproc-per-node 4 examples/fabric.py --plan zero3
"""

from __future__ import annotations

import argparse

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.fabric import ThinwireFabricStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="zero3", help="a preset or a plan file")
    parser.add_argument("--batches", type=int, default=80, help="micro-batches of each rank")
    parser.add_argument("--out", default="runs/fabric")
    options = parser.parse_args()
    environment = TorchElasticEnvironment()
    fabric = Fabric(
        accelerator="auto",
        devices=environment.world_size(),
        strategy=ThinwireFabricStrategy(options.plan),
        plugins=[environment],
    )
    fabric.launch()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.batches // 2)
    model, optimizer, scheduler = fabric.setup(model, optimizer, scheduler=scheduler)
    x = torch.randn(8 * options.batches * fabric.world_size, 32)
    batches = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x[:, :4].sum(1, keepdim=True)), batch_size=8))

    for number, (inputs, targets) in enumerate(batches, start=1):
        more = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=more):
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss / 2)
        if more:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if number % 20 == 0:
            fabric.print(f"batch {number}, loss {fabric.all_reduce(loss.detach()).item():.3f}")
    fabric.save(f"{options.out}/state", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    fabric.print(f"saved {options.out}/state")


if __name__ == "__main__":
    main()
