"""A step makes few calls: each costs a microsecond of Python that hides nothing, where units are small."""

from __future__ import annotations

import pytest
import torch
from tests.support.training.edge import WIDTH
from tests.support.training.models import Block
from tools.probes import ROOT, summary, visiting
from torch import nn

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

MOST = {"zeropp": 1400, "zero3": 900, "thinwire": 550}
"""Calls of thinwire on the computing thread of two ranks."""

UNITS = ["embedding", *(f"blocks.{number}" for number in range(4)), "head"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y.square().mean()


def calls_of_a_step(preset: str) -> int:
    model = tw.shard(Model(), tw.Plan.preset(preset, nodes=2, local=1), units=UNITS)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)

    def step() -> None:
        model(torch.randn(4, WIDTH)).backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()

    for _ in range(4):
        step()
    source = ROOT / "src"
    with visiting(source) as visit:
        step()
    return summary(visit.functions(source))["calls"]


@pytest.mark.parametrize("preset", MOST)
def test_a_step_makes_few_calls(preset: str) -> None:
    calls = run_ranks(2, calls_of_a_step, preset)
    assert max(calls) <= MOST[preset]
    assert min(calls) > MOST[preset] // 2  # it counts
