"""Inputs and outputs of a forward may have any form; buffers are not sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import (
    ADAMW,
    WIDTH,
    Place,
    every,
    over_plans,
    plan,
    samples,
    train_sharded,
)
from tests.support.training.models import Block, Stack
from torch import nn

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


class Box:
    """An object that no container type describes."""

    def __init__(self, *held: Any) -> None:
        self.held = list(held)
        self.me = self


class Slotted:
    __slots__ = ("empty", "held")

    def __init__(self, held: Any) -> None:
        self.held = held


FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "object": (Box, lambda form: form.held[0]),
    "object with slots": (lambda x: Slotted(Box(x)), lambda form: form.held.held[0]),
    "object beside a tensor": (lambda x: (torch.tensor(1), Box(x)), lambda form: form[1].held[0]),
    "object beside the same": (lambda x: {"spare": x * 1, "box": Box(x)}, lambda form: form["box"].held[0]),
}


class Wrapped(Block):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.give, self.take = FORMS[form]

    def forward(self, form: Any) -> Any:
        return self.give(super().forward(self.take(form)))


class Former(Stack):
    """Blocks that take and return their activations in some form."""

    def __init__(self, form: str) -> None:
        super().__init__(3, partial(Wrapped, form))
        self.give, self.take = FORMS[form]

    def forward(self, x: torch.Tensor) -> Any:
        form = self.give(self.first(x))
        for block in self.blocks:
            form = block(form)
        return form

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        return model.take(model(x)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero1-node"])
def test_outputs_of_any_form(name: str) -> None:
    run_ranks(4, partial(every, plans=(name,)), [partial(Former, form) for form in FORMS])


class ParameterAsArgument(nn.Module):
    """Blocks get a parameter of the root as an input, whose gradient ends no block's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.position)
        return x

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.tanh(self.frozen(x * position)))


@pytest.mark.slow
def test_parameters_as_inputs() -> None:
    run_ranks(4, every, (ParameterAsArgument,))


# -- buffers ---------------------------------------------------------------------------------------------------


class Normed(Stack):
    """Running statistics of the data, and buffers of every kind, different on every rank at first."""

    def __init__(self) -> None:
        super().__init__(2)
        self.statistics = nn.BatchNorm1d(WIDTH)
        seed = int(torch.randint(0, 1 << 30, ()))
        self.register_buffer("secret", torch.full((3,), float(seed)), persistent=False)
        self.register_buffer("wide", torch.full((1, 2), float(seed)).expand(5, 2))
        self.register_buffer("turned", torch.arange(6.0).add(seed).view(2, 3).t())
        self.register_buffer("mask", torch.tensor([True, seed % 2 == 0, bool(dist.get_rank())]))
        self.register_buffer("rotation", torch.polar(torch.tensor([seed % 7 + 1.0]), torch.ones(1)))
        self.register_buffer("precise", torch.tensor(float(seed), dtype=torch.float64))
        self.register_buffer("small", torch.tensor([seed % 100], dtype=torch.int16))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("none", None)
        self.blocks[1].register_buffer("inner", torch.tensor(seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(x))


def check_buffers(name: str) -> None:
    rank = dist.get_rank()
    torch.default_generator.manual_seed(rank)
    raw = Normed()
    types = {key: (value.dtype, value.shape) for key, value in raw.named_buffers()}
    firsts: list[Any] = [None] * 4
    dist.all_gather_object(firsts, {key: value.clone() for key, value in raw.named_buffers()})
    model = tw.shard(raw, plan(name))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    for key, value in model.named_buffers():
        assert (value.dtype, value.shape) == types[key], key
        assert torch.equal(value, firsts[0][key]), f"{key} is not rank 0's"
    alone = nn.BatchNorm1d(WIDTH)
    for step in range(2):
        for x in samples(step, 2, 4)[:, rank]:
            alone(x)
    train_sharded(model, optim, steps=range(2), micro_batches=2)
    for key, value in alone.named_buffers():
        assert torch.equal(value, model.statistics.get_buffer(key)), key
    model.eval()
    with torch.no_grad():
        x = samples(9, 1, 4)[0, rank]
        assert torch.isfinite(model(x)).all()
    with tw.full_parameters(model):
        saved = model.state_dict()
    assert "secret" not in saved
    assert torch.equal(saved["statistics.running_mean"], alone.running_mean)


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_buffers_start_as_rank_zeros_and_then_stay_local(plans: Sequence[str]) -> None:
    for name in plans:
        check_buffers(name)
