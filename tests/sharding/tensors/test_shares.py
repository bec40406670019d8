"""Parameters outside of forward and backward: shares that are read, written, differentiated and optimized as any
tensor."""

from __future__ import annotations

import copy
import math
import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.ranks import on_ranks
from tests.support.training.edge import build, gathered, plan, raised, samples, spread_evenly
from tests.support.training.models import Stack
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.tensors.spec import boxes
from thinwire.sharding.tensors.tensor import ShareTensor

pytestmark = pytest.mark.ranks

PLANS = ("zero1", "zero3", "whole tensors", "ddp", "zero2", "hpz", "zero1-node", "inter")


class Learned(Stack):
    """A root with one direct parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(self.first.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Pair:
    """A sharded model and the same model unsharded, trained on the same data."""

    def __init__(self, name: str, **changes: Any) -> None:
        self.one = build(Learned)
        self.model = tw.shard(build(Learned), plan(name, **changes))
        self.names = [name for name, _ in self.one.named_parameters()]
        self.label = name

    def parameters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        mine, theirs = dict(self.model.named_parameters()), dict(self.one.named_parameters())
        return [(mine[name], theirs[name]) for name in self.names]

    def backward(self, number: int = 0) -> torch.Tensor:
        losses = [model(samples(number, 1, 4)[0, 0]).square().mean() for model in (self.model, self.one)]
        for loss in losses:
            loss.backward()
        return losses[0]

    def check(self, what: str, tolerance: float = 1e-5) -> None:
        for name, (mine, theirs) in zip(self.names, self.parameters(), strict=True):
            assert torch.allclose(gathered(mine), theirs, 1e-5, tolerance), f"{what} under {self.label}: {name}"

    def check_gradients(self, what: str, tolerance: float = 1e-6) -> None:
        for name, (mine, theirs) in zip(self.names, self.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"{what} under {self.label}: {name}"
            if mine.grad is not None:
                assert torch.allclose(gathered(mine.grad), theirs.grad, rtol=1e-4, atol=tolerance), (
                    f"{what} under {self.label}: gradient of {name}"
                )


def same(value: Any, expected: Any, what: str) -> None:
    value, expected = torch.as_tensor(value).detach(), torch.as_tensor(expected).detach()
    value = gathered(value)
    assert value.shape == expected.shape, what
    assert value.dtype == expected.dtype, what
    assert torch.allclose(value, expected, rtol=1e-5, atol=1e-6), what


class Rows(list[torch.Tensor]):
    """A list that torch takes and pytrees do not know."""


# -- reading ---------------------------------------------------------------------------------------------------

LARGE = 2**53 + 1
"""float64 rounds it."""

READS: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda p: p.norm(),
    "1-norm": lambda p: p.norm(1),
    "inf-norm": lambda p: torch.linalg.vector_norm(p, math.inf),
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "max": lambda p: p.max(),
    "min": lambda p: p.amin(),
    "max of integers": lambda p: ((p * 0).long() + LARGE).max() - LARGE + 1,
    "sum of integers": lambda p: ((p * 0).long() + LARGE).sum() - (LARGE - 1) * p.numel(),
    "maxima of a list": lambda p: torch._foreach_max([p, p])[1],
    "norms of a list": lambda p: torch._foreach_norm([p], 1, torch.float64)[0],
    "isnan": lambda p: p.isnan().any(),
    "isfinite": lambda p: p.isfinite().all(),
    "count": lambda p: (p > 0).sum(),
    "std": lambda p: p.std(),
    "rows": lambda p: p.sum(-1),
    "slice": lambda p: p[:2],
    "flat": lambda p: p.view(-1),
    "bf16": lambda p: p.to(torch.bfloat16),
    "copy": lambda p: p.clone(),
    "numpy": lambda p: torch.from_numpy(p.full_tensor().numpy()) if isinstance(p, ShareTensor) else p,
    "chain": lambda p: (p.abs().sqrt() * 3 + p.clamp(-0.1, 0.1)).square().mean().sqrt(),
    "plain": lambda p: p + torch.arange(p.numel(), dtype=torch.float32).view(p.shape),
    "equal": lambda p: torch.equal(p, p.clone()),
    "allclose": lambda p: torch.allclose(p, p + 1e-12),
    "float": lambda p: float(p.max()),
    "list of another class": lambda p: torch.stack(Rows([p, p])),
}


@pytest.mark.slow
@on_ranks(4)
def test_shares_read_as_the_whole_parameter() -> None:
    for name in PLANS:
        pair = Pair(name)
        with torch.no_grad():
            for what, read in READS.items():
                for mine, theirs in pair.parameters():
                    same(read(mine), read(theirs), f"{what} of {tuple(theirs.shape)} under {name}")
            same(
                parameters_to_vector(m for m, _ in pair.parameters()), parameters_to_vector(pair.one.parameters()), name
            )
        weight = pair.model.first.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
        assert weight.dtype == torch.float32
        assert "first.weight" in repr(weight)
        local = weight.to_local()
        assert local.numel() == weight.spec.length
        assert local.numel() < weight.numel() or name in ("ddp", "inter", "whole tensors")


# -- writing ---------------------------------------------------------------------------------------------------


def sum_and_send(model: nn.Module) -> None:
    """Collectives that a loop calls itself, as to average the weights of ranks."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        work = dist.all_reduce(parameter, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        work.wait()
        parameter.data /= 2
        dist.broadcast(parameter.data, src=1)


