"""Models that are not a plain list of blocks train as in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.support.training.edge import WIDTH, Place, every, over_plans
from tests.support.training.models import (
    Branching,
    OneLayer,
    Shapes,
    SmallerThanTheWorld,
    Stack,
    TiedAcrossBlocks,
    TiedEnds,
    UnusedParameters,
)
from torch import nn

from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


# -- tied and shared -------------------------------------------------------------------------------------------


class TiedInsideABlock(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        for block in self.blocks:
            block.up, block.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            block.down.weight = block.up.weight


class UsedTwice(nn.Module):
    """One forward uses its parameters twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x * self.scale


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x)))) @ self.layer.weight.t()


# -- unused, conditional ---------------------------------------------------------------------------------------


class BlocksByMicroBatch(Stack):
    """The first block runs in the step's first micro-batch only, the last block in the last one only."""

    skipped = -1

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        model.skipped = 2 - 2 * place.micro_batch
        return model(x).square().mean()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != self.skipped:
                x = block(x)
        return self.last(x)


class ParametersByRank(Stack):
    """One rank alone uses ``extra``: to the mean, the others contribute zeros."""

    def __init__(self) -> None:
        super().__init__(2, Branching)

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        for block in model.blocks:
            block.branches = place.rank == 1 + place.step
        return model(x).square().mean()


# -- sizes, shapes, types --------------------------------------------------------------------------------------


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.shift)


class OnlyScalars(Stack):
    """Units of one element: most ranks hold nothing but padding."""

    def __init__(self) -> None:
        super().__init__(3, Shift)


class Half(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.half()


class Mixed(Stack):
    """Types differ inside a unit; an integer parameter is frozen by nature."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.half()
        self.blocks[2].norm.bfloat16()
        self.shift = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.shift.sum()


GROUPS: dict[str, tuple[type[nn.Module], ...]] = {
    "tied": (TiedEnds, TiedAcrossBlocks, TiedInsideABlock, UsedTwice),
    "unused": (UnusedParameters, BlocksByMicroBatch, ParametersByRank),
    "shapes": (SmallerThanTheWorld, OneLayer, Shapes, OnlyScalars),
    "types": (Half, Mixed),
}


@pytest.mark.parametrize(
    "group",
    [pytest.param(group, marks=pytest.mark.slow) if group == "types" else group for group in GROUPS],
)
@over_plans
def test_trains_as_in_plain_torch(group: str, plans: Sequence[str]) -> None:
    run_ranks(4, partial(every, plans=plans), GROUPS[group])
