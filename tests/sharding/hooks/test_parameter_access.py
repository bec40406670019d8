"""What programs do with a module's parameters, which are shares outside of passes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tests.behaviours.models import Stack
from tests.support.ranks import on_ranks
from torch import nn
from torch.nn.utils import parametrize

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks


def losses_beside_loads(model: nn.Module, other: nn.Module) -> list[float]:
    """Losses beside loads and conversions."""
    optim, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=0.1), []
    before = list(model.parameters())
    for step in range(4):
        loss = model(torch.linspace(-1, 1, 8).expand(2, 8)).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
        if step == 1:
            model.load_state_dict(other.state_dict())
            model.to(torch.float32)  # with gradients
        optim.zero_grad()
    assert [*map(id, before)] == [*map(id, model.parameters())]
    return losses


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@on_ranks(2)
def test_torch_swaps_no_parameters(preset: str) -> None:
    torch.default_generator.manual_seed(0)
    alone, other = Stack(), Stack()
    plan = tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32")
    model = tw.shard(copy.deepcopy(alone), plan)
    twin = copy.deepcopy(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        losses = [losses_beside_loads(each, other) for each in (alone, model, twin)]
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert losses[0] == pytest.approx(losses[1]) == losses[2]


class Added(nn.Module):
    """Adds to a weight."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class Wrapped(nn.Module):
    """Trains an addition to a frozen weight, by a parametrization that each forward registers and removes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parametrize.register_parametrization(self.base, "weight", Added(self.a @ self.b))
        self.base.parametrizations["weight"].original.requires_grad_(False)
        try:
            with parametrize.cached():
                return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    for batch in torch.randn(3, 2, 4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@on_ranks(2)
def test_whole_weights_may_be_parametrized_inside_a_forward() -> None:
    want = trained(Wrapped()).state_dict()
    for name in ("ddp", "zero1", "zero2"):
        model = tw.shard(Wrapped(), tw.Plan.preset(name, nodes=1, local=2, compute_dtype="float32"))
        torch.testing.assert_close(tw.full_state_dict(trained(model)), dict(want), msg=name)
    sharded = tw.shard(Wrapped(), tw.Plan.preset("zero3", nodes=1, local=dist.get_world_size()))
    with pytest.raises(UsageError, match="target_parameters"):
        sharded(torch.ones(2, 4))
    with pytest.raises(UsageError, match="cannot be taken out"):
        del model.base.weight
