"""A model trains as in plain torch with any choice of units, automatic or explicit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from tests.support.training.edge import WIDTH, every, over_plans, parity
from tests.support.training.models import Block, FrozenUnits, Stack, TiedAcrossBlocks
from torch import nn

from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


class NoList(nn.Module):
    """No module list: blocks as attributes, and parameters on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.a, self.b = Block(), Block()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.b(self.a(x * self.scale) + self.shift))


class PairsOfLayers(nn.Module):
    """A list of lists, without a call of its own forward."""

    def __init__(self) -> None:
        super().__init__()
        pairs = ([Block(), nn.ModuleDict({"x": nn.Linear(WIDTH, WIDTH)})] for _ in range(2))
        self.layers = nn.ModuleList(map(nn.ModuleList, pairs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, layers in self.layers:
            x = layers["x"](block(x))
        return x


class Nest(nn.Module):
    """A block with blocks inside, before and after which it has work of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList(Block() for _ in range(2))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.before(x))
        for block in self.inner:
            y = block(y)
        return x + self.after(y)


class Nested(Stack):
    def __init__(self) -> None:
        super().__init__(2, Nest)


STRUCTURES = (NoList, PairsOfLayers, Nested)


@pytest.mark.slow
def test_structures_of_all_kinds() -> None:
    run_ranks(4, every, STRUCTURES)


@pytest.mark.slow
def test_structures_cut_to_single_modules() -> None:
    structures = (*STRUCTURES, Stack, TiedAcrossBlocks, FrozenUnits)
    run_ranks(4, partial(every, plans=("zero3", "hpz"), changes={"granularity": "module"}), structures)


def is_block(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


CHOSEN = {
    "names": ["blocks.0", "blocks.1.inner.1"],
    "nested": ["blocks.0", "blocks.0.inner.0", "blocks.0.inner.0.up", "blocks.1"],
    "everything": ["first", "blocks.0", "blocks.0.before", "blocks.1", "blocks.1.after", "last"],
    "none": [],
    "predicate": is_block,
}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", CHOSEN)
def test_units_as_chosen(chosen: str) -> None:
    run_ranks(4, partial(parity, Nested, ("zero3", "hpz", "inter"), units=CHOSEN[chosen]))


@pytest.mark.slow
@over_plans
def test_recomputation_of_nested_units(plans: Sequence[str]) -> None:
    run_ranks(4, partial(parity, Nested, plans, units=CHOSEN["nested"], changes={"recompute": True}))
