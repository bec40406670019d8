"""What a backward still has to read stays, or is gathered again: programs beside plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw

pytestmark = pytest.mark.ranks

WIDTH = 6


class Net(nn.Module):
    """Linear layers that are units, in a root with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.temperature = nn.Parameter(torch.rand(WIDTH))

    def blocks_of(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks_of(x) * self.temperature


class Frozen(Net):
    """The root's frozen parameters lie between its own trained one and the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.convolution = nn.Conv1d(3, 3, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(self.blocks_of(x) @ self.weight * self.scale) * self.temperature


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.full((2, 3, WIDTH), 0.3)).square().mean()


def plainly(model: nn.Module) -> None:
    loss_of(model).backward()


@pytest.mark.parametrize("kind", [Frozen])
@on_ranks(2)
def test_gradients_are_those_of_plain_torch(kind: Callable[[], nn.Module]) -> None:
    for way in (plainly,):
        torch.default_generator.manual_seed(0)
        alone = kind()
        torch.default_generator.manual_seed(0)
        units = ["blocks.0", "blocks.1"]
        model = tw.shard(kind(), tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"), units=units)
        for one in (alone, model):
            way(one)
        for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
            if want.grad is not None:
                assert torch.allclose(got.grad.full_tensor(), want.grad, atol=1e-6), (way.__name__, name)
