"""Writes to parameters inside a forward are found, and the unit that made the first one is named."""

from __future__ import annotations

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import raised
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks


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


class Projecting(nn.Module):
    """Replaces the weight of its layer before the layer computes with it, as peft's CPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.replaces = nn.Linear(4, 4, bias=False), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            self.layer.weight.data = self.layer.weight.detach() * 0.5
        y: torch.Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@pytest.mark.parametrize("first", [0, 3])
@on_ranks(2)
def test_a_parameter_that_a_parent_points_elsewhere_is_found_in_any_step(preset: str, first: int) -> None:
    model = tw.shard(Projecting(), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"), units=["layer"])
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(first + 2):
        model.replaces = step == first
        before = tw.full_state_dict(model)["layer.weight"].clone()
        model(torch.ones(2, 4)).sum().backward()
        if model.replaces:
            assert "the forward of layer writes to parameters" in raised(UsageError, optim.step)
        else:
            optim.step()
        optim.zero_grad()
        after = tw.full_state_dict(model)["layer.weight"]
        torch.testing.assert_close(after, before if model.replaces else before - 0.2)


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@on_ranks(2)
def test_a_forward_may_point_a_parameter_at_the_same_values(preset: str) -> None:
    """As ``flatten_parameters`` does on GPUs."""

    class Flattening(Projecting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer.weight.data = self.layer.weight.detach().clone()
            y: torch.Tensor = self.layer(x)
            return y

    model = tw.shard(Flattening(), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"), units=["layer"])
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    before = tw.full_state_dict(model)["layer.weight"].clone()
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
    torch.testing.assert_close(tw.full_state_dict(model)["layer.weight"], before - 0.6)
