"""Islands, and how they go on."""

from __future__ import annotations

from typing import Any

import torch
from tests.support.training.parity import batches, build, loss_of
from torch import nn

import thinwire as tw

LR = 0.1

Fields = dict[str, Any]


def plan_of(preset: str = "zero1", *, nodes: int = 1, local: int = 1, islands: Fields, **fields: Any) -> tw.Plan:
    """A preset on the mesh of one island, and islands of it."""
    dtype = "bfloat16" if islands.get("outer_wire") == "visible" else "float32"
    plan = tw.Plan.preset(preset, nodes=nodes, local=local, compute_dtype=dtype, **fields)
    return plan.with_(islands={"codec": "none", **islands})


def optimizer_of(name: str) -> tuple[type[torch.optim.Optimizer], Fields]:
    return {
        "sgd": (torch.optim.SGD, {"lr": LR}),
        "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-1}),
    }[name]


def start(plan: tw.Plan, inner: str = "adamw") -> tuple[nn.Module, tw.ShardedOptimizer]:
    model = tw.shard(build(seed=3), plan)
    kind, options = optimizer_of(inner)
    return model, tw.optimizer(model, kind, **options)


def go_on(plan: tw.Plan, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    rank = torch.distributed.get_rank()
    for data in batches(plan.data_ranks, 1, last)[first:]:
        loss_of(model, data[0, rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
