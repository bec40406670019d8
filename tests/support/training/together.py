"""Steps whose collectives serve several units."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.support.training.program import train_step
from torch import nn

import thinwire as tw


def plan(name: str, **fields: Any) -> tw.Plan:
    return tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32", **fields)


class Tied(nn.Module):
    """Its head is its embedding, which the root unit holds, and one block is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return nn.functional.linear(x, self.embedding.weight)


def trained(chosen: tw.Plan, model_class: type[nn.Module]) -> list[float]:
    """Parameters after three steps of two micro-batches."""
    torch.default_generator.manual_seed(0)
    model = tw.shard(model_class(), chosen)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    torch.default_generator.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        train_step(model, optim, 2)
    with tw.full_parameters(model):
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def differences(pairs: list[tuple[tw.Plan, tw.Plan]], model_class: type[nn.Module]) -> list[float]:
    """Largest difference of parameters between training by one plan and by another."""
    return [
        max(abs(a - b) for a, b in zip(trained(one, model_class), trained(other, model_class), strict=True))
        for one, other in pairs
    ]
