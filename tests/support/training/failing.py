"""Steps whose backward fails half-way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State
from thinwire.spec import Plan


class Fuse(torch.autograd.Function):
    """Passes values on; its backward raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.armed:
            raise FloatingPointError("blown")
        return grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1:
                x = Fuse.apply(x)
        return x.square().mean()


def train(plan: Plan, fail_in: int | None, forget: bool = True) -> list[float]:
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    for part in runtime(model).reducer.parts:
        part.owned.values.fill_(float("nan"))  # its content is undefined while it is empty
    generator = torch.Generator().manual_seed(control().rank)
    for step in range(4):
        x = torch.randn(3, 6, generator=generator)
        if step == fail_in:
            Fuse.armed = True
            with pytest.raises(FloatingPointError):
                model(x).backward()
            Fuse.armed = False
            if forget:
                optim.zero_grad()
            if runtime(model).units[0].sharded:
                assert all(unit.state is State.SHARDED for unit in runtime(model).units)
        for micro_batch in tw.micro_batches(model, [x, 2 * x]):
            model(micro_batch).backward()
        optim.step()
        optim.zero_grad()
    with tw.full_parameters(model):
        return [float(v) for p in model.parameters() for v in p.detach().flatten()]
