"""Optimizers that compile their update, as torchao's do: over pieces they work, over shares they say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, samples
from tests.support.training.models import Stack

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks


def descend(parameter: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    parameter.copy_(parameter.float() - rate * gradient.float())


class CompiledSGD(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    torch.compile(descend, fullgraph=True, backend="eager")(
                        parameter.detach(), parameter.grad, group["lr"]
                    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@on_ranks(2)
def test_compiled_updates(preset: str) -> None:
    """Losses with it, with torch's SGD, and what it says over shares."""
    found = []
    for kind in (CompiledSGD, torch.optim.SGD):
        torch.default_generator.manual_seed(0)
        model = tw.shard(build(Stack), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"))
        optim = tw.optimizer(model, kind, lr=0.1)
        losses = []
        for number in range(3):
            loss = model(samples(number, 1, 2)[0, dist.get_rank()]).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(float(loss.detach()))
        found.append(losses)
    model = tw.shard(build(Stack), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"))
    optim = CompiledSGD(model.parameters())
    model(samples(0, 1, 2)[0, dist.get_rank()]).square().mean().backward()
    with pytest.raises(UsageError) as caught:
        optim.step()
    ours, torchs, said = found[0], found[1], str(caught.value)
    assert ours == pytest.approx(torchs, rel=1e-6)
    assert "CompiledSGD.step() compiles its update" in said
    assert "thinwire.optimizer(model, CompiledSGD, ...)" in said
