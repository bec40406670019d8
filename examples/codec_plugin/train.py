"""Trains on two ranks with plan.toml, which uses the codec of this directory's package.

pip install ./examples/codec_plugin
torchrun --nproc-per-node 2 examples/codec_plugin/train.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import thinwire as tw


def train(steps: int = 40) -> list[float]:
    """Losses averaged over the ranks; the model learns which of its inputs is the largest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 16))
    model = tw.shard(model, tw.Plan.load(Path(__file__).with_name("plan.toml")))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    data, losses = torch.Generator().manual_seed(dist.get_rank()), list[float]()
    for _ in range(steps):
        inputs = torch.rand(256, 16, generator=data)
        loss = cross_entropy(model(inputs).float(), inputs.argmax(1))
        loss.backward()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(mean := loss.detach(), op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


if __name__ == "__main__":
    losses = train()
    if dist.get_rank() == 0:
        print("loss", *(f"{loss:.2f}" for loss in losses[::10]))
    dist.destroy_process_group()
