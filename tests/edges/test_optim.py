"""Any torch optimizer, parameter groups in any form, and ranks that own nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.behaviours.catalogue.optimizers import SecondMoment
from tests.support.ranks import on_ranks
from tests.support.training.edge import (
    ADAMW,
    TOLERANCE,
    WIDTH,
    build,
    gap,
    parity,
    plan,
    raised,
    train_alone,
    train_sharded,
    whole,
)
from tests.support.training.models import OneLayer, SmallerThanTheWorld, Stack, UnusedParameters
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks

THREE = ("zero3", "zero1-node", "inter")
over_three = pytest.mark.parametrize(
    "name", [THREE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in THREE[1:])]
)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, ADAMW),
    "AdamW fused": (torch.optim.AdamW, {**ADAMW, "fused": True}),
    "AdamW one by one": (torch.optim.AdamW, {**ADAMW, "foreach": False}),
    "Adam amsgrad": (torch.optim.Adam, {**ADAMW, "amsgrad": True, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "eps": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2, "eps": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "eps": 0.1, "momentum": 0.9, "centered": True}),
    "one of the user's own": (SecondMoment, {"lr": 1e-2}),
}


@pytest.mark.slow
@on_ranks(4)
def test_elementwise_optimizers() -> None:
    for label, (kind, options) in OPTIMIZERS.items():
        try:
            # A parameter without gradients has to be left alone by each of them.
            parity(UnusedParameters, THREE, optimizer=kind, options=options)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


# -- optimizers of whole tensors -------------------------------------------------------------------------------


class Matrices(nn.Module):
    """Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.last = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


class Uneven(nn.Module):
    """Cut in four, the first rank would have a whole matrix and the others parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(6, 8))


# Muon orthogonalises in bf16, where a difference in the last fp32 bit may turn a whole bf16 bit.
WHOLE = {"Adafactor": (torch.optim.Adafactor, {"lr": 0.05}, 1e-5), "Muon": (torch.optim.Muon, {"lr": 0.01}, 1e-3)}


@pytest.mark.slow
@pytest.mark.parametrize("label", WHOLE)
@on_ranks(4)
def test_optimizers_of_whole_tensors(label: str) -> None:
    kind, options, tolerance = WHOLE[label]
    for name in (*THREE, "hpz"):
        for model_class in (Matrices, Uneven):
            model = tw.shard(build(model_class), plan(name))
            message = raised(UsageError, tw.optimizer, model, kind, **options)
            assert message.startswith(f"{kind.__name__} updates whole tensors")
            assert "partition = 'inter' with params = 1x1" in message
    parity(
        Matrices, ("whole tensors", "ddp"), optimizer=kind, options=options, tolerance=tolerance, norm_tolerance=1e-3
    )
    reference = build(Matrices)
    train_alone(reference, kind(reference.parameters(), **options), steps=range(3), micro_batches=2, world=4)
    assert gap(list(reference.parameters()), list(build(Matrices).parameters())) > 30 * tolerance


# -- parameter groups ------------------------------------------------------------------------------------------


def torch_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Norms and biases do not decay, the head learns faster, the rest has the defaults."""
    head = list(model.last.parameters())
    flat = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
    flat = [p for p in flat if all(p is not other for other in head)]
    taken = {id(p) for p in (*head, *flat)}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return [{"params": flat, "weight_decay": 0.0}, {"params": head, "lr": 0.05}, {"params": rest}]


def groups_in_many_forms(model: nn.Module) -> Iterable[list[dict[str, Any]]]:
    flat, head, rest = torch_groups(model)
    named = [(name, p) for name, p in model.named_parameters() if any(p is q for q in flat["params"])]
    yield [{"params": ["*norm*", "blocks.*bias", "first.bias"], "weight_decay": 0.0}, {"params": "last.*", "lr": 0.05}]
    yield [flat, head, rest]
    yield [flat, {"params": model.last.parameters(), "lr": 0.05}]
    yield [{"params": named, "weight_decay": 0.0}, {"params": ["last.weight", model.last.bias], "lr": 0.05}]


