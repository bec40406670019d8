"""Steps that fail half-way: no stale gradient is applied, and training continues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State
from thinwire.spec import Plan
from thinwire.testing import RankError, run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.smoke]


class Fuse(torch.autograd.Function):
    """Passes values on; its backward raises while it is armed."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if Fuse.armed:
            raise FloatingPointError("blown")
        return grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1:
                x = Fuse.apply(x)
        return x.square().mean()


def train(toml: str, fail_in: int | None, forget: bool = True) -> list[float]:
    torch.manual_seed(0)
    model = tw.shard(Model(), Plan.from_toml(toml))
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    for part in runtime(model).reducer.parts:
        part.owned.values.fill_(float("nan"))  # its content is undefined while it is empty
    generator = torch.Generator().manual_seed(control().rank)
    for step in range(4):
        x = torch.randn(3, 6, generator=generator)
        if step == fail_in:
            Fuse.armed = True
            with pytest.raises(FloatingPointError):
                model(x).backward()
            Fuse.armed = False
            if forget:
                optim.zero_grad()
            if runtime(model).units[0].sharded:
                assert all(unit.state is State.SHARDED for unit in runtime(model).units)
        for micro_batch in tw.micro_batches(model, [x, 2 * x]):
            model(micro_batch).backward()
        optim.step()
        optim.zero_grad()
    with tw.full_parameters(model):
        return [float(v) for p in model.parameters() for v in p.detach().flatten()]


@pytest.mark.parametrize("preset", ["zero3", "zero1-node", "ddp", "zero2"])
def test_training_continues_after_a_failed_backward(preset: str) -> None:
    toml = Plan.preset(preset, nodes=2, local=2, compute_dtype="float32").to_toml()
    untouched = run_ranks(4, train, toml, None)
    for fail_in in (0, 2):
        assert run_ranks(4, train, toml, fail_in) == untouched


def step_without(toml: str, what: str) -> tuple[str, bool]:
    """Take a good step, then one in which something is missing; the error, and whether parameters moved."""
    torch.manual_seed(0)
    model = tw.shard(Model(), Plan.from_toml(toml))
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 6)).backward()
    optim.step()
    optim.zero_grad()
    with tw.full_parameters(model):
        before = [p.detach().clone() for p in model.parameters()]
    error = ""
    try:
        if what == "last micro-batch":
            for number in tw.micro_batches(model, range(2)):
                loss = model(torch.ones(2, 6))
                if number == 0:
                    loss.backward()
        else:
            Fuse.armed = True
            with pytest.raises(FloatingPointError):
                model(torch.ones(2, 6)).backward()
        optim.step()
    except UsageError as refusal:
        error = str(refusal)
    finally:
        Fuse.armed = False
    with tw.full_parameters(model):
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return error, moved


@pytest.mark.parametrize("what", ["last micro-batch", "failed backward"])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero1-node", "zero3"])
def test_no_step_is_taken_on_unfinished_gradients(preset: str, what: str) -> None:
    toml = Plan.preset(preset, nodes=1, local=2, compute_dtype="float32").to_toml()
    for error, moved in run_ranks(2, step_without, toml, what):
        assert not moved
        if what == "last micro-batch" and preset not in ("zero3",):
            assert "the last of thinwire.micro_batches(...) is missing" in error


def evaluate_differently(toml: str) -> None:
    torch.manual_seed(0)
    model = tw.shard(Model(), Plan.from_toml(toml))
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        model.layers[control().rank % 2](torch.ones(1, 6))
    model(torch.ones(2, 6)).backward()
    optim.step()


def test_ranks_that_evaluate_different_units_raise_an_error() -> None:
    with pytest.raises(RankError, match="ran different steps"):
        run_ranks(2, evaluate_differently, Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32").to_toml())
