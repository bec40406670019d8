"""Shards a training loop of plain PyTorch with three lines; the model predicts the next byte of torch's own source.

torchrun --nproc-per-node 4 examples/loop.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import thinwire as tw


def train(steps: int = 60) -> list[float]:
    """Mean losses over all ranks; in each step, every rank has a different batch."""
    text = torch.tensor(list(Path(nn.__file__).with_name("functional.py").read_bytes()))
    model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 256))
    plan = tw.Plan.preset("zero3", nodes=2, local=2)  # the first line: four ranks as two nodes of two
    model = tw.shard(model, plan)  # the second; it joins the job that torchrun started
    optim = tw.optimizer(model, torch.optim.AdamW, lr=3e-3)  # the third
    data, losses = torch.Generator().manual_seed(dist.get_rank()), list[float]()
    for _ in range(steps):
        windows = text[torch.randint(len(text) - 16, (256, 1), generator=data) + torch.arange(17)]
        loss = cross_entropy(model(windows[:, :-1]).float(), windows[:, -1])
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
