"""Trains with torch's DDP; one additional line encodes the gradients.

torchrun --nproc-per-node 4 examples/intercept_ddp.py int8:256
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def train(codec: str, steps: int = 8) -> list[float]:
    """Mean losses over all ranks; in each step, every rank has a different batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
    tw.compress_ddp(model, codec)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 64, generator=data)
        loss = (model(x) - x[:, :8].sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    codec = sys.argv[1] if len(sys.argv) > 1 else "int8:256"
    losses = train(codec)
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.4f}" for loss in losses))
        print(*tw.axis_traffic().values(), sep="\n")
    dist.destroy_process_group()
