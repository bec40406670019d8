"""What ``.data =`` does to parameters, gradients, clones and aliases of them: as in torch, it moves a tensor to other
memory, and whoever had the memory before keeps it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.edge import gathered, raised, spread_evenly
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks


def same(value: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert torch.allclose(gathered(value), expected, atol=1e-5), what


def exchanged(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    p.data, q.data = q.data, p.data
    p.grad, q.grad = q.grad, p.grad
    return []


def exchanged_with_a_clone(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    other = p.detach().clone() * 0.5
    p.data, other.data = other.data, p.data
    return [other, q]


def kept_and_restored(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    """What classes that average weights do around an evaluation."""
    means, kept, before = [p.data.clone() * 0.5, q.data * 2], [p.data, q.data], p.detach()
    p.data, q.data = means
    seen = [p.detach().clone(), q.detach().clone()]
    p.data, q.data = kept
    with torch.no_grad():
        p.mul_(3)
    return [*seen, *means, *kept, before]


def loaded_and_followed(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    """A clone that a parameter is moved to follows it, and the other way round, until it moves on."""
    first, second = p.detach().clone() * 0.5, p.detach().clone() * 2
    p.data = first
    first.mul_(3)
    with torch.no_grad():
        p.add_(1)
    alias = first.detach()
    p.data = second
    first.mul_(5)
    return [first, second, alias, q]


def of_an_alias(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    alias, clone = p.data, p.detach().clone()
    alias.data = alias * 0.3
    clone.data = q.data
    with torch.no_grad():
        q.mul_(2)
    clone.add_(1)
    return [alias, clone]


def of_a_gradient(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    assert p.grad is not None
    assert q.grad is not None
    held, alias, other = p.grad, p.grad.detach(), q.grad.detach().clone()
    p.grad.data = p.grad * 0.3
    q.grad.data = other
    other.mul_(2)
    return [held, alias, other, p.grad.norm()]


def gradients_set(p: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    assert p.grad is not None
    former, gradient = p.grad, p.grad.detach() * 0.3
    p.grad = gradient
    gradient.mul_(2)
    p.grad.add_(1)
    q.grad = torch.zeros_like(q)
    return [former, gradient, p.grad.norm()]


WAYS = (
    exchanged,
    exchanged_with_a_clone,
    kept_and_restored,
    loaded_and_followed,
    of_an_alias,
    of_a_gradient,
    gradients_set,
)


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3", "on the host"])
@on_ranks(2)
def test_data_is_assigned_as_in_torch(plan: str) -> None:
    alone = spread_evenly(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    x = torch.linspace(-1, 1, 6).view(2, 3)
    changes = {"residence": {"optimizer": "host-stream"}} if plan == "on the host" else {}
    preset = "zero1" if changes else plan
    made = tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32", **changes)
    for way in WAYS:
        model, single = tw.shard(copy.deepcopy(alone), made), copy.deepcopy(alone)
        optimizers = tw.optimizer(model, torch.optim.SGD, lr=0.1), torch.optim.SGD(single.parameters(), lr=0.1)
        outcomes = []
        for each, optimizer in zip((model, single), optimizers, strict=True):
            each(x).square().mean().backward()
            seen = way(each[0].weight, each[1].weight)
            before = each(x)
            optimizer.step()
            outcomes.append([*seen, before, each(x), *each.parameters()])
        for value, expected in zip(*outcomes, strict=True):
            same(value, expected, f"{way.__name__} under {plan}")


@on_ranks(2)
def test_frozen_values_are_restored_where_an_assignment_has_given_them_a_master() -> None:
    layers = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3))
    model = tw.shard(layers, tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="bfloat16"))
    weight = model[0].weight
    before = weight.detach().full_tensor()
    for number in range(3):
        kept = weight.data
        weight.data = torch.full_like(kept, number)
        assert weight.detach().full_tensor().unique().tolist() == [number]
        weight.data = kept
        assert torch.equal(weight.detach().full_tensor().bfloat16(), before)


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@on_ranks(2)
def test_data_is_assigned_inside_full_parameters(preset: str) -> None:
    model = tw.shard(nn.Linear(3, 3), tw.Plan.preset(preset, nodes=1, local=2))
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.0)
    with tw.full_parameters(model, write=True):
        model.weight.data = torch.full((3, 3), 2.0, dtype=model.weight.dtype)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    assert tw.full_state_dict(model)["weight"].unique().tolist() == [2.0]

    def lost() -> None:
        with tw.full_parameters(model):
            model.weight.data = torch.zeros_like(model.weight)

    assert "weight was written inside full_parameters(model)" in raised(UsageError, lost)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@on_ranks(2)
def test_data_is_written_inside_full_parameters(preset: str, dtype: str) -> None:
    plan = tw.Plan.preset(preset, nodes=1, local=2, compute_dtype=dtype)
    model = tw.shard(nn.Linear(3, 3), plan)
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.0)
    computed = getattr(torch, dtype)
    before = tw.full_state_dict(model)["weight"].to(computed)
    with tw.full_parameters(model, write=True):
        model.weight.data[1].mul_(2)
    model(torch.ones(2, 3)).sum().backward()
    optim.step()
    before[1] *= 2
    assert torch.equal(tw.full_state_dict(model)["weight"].to(computed), before)

    def lost() -> None:
        with tw.full_parameters(model):
            model.weight.data.zero_()

    if dtype == "bfloat16":  # otherwise, where P is whole, the parameters are the masters
        assert "weight was written inside full_parameters(model)" in raised(UsageError, lost)


@on_ranks(2)
def test_other_shapes_and_dtypes_are_refused() -> None:
    model = tw.shard(nn.Linear(3, 3), tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    clone = model.weight.detach().clone()
    assert "Convert the model before" in raised(UsageError, setattr, model.weight, "data", clone.double())
    assert "Convert what is assigned" in raised(UsageError, setattr, clone, "data", clone.double())
    assert "shape (2, 3)" in raised(UsageError, setattr, clone, "data", torch.zeros(2, 3))