@pytest.mark.slow
@on_ranks(4)
def test_collectives_of_a_loop_reach_every_rank() -> None:
    x = samples(0, 1, 4)[0, 0]
    for name in PLANS:
        pair = Pair(name)
        sum_and_send(pair.model)
        sum_and_send(pair.one)
        pair.check("sums and broadcasts")
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert torch.allclose(pair.model(x), pair.one(x), atol=1e-5), name


@on_ranks(4)
def test_a_sum_that_a_rank_joins_late_arrives() -> None:
    """Sums, of a parameter and of a row of it, that one rank joins late."""
    model = tw.shard(build(Stack), plan("zero3"))
    parameter = next(model.parameters())
    wanted = 4 * parameter.detach().full_tensor()
    wanted[0] *= 4
    for part in (parameter.data, parameter.data[0]):
        if dist.get_rank() == 1:
            time.sleep(0.5)
        work = dist.all_reduce(part, async_op=True)
        assert work is not None
        work.wait()
    assert torch.equal(parameter.detach().full_tensor(), wanted)


@pytest.mark.slow
@on_ranks(4)
def test_whole_parameters_are_written_where_asked() -> None:
    for name in PLANS:
        for dtype in ("float32", "bfloat16"):
            pair = Pair(name, compute_dtype=dtype)
            with torch.no_grad():
                before = [gathered(mine).clone() for mine, _ in pair.parameters()]
                with tw.full_parameters(pair.model, write=True):
                    pair.model.first.weight[1, 2] = 7.0
            for parameter_name, (mine, _), old in zip(pair.names, pair.parameters(), before, strict=True):
                changed = (gathered(mine) != old).nonzero().tolist()
                assert changed == ([[1, 2]] if parameter_name == "first.weight" else []), f"{parameter_name}, {name}"
            if name not in ("ddp",) or dtype == "bfloat16":

                def write(model: nn.Module = pair.model) -> None:
                    with torch.no_grad(), tw.full_parameters(model):
                        model.first.weight.fill_(1.0)

                assert "write=True" in raised(UsageError, write)


# -- gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plans", [PLANS[:3], pytest.param(PLANS[3:], marks=pytest.mark.slow)])
@on_ranks(4)
def test_clipping_of_any_order(plans: tuple[str, ...]) -> None:
    for name in plans:
        pair = Pair(name)
        for step, order in enumerate((2.0, 1.0, math.inf, 3.0)):
            for clip in (clip_grad_norm_, lambda p, *a, **k: tw.clip_grad_norm_(p, *a, **k)):
                pair.backward(step)
                given = pair.model.parameters() if clip is clip_grad_norm_ else pair.model
                norm = clip(given, 0.01, norm_type=order)
                expected = clip_grad_norm_(pair.one.parameters(), 0.01, norm_type=order)
                assert math.isclose(float(norm), float(expected), rel_tol=1e-4), f"{order} under {name}"
                pair.check_gradients(f"clipped by {order}")
                for model in (pair.model, pair.one):
                    model.zero_grad()
        pair.backward()
        for model in (pair.model, pair.one):
            clip_grad_value_(model.parameters(), 1e-3)
        pair.check_gradients("clipped by value")


@pytest.mark.slow
@on_ranks(4)
def test_penalties_on_parameters() -> None:
    """Terms of the loss that read parameters outside of the model's forward."""
    x = samples(0, 1, 4)[0, 0]
    for name in PLANS:
        pair = Pair(name)
        for model in (pair.model, pair.one):
            loss = model(x).square().mean()
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
            loss = loss + 0.1 * sum(p.norm() for p in model.parameters()) + model.first.weight.sum()
            loss = loss + model.first.weight[1:3].square().sum() + F.linear(x, model.first.weight).mean()
            loss.backward()
        pair.check_gradients("penalty", 1e-5)
        # Each rank scales its penalty by something of its own: gradients are the mean.
        for model in (pair.model, pair.one):
            model.zero_grad()
        (float(dist.get_rank() + 1) * pair.model.first.weight.square().sum()).backward()
        (2.5 * pair.one.first.weight.square().sum()).backward()
        pair.check_gradients("a penalty that differs from rank to rank", 1e-5)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@on_ranks(4)
