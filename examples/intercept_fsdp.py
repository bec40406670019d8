"""Trains with torch's FSDP2; one additional line encodes gradients and gathered parameters.

torchrun --nproc-per-node 4 examples/intercept_fsdp.py int8:256
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import thinwire as tw


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train(codec: str, steps: int = 8) -> list[float]:
    """Mean losses over all ranks; in each step, every rank has a different batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), Block(64), Block(64), nn.Linear(64, 8))
    for block in (model[1], model[2]):
        fully_shard(block)
    fully_shard(model)
    tw.compress_fsdp(model, codec)  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 16, generator=data)
        loss = (model(x) - x[:, :8].sin()).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
