"""What a backward still has to read stays, or is gathered again: programs beside plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks

WIDTH = 6


class Net(nn.Module):
    """Linear layers that are units, in a root with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.temperature = nn.Parameter(torch.rand(WIDTH))

    def blocks_of(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks_of(x) * self.temperature


class Frozen(Net):
    """The root's frozen parameters lie between its own trained one and the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.convolution = nn.Conv1d(3, 3, 1).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.convolution(self.blocks_of(x) @ self.weight * self.scale) * self.temperature


class Tied(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.blocks_of(x), self.blocks[0].weight) * self.temperature


class Detached(Net):
    """Gradients stop at parameters that the way to the blocks reads after their own gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks_of(x) * self.temperature.detach() * self.temperature.data
        return super().forward(F.linear(x, self.blocks[1].weight.detach()))


class Penalty(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Adapter(nn.Module):
    """A unit that keeps losses of activations: of one before its output, and of two after."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.convolution = nn.Linear(WIDTH, WIDTH), nn.Conv1d(3, 3, 1)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x)
        self.losses = [(x * self.scale).mean()]
        y = y * self.scale
        self.losses += [(y * self.scale).square().mean(), self.router(y).square().mean()]
        return y


class Keeps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(2))
        self.features = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = self.blocks_of(x) * self.temperature
        return self.features * self.temperature


class Changing(nn.Module):
    """A unit that changes its input in place, by its frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(self.scale)
        x += self.frozen(x * self.scale)
        return self.trained(x)


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Changing(), Changing()])


class Energy(Net):
    """Its output is a gradient, whose graph reads parameters without a hook."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = torch.tanh(super().forward(x)).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


def loss_of(model: nn.Module) -> torch.Tensor:
    loss = model(torch.full((2, 3, WIDTH), 0.3)).square().mean()
    kept = [loss for block in model.blocks for loss in getattr(block, "losses", [])]
    return loss + sum(kept)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 3, WIDTH))


def plainly(model: nn.Module) -> None:
    loss_of(model).backward()


def after_evaluations(model: nn.Module) -> None:
    loss = loss_of(model)
    evaluate(model)
    with torch.no_grad():
        model.blocks[1](torch.ones(2, 3, WIDTH))
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 3, WIDTH + 1))
    loss.backward()


def twice_with_evaluation(model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    evaluate(model)
    loss.backward()


def twice_with_another(model: nn.Module) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    model.blocks[1](torch.ones(2, 3, WIDTH)).sum().backward()
    loss.backward()


def row_by_row(model: nn.Module) -> None:
    """Gradients of a gradient, which read parameters in nodes without hooks."""
    x = torch.full((2, 3, WIDTH), 0.3, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.tanh(model(x)).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(grad[0, 0, i], x, retain_graph=True)[0] for i in range(3)]
    sum(torch.autograd.grad(grad.sum() * row.sum(), x, create_graph=True)[0].sum() for row in rows).backward()


def after_a_failure(model: nn.Module) -> None:
    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError

    loss = loss_of(model)
    failing = model.blocks[1](torch.ones(2, 3, WIDTH))
    failing.register_hook(fail)
    both = loss + failing.sum()
    with pytest.raises(ArithmeticError):
        both.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()


def by_what_is_kept(model: nn.Module) -> None:
    """Backwards that no output is part of."""
    loss = loss_of(model)
    for kept in (*model.blocks[0].losses, model.features.mean(), loss):
        kept.backward(retain_graph=True)


def built(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(0)
    return kind()


def sharded(kind: Callable[[], nn.Module]) -> nn.Module:
    plan = tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32")
    model = built(kind)
    return tw.shard(model, plan, units=[f"blocks.{number}" for number in range(len(model.blocks))])


@pytest.mark.parametrize("kind", [Frozen, Tied, Detached, Penalty, Keeps, InPlace, Energy])
@on_ranks(2)
def test_gradients_are_those_of_plain_torch(kind: Callable[[], nn.Module]) -> None:
    ways = (plainly, after_evaluations, twice_with_evaluation, twice_with_another, after_a_failure)
    special = {Keeps: by_what_is_kept, Frozen: row_by_row}
    for way in (*ways, special[kind]) if kind in special else ways:
        alone, model = built(kind), sharded(kind)
        for one in (alone, model):
            way(one)
        for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
            if want.grad is not None:
                assert torch.allclose(got.grad.full_tensor(), want.grad, atol=1e-6), (way.__name__, name)


@on_ranks(2)
def test_a_backward_that_reaches_freed_parameters_is_refused() -> None:
    found: list[torch.Tensor] = []
    model = sharded(Keeps)
    model.blocks[1].convolution.register_forward_hook(lambda _module, _args, output: found.append(output))
    loss_of(model)
    with pytest.raises(UsageError, match=r"reached blocks\.1\.convolution\.\w+, and none of the outputs of its unit"):
        found[0].square().mean().backward()
    model.zero_grad()
    loss_of(model).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


class ToNumpy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.blocks[0].weight.detach().numpy()
        return super().forward(x)


@on_ranks(2)
def test_memory_that_numpy_keeps_is_named() -> None:
    model = sharded(ToNumpy)
    with pytest.raises(UsageError, match=r"one of blocks\.0\.weight, blocks\.0\.bias was given to numpy\(\)"):
        loss_of(model).backward()