def test_hooks_see_gradients_of_all_uses_at_once(preset: str) -> None:
    pair = Pair(preset)
    for each in (pair.model, pair.one):
        weight = each.first.weight
        handle = weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        loss = each(samples(0, 1, 4)[0, 0]).square().mean() + weight.square().sum() + weight.norm()
        (loss + sum(map(torch.sum, torch._foreach_mul([weight, each.first.bias], 0.1)))).backward()
        handle.remove()
    pair.check_gradients("hooked")
    weight = pair.model.first.weight
    loss = weight.square().sum()
    weight.register_hook(lambda gradient: gradient)
    assert "set hooks before the loss is computed" in raised(UsageError, loss.backward)
    loss = torch.zeros_like(weight.detach()).add_(weight).sum()
    assert "out of place" in raised(UsageError, loss.backward)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@on_ranks(4)
def test_aliases_that_require_gradients_have_their_own(preset: str) -> None:
    pair, x = Pair(preset), samples(0, 1, 4)[0, 0]
    outcomes = []
    for weight in (each.first.weight for each in (pair.model, pair.one)):
        alias = weight.detach().requires_grad_()
        (x @ alias.T).square().mean().backward()
        (by_grad,) = torch.autograd.grad(alias.square().sum(), alias)
        ours, plain = torch.autograd.grad((x.requires_grad_() @ alias.T).square().mean(), (alias, x))
        assert type(plain) is torch.Tensor
        assert weight.grad is None
        outcomes.append((alias.grad, by_grad, ours, plain))
    for value, expected in zip(*outcomes, strict=True):
        same(value, expected, "a gradient")


# -- optimizers that users make --------------------------------------------------------------------------------


class AskedNorm(torch.optim.SGD):
    """Divides every gradient by the norm of all of them, if a group asks for it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(group.get("normalize") for group in self.param_groups):
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            for grad in grads:
                grad.div_(norm)
        super().step(closure)


class Noisy(torch.optim.SGD):
    """Adds noise to every update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        super().step(closure)


@pytest.mark.parametrize("name", ["ddp", "zero1"])
@on_ranks(4)
def test_the_fast_optimizer_refuses_those_that_couple_parameters_or_draw(name: str) -> None:
    """Made by the user, they train as in one process: see the catalogue of behaviours."""
    model = tw.shard(build(Stack), plan(name))
    assert "draws random numbers" in raised(UsageError, tw.optimizer, model, Noisy, lr=0.1)
    if name != "ddp":
        asking = [{"params": "*", "normalize": True}]
        message = raised(UsageError, tw.optimizer, model, AskedNorm, lr=0.1, param_groups=asking)
        assert "other parameters' gradients" in message


# -- refusals --------------------------------------------------------------------------------------------------


def refusals_of(model: nn.Module, early: torch.optim.Optimizer) -> Mapping[str, Callable[[], Any]]:
    """Actions that are refused, by words of the sentence."""
    return {
        "has states of whole parameters, as it was made or has made steps": early.step,
        "a sharded model cannot be pickled": partial(copy.copy, model),
        "cannot be copied alone": partial(copy.deepcopy, model.blocks[0]),
        "cannot be pickled": partial(pickle.dumps, model.first.weight),
        "another parameter": partial(setattr, model.first, "weight", nn.Parameter(torch.ones(1))),
        "cannot be taken out": partial(delattr, model.first, "weight"),
        "are fixed once the model is sharded": partial(model.to, torch.bfloat16),
    }


@pytest.mark.slow
@on_ranks(4)
def test_refusals() -> None:
    for name in ("zero1", "zero3"):
        model = build(Learned)
        early = torch.optim.AdamW(model.parameters())
        model(samples(0, 1, 4)[0, 0]).square().mean().backward()
        early.step()
        early.zero_grad()
        model.own = nn.Parameter(torch.ones(2))
        tw.ignore(model.own)
        tw.shard(model, plan(name))
        x = samples(0, 1, 4)[0, 0]
        for message, action in refusals_of(model, early).items():
            assert message in raised(UsageError, action), message
        model.to("cpu")
        model.float()
        mine = torch.optim.AdamW(model.parameters())
        model(x)
        assert "without a backward" in raised(UsageError, mine.step)
        model.head = nn.Linear(2, 2)
        model(x).square().mean().backward()
        assert "head.weight was added after" in raised(UsageError, mine.step)
        del model.head
        mine.step()
        del model.own
        model.later = nn.Parameter(torch.ones(2))  # as many as before
        assert "later was added after" in raised(UsageError, mine.step)
        del model.later
        owner = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
        model(x).square().mean().backward()
        assert "both would update it" in raised(UsageError, mine.step)
        owner.step()
    assert "float64" in raised(UsageError, tw.shard, nn.Linear(2, 2, dtype=torch.float64), plan("zero3"))


