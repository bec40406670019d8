"""Parameters that are read outside of their module's forward, inputs of any dtype, and the end of a program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.ranks import on_ranks
from tests.support.training.edge import ADAMW, TOLERANCE, WIDTH, build, gap, parity, plan, samples, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.sharding.api import runtime

pytestmark = pytest.mark.ranks

READ = ("zero1-node", "zero3", "zero1", "zero2", "hpz", "mics", "ddp")
over_read = pytest.mark.parametrize(
    "plans", [pytest.param(READ[:2], id="few"), pytest.param(READ[2:], id="others", marks=pytest.mark.slow)]
)


class ReadsChildren(nn.Module):
    """No layer's forward ever runs: their parent computes with their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for layer in self.layers:
            x = x + torch.tanh(F.linear(x, layer.weight, layer.bias))
        return x


class ReadsTwice(nn.Module):
    """A layer is called, and its weight read before and after, as tied heads and tables of positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x + self.table.weight[: x.shape[0]].sum(0))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x, self.table.weight)


class ReadsAgain(ReadsTwice):
    """The same, computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.slow
@over_read
@on_ranks(4)
def test_weights_are_up_to_date_and_whole_wherever_a_forward_reads_them(plans: Sequence[str]) -> None:
    parity(ReadsChildren, plans, units=["inner", "layers.0", "layers.1", "layers.2"])
    for model_class in (ReadsTwice, ReadsAgain):
        parity(model_class, plans, units=["table", "layers.0", "layers.1"])


@on_ranks(4)
def test_reads_between_steps() -> None:
    """Between steps a rank may read what it has whole, alone; what is sharded it does not gather by itself."""
    for name in ("zero1-node", "zero3"):
        model = tw.shard(build(ReadsTwice), plan(name))
        optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
        for step in range(2):
            model(samples(step, 1, 4)[0, 0]).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if torch.distributed.get_rank() == 0:
                assert model.table.weight.shape == (WIDTH, WIDTH)
        with torch.no_grad():
            before = model(samples(9, 1, 4)[0, 0])
            assert torch.equal(model(samples(9, 1, 4)[0, 0]), before)
        if name == "zero3":
            assert all(unit.buffers[0].shard is not None for unit in runtime(model).units)
            assert not any(unit.ready for unit in runtime(model).units if unit.sharded)


class Scaled(nn.Module):
    """A buffer in fp32 makes fp32 of what it meets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return x


@on_ranks(4)
def test_units_take_inputs_of_any_dtype() -> None:
    model = tw.shard(build(Scaled), plan("zero3", compute_dtype="bfloat16"))
    assert model(samples(0, 1, 4)[0, 0]).dtype == torch.float32  # the buffer's, as in torch


SCRIPT = """
import torch, thinwire as tw
layers = [torch.nn.Linear(256, 256) for _ in range(8)]
model = tw.shard(torch.nn.Sequential(*layers), tw.Plan.preset("zero2", nodes=1, local=2))
optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
for _ in range(3):
    model(torch.randn(8, 256)).square().mean().backward()
    optim.step()
    optim.zero_grad()
"""


@pytest.mark.slow
def test_a_program_may_end_without_leaving_the_job(tmp_path: Path) -> None:
    """The last update is still being spread, by threads amid the transport."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    for _ in range(2):
        done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def train_on_retained_graphs(model: nn.Module, optim: torch.optim.Optimizer, places: list[int]) -> None:
    for step in range(2):
        loss = torch.stack([model(samples(step, 1, 4)[0, place]).square().mean() for place in places]).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optim.step()
        optim.zero_grad()


@over_read
@on_ranks(4)
def test_a_retained_graph_may_begin_with_a_read_weight(plans: Sequence[str]) -> None:
    """The second backward begins where the weight was read, before any unit's hook runs."""
    alone = build(ReadsTwice)
    train_on_retained_graphs(alone, torch.optim.AdamW(alone.parameters(), **ADAMW), [0, 1, 2, 3])
    for name in plans:
        model = tw.shard(build(ReadsTwice), plan(name), units=["table", "layers.0", "layers.1"])
        train_on_retained_graphs(model, tw.optimizer(model, torch.optim.AdamW, **ADAMW), [dist.get_rank()])
        assert gap(whole(model), list(alone.parameters())) <= TOLERANCE, name