@pytest.mark.slow
@over_three
@on_ranks(4)
def test_parameter_groups_in_every_form(name: str) -> None:
    options = {**ADAMW, "weight_decay": 0.5}
    reference = build(Stack)
    optim = torch.optim.AdamW(torch_groups(reference), **options)
    train_alone(reference, optim, steps=range(2), micro_batches=1, world=4)
    for number in range(4):
        model = tw.shard(build(Stack), plan(name))
        groups = list(groups_in_many_forms(model))[number]
        optim = tw.optimizer(model, torch.optim.AdamW, param_groups=groups, **options)
        assert [(g["lr"], g["weight_decay"]) for g in optim.param_groups] == [(0.01, 0.0), (0.05, 0.5), (0.01, 0.5)]
        train_sharded(model, optim, steps=range(2), micro_batches=1)
        assert gap(whole(model), list(reference.parameters())) <= TOLERANCE, f"form {number}"


@on_ranks(4)
def test_wrong_groups_are_named() -> None:
    model = tw.shard(build(Stack), plan("zero3"))
    wrong: list[tuple[Any, str]] = [
        ({"params": ["last.*"]}, "give a list of tables"),
        (
            [{"params": ["bocks.*"]}],
            r"param_groups[0]: pattern 'bocks.*' matches no parameter; names look like 'first.",
        ),
        ([{"params": "*bias"}, {"params": ["last.*"]}], "'last.bias' is in param_groups[0] and in param_groups[1]"),
        ([{"lr": 1.0}], "param_groups[0] has no key 'params'"),
        (
            [{"params": ["last.*"]}, {"params": [nn.Parameter(torch.ones(1))]}],
            "param_groups[1] holds a tensor that is no",
        ),
    ]
    for groups, message in wrong:
        error = raised(UsageError, tw.optimizer, model, torch.optim.AdamW, param_groups=groups, lr=0.1)
        assert message in error, error


# -- odds ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, *(pytest.param({kind: True}, id=kind) for kind in ("fused", "foreach"))])
@on_ranks(4)
def test_ranks_that_own_nothing(options: dict[str, Any]) -> None:
    parity(SmallerThanTheWorld, ("whole tensors", "zero3", "zero1-node"), options=ADAMW | options)
    parity(OneLayer, ("whole tensors", "inter"), options=ADAMW | options)
    model = tw.shard(build(SmallerThanTheWorld), plan("whole tensors"))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    owned: list[Any] = [None] * 4
    dist.all_gather_object(owned, len(optim.fragments))
    assert sorted(owned) == [0, 0, 0, 1]
    assert [group["params"] for group in optim.param_groups] == [list(model.parameters())]
    assert "ShardedOptimizer(AdamW" in repr(optim)
    assert f"{len(optim.fragments)} fragments" in repr(optim)


@pytest.mark.slow
@on_ranks(4)
def test_the_norm_of_many_elements_is_exact_under_any_plan() -> None:
    """fp32 sums of as many squares lose the fourth digit, and another one under each plan."""
    for name in ("ddp", "zero3"):
        model = tw.shard(nn.Linear(2048, 2048, bias=False), plan(name))
        gradient = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(3))
        (model.weight * gradient).sum().backward()
        found, expected = float(tw.clip_grad_norm_(model, 1e9)), float(gradient.double().norm())
        assert abs(found / expected - 1) < 2e-6, (name, found, expected)


@on_ranks(4)
def test_options_of_optimizers() -> None:
    model = tw.shard(build(Stack), plan("zero3"))
    tw.optimizer(model, torch.optim.AdamW, lr=1e-3, capturable=True)
    assert "differentiable" in raised(UsageError, tw.optimizer, model, torch.optim.AdamW, lr=1e-3, differentiable=True)
