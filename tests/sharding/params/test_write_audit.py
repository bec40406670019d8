"""Writes to parameters inside a forward are found, and the unit that made the first one is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError


class Scaled(nn.Module):
    """Doubles its weight in each forward, past torch's counts of writes."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        self.scale.data.mul_(2.0)
        for module in self.inner:
            x = module(x)
        return x


def test_the_outermost_unit_is_named() -> None:
    plan = tw.Plan.preset("zero3", nodes=1, local=1, compute_dtype="bfloat16")
    model = tw.shard(Scaled(Scaled(), Scaled()), plan, units=["inner.0", "inner.1"])
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"the forward of \(root\) writes to parameters of its unit"):
        optim.step()
