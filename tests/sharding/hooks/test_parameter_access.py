"""What torch does with a module's parameters, which are shares outside of passes."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.behaviours.models import Stack
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw

pytestmark = pytest.mark.ranks


def trained(model: nn.Module, other: nn.Module) -> list[float]:
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
        losses = [trained(each, other) for each in (alone, model, twin)]
        assert torch.__future__.get_swap_module_params_on_conversion()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert losses[0] == pytest.approx(losses[1]) == losses[2]