# -- boxes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_cover_a_piece_exactly(shape: tuple[int, ...]) -> None:
    whole_tensor = torch.arange(math.prod(shape)).view(shape)
    for offset in range(whole_tensor.numel() + 1):
        for length in range(whole_tensor.numel() - offset + 1):
            cut = boxes(shape, offset, length)
            assert len(cut) <= max(1, 2 * len(shape) - 1)
            values = []
            for box in cut:
                index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
                assert box.start == len(values)
                values += whole_tensor[index].reshape(-1).tolist()
            assert values == list(range(offset, offset + length))


@pytest.mark.parametrize("preset", ["zero1", "zero1-node"])
@on_ranks(4)
def test_a_rank_that_owns_nothing_of_a_parameter_takes_part_in_clipping(preset: str) -> None:
    """Norm by torch's clipping, over ranks and alone, of a model whose units have one parameter each."""
    alone = spread_evenly(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))))
    plan = tw.Plan.preset(preset, nodes=2, local=2, partition="inter", bucket_bytes=1, compute_dtype="float32")
    model = tw.shard(copy.deepcopy(alone), plan, units=["0", "1"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        for data in tw.micro_batches(model, [torch.ones(2, 8)] * 2):
            model(data).square().mean().backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
        optimizer.step()
        optimizer.zero_grad()
    (2 * alone(torch.ones(2, 8)).square().mean()).backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(alone.parameters(), math.inf)), rel=1e-5)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@on_ranks(2)
def test_gradients_that_were_dropped_keep_their_values(preset: str) -> None:
    def outcome(model: nn.Sequential, drop: Callable[[], None]) -> list[torch.Tensor]:
        (first, second), x = (layer.weight for layer in model), torch.linspace(-1, 1, 6).view(2, 3)
        model(x).square().mean().backward()
        first.grad, second.grad = second.grad, first.grad
        held = [parameter.grad for parameter in model.parameters()]
        alias = first.grad.detach()
        drop()
        model(x).abs().mean().backward()
        seen = [*map(gathered, held), gathered(alias), held[0].norm(), *(gathered(p.grad) for p in model.parameters())]
        first.grad = None
        first.grad = held[0]
        for parameter in list(model.parameters())[1:]:
            parameter.grad = None
        return [*seen, gathered(first.grad)]

    alone = spread_evenly(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model = tw.shard(copy.deepcopy(alone), tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32"))
    drops = model.zero_grad, tw.optimizer(model, torch.optim.SGD, lr=0.1).zero_grad
    expected = outcome(alone, alone.zero_grad)
    for drop in drops:
        for value, other in zip(outcome(model, drop), expected, strict=True):
            same(value, other, "a gradient")
        model.zero_grad()


@on_ranks(2)
def test_a_gradient_may_be_that_of_a_parameter_that_is_cut_differently() -> None:
    alone = nn.Sequential(nn.Linear(3, 12), nn.Linear(12, 12))
    preset = tw.Plan.preset("zero1", nodes=1, local=2, compute_dtype="float32")
    model = tw.shard(copy.deepcopy(alone), preset, units=[])
    assert (model[0].bias.spec.length, model[1].bias.spec.length) == ((12, 0), (0, 12))[dist.get_rank()]
    for each in (model, alone):
        each(torch.ones(2, 3)).square().sum().backward()
        each[0].bias.grad = each[1].bias.grad
    same(model[0].bias.grad, alone[0].bias.grad, "a gradient")


@on_ranks(2)
def test_transforms_take_whole_parameters() -> None:
    alone, x = nn.Linear(3, 2), torch.ones(4, 3)

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        return torch.func.grad(loss)(dict(model.named_parameters()))

    model = tw.shard(copy.deepcopy(alone), tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    assert "torch.func with what model.named_parameters() lists there" in raised(UsageError, gradients, model)
    with tw.full_parameters(model):
        inside = gradients(model)
    for name, gradient in gradients(alone).items():
        same(inside[name], gradient, name)
