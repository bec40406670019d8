"""Every parameter begins at a multiple of 16 bytes, whatever lies before it; checkpoints do not depend on that."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.sharding.memory import layout

pytestmark = pytest.mark.ranks

PLANS = ("zero1", "zero3", "hpz", "zeropp", "thinwire")


class Odd(nn.Module):
    """A scalar and a vector of odd length before each matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(13))
        self.linear = nn.Linear(13, 13, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        addresses = [parameter.data_ptr() for parameter in (self.gain, self.shift, self.linear.weight)]
        assert not any(address % 16 for address in addresses), addresses
        return torch.tanh(self.gain * self.linear(x) + self.shift)


def start(plan: str, dtype: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.default_generator.manual_seed(0)
    model = tw.shard(Odd(), tw.Plan.preset(plan, nodes=2, local=2, compute_dtype=dtype))
    return model, tw.optimizer(model, torch.optim.AdamW, lr=1e-2)


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 13)).float().square().mean().backward()
    tw.clip_grad_norm_(model, 0.1)
    optim.step()
    optim.zero_grad()


EVERY = list(itertools.product(PLANS, ("float32", "bfloat16")))


@pytest.mark.parametrize("cases", [EVERY[3:5], pytest.param(EVERY, marks=pytest.mark.slow)])
@on_ranks(4)
def test_parameters_are_aligned(cases: list[tuple[str, str]]) -> None:
    for plan, dtype in cases:
        model, optim = start(plan, dtype)
        for _ in range(2):
            step(model, optim)


def end_to_end(numels: Iterable[int], itemsize: int, block: int | None = None) -> list[int]:
    """The layout of version 0.1: no padding between parameters."""
    del itemsize, block
    return [0, *itertools.accumulate(numels)][:-1]


def forward(block: Block, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(block.gain * block.linear(x) + block.shift)


def whole(model: nn.Module) -> list[torch.Tensor]:
    with tw.full_parameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.slow
@on_ranks(4)
def test_checkpoints_of_0_1_load(tmp_path: Path) -> None:
    """Save under the layout of version 0.1; load under today's, and make a step with the loaded state."""
    directory = tmp_path / "checkpoint"
    with mock.patch.object(layout, "slot_offsets", end_to_end), mock.patch.object(Block, "forward", forward):
        model, optim = start("zero3", "float32")
        for _ in range(2):
            step(model, optim)
        tw.save(model, optim, directory)
        step(model, optim)
        expected = whole(model)
    model, optim = start("zero1", "float32")
    tw.load(model, optim, directory)
    step(model, optim)
    values = [*expected, *whole(model)]
    half = len(values) // 2
    for before, after in zip(values[:half], values[half:], strict=True):
        torch.testing.assert_close(after, before)
