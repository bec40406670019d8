"""``accumulate_dtype = "bfloat16"``: gradient shards of two bytes, sums in fp32, one rounding for each reduction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.spec import Plan

pytestmark = pytest.mark.ranks

HALF_ULP = 2.0**-9
"""Largest relative error of rounding to bf16."""

PLANS = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "zero3": {},
    "hpz": {},
    "zero1-node": {},
    "amsp-13b": {},
    "zero1, inter": {"partition": "inter"},
    "zero3, inter": {"partition": "inter"},
    "zero1, one bucket": {"bucket_bytes": 1 << 30},
    "zero2, small buckets": {"bucket_bytes": 1},
}


def make_plan(name: str, **changes: Any) -> Plan:
    exact = {"compute_dtype": "float32", "reduce_dtype": "float32"}
    return Plan.preset(name.partition(",")[0], nodes=2, local=2, **(exact | PLANS[name] | changes))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def train(plan: Plan, num_micro_batches: int, poison: bool = False) -> dict[str, Any]:
    """The weights after one step of SGD with learning rate 1, the norm, and bytes of the gradient shard.

    Every micro-batch is the same, so that partial sums are multiples of one gradient and errors have a bound.
    """
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), plan, units=[f"layers.{i}" for i in range(3)])
    optim = tw.optimizer(model, torch.optim.SGD, lr=1.0)
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    x = torch.randn(8, 24, generator=generator)
    for _ in tw.micro_batches(model, range(num_micro_batches)):
        loss = model(x).square().mean() / num_micro_batches
        (loss * float("nan") if poison else loss).backward()
    norm = float(tw.clip_grad_norm_(model, 1e9))
    optim.step()
    optim.zero_grad()
    with tw.full_parameters(model):
        weights = torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])
    return {"weights": weights, "norm": norm, "bytes": runtime(model).sharded.arenas[0].nbytes}


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [4, 1])
@on_ranks(4)
def test_updates_differ_by_one_rounding_for_each_reduction(num_micro_batches: int) -> None:
    # Partial sums of 1 to M equal gradients are rounded once each; the last mean over replicas rounds once more.
    bound = ((num_micro_batches + 1) / 2 + 1) * HALF_ULP
    torch.default_generator.manual_seed(0)
    start = torch.cat([parameter.detach().flatten() for parameter in Model().parameters()])
    for name in PLANS:
        wanted = train(make_plan(name), num_micro_batches)
        got = train(make_plan(name, accumulate_dtype="bfloat16"), num_micro_batches)
        error = (got["weights"] - wanted["weights"]).norm() / (wanted["weights"] - start).norm()
        assert 0 < error <= bound, name
        assert abs(got["norm"] / wanted["norm"] - 1) <= bound, name
        assert got["bytes"] * 2 == wanted["bytes"], name


@pytest.mark.slow
@on_ranks(4)
def test_gradients_that_are_not_finite_stay_so() -> None:
    for name in ("zero1", "zero2", "zero3"):
        result = train(make_plan(name, accumulate_dtype="bfloat16"), 2, poison=True)
        assert result["norm"] != result["norm"]
        assert torch.isnan(result["weights"]).any()


def learn(plan: Plan, steps: int) -> list[float]:
    torch.default_generator.manual_seed(0)
    model = tw.shard(Model(), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, 24, generator=generator), torch.rand(16, 24, generator=generator) - 0.5
    losses = []
    for _ in range(steps):
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "zeropp", "thinwire"])
@on_ranks(4)
def test_training_in_bf16_with_codecs_learns_as_well(name: str) -> None:
    exact = Plan.preset(name, nodes=2, local=2)
    wanted, got = learn(exact, 30), learn(exact.with_(accumulate_dtype="bfloat16"), 30)
    assert wanted[-1] < 0.8 * wanted[0]
    assert got[-1] == pytest.approx(wanted[-1], rel=0.05)


@on_ranks(2)
def test_large_gradients_add_up_in_fp32() -> None:
    """The gradient of a large bf16 matrix over micro-batches is the fp32 sum of what autograd computes alone."""
    torch.default_generator.manual_seed(0)
    # More elements than are converted at once, in rows that do not divide them.
    alone = nn.Linear(1100, 2003, bias=False).bfloat16()
    inputs = torch.randn(3, 2, 1100).bfloat16()
    wanted = torch.zeros(2003, 1100)
    for x in inputs:
        alone.weight.grad = None
        alone(x).float().square().mean().backward()
        assert alone.weight.grad is not None
        wanted += alone.weight.grad
    model = nn.Sequential(nn.Linear(1100, 2003, bias=False))
    model[0].weight.data.copy_(alone.weight)
    model = tw.shard(model, Plan.preset("zero1", nodes=1, local=2, reduce_dtype="float32"))
    for x in tw.micro_batches(model, list(inputs)):
        model(x).float().square().mean().backward()
    assert torch.equal(model[0].weight.grad.full_tensor(), wanted)
