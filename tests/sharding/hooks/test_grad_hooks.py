"""Small units take their gradients at once, by one hook, and notice when gradients come in another way."""

from __future__ import annotations

import contextlib
import functools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import WIDTH, samples
from tests.support.training.scripts import Session, check_script
from torch import nn

from thinwire.sharding.api import runtime

pytestmark = pytest.mark.ranks

WHOLE = ("zero1-node", "whole tensors")
SETTLED = 3
"""Backwards after which every unit has one hook."""


class Choosy(nn.Module):
    """A unit that uses some of its layers, in some order; the gradient of the layer used first comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order: tuple[int, ...] = (0, 1, 2)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = x + self.layers[number](x).tanh()
        self.kept = self.layers[2](x.detach())
        return x


class Chosen(nn.Module):
    """Two units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Choosy() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def blocks(run: Session) -> list[Choosy]:
    return list(run.model.blocks)  # type: ignore[arg-type]


def settle(run: Session) -> None:
    for number in range(SETTLED):
        run.loss(number).backward()
        run.step()
    if run.sharded:
        assert all(unit._only is not None for unit in runtime(run.model).passes.deliveries.values()), (
            "units have not settled"
        )


def other_order(run: Session, order: tuple[int, ...]) -> None:
    """Blocks use other layers, or in another order, from the fourth step to the sixth; then all as before."""
    settle(run)
    for number in range(SETTLED, SETTLED + 4):
        for block in blocks(run)[: 1 if number % 2 else 2]:
            block.order = order if number < SETTLED + 3 else (0, 1, 2)
        run.loss(number).backward()
        run.step()


def failed_backward(run: Session) -> None:
    """A backward that fails when some gradients have come leaves nothing behind."""
    settle(run)

    def fail(_grad: torch.Tensor) -> None:
        raise ArithmeticError

    block = blocks(run)[0]
    hook = block.layers[1].register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
    with contextlib.suppress(ArithmeticError):
        run.loss(8).backward()
    hook.remove()
    run.optim.zero_grad()
    for number in range(SETTLED, SETTLED + 2):
        run.loss(number).backward()
        run.step()


def kept_loss(run: Session, number: int) -> torch.Tensor:
    """A loss on what the second block has kept, which is not part of the model's output."""
    data = samples(number, 1, 4)[0]
    losses = []
    for x in (data[dist.get_rank()],) if run.sharded else data:
        run.model(x)
        kept = blocks(run)[1].kept
        assert kept is not None
        losses.append(kept.square().mean())
    return torch.stack(losses).mean()


def unreported_backward(run: Session) -> None:
    """A backward that reaches no parameter with a hook, first one that is dropped."""
    settle(run)
    kept_loss(run, SETTLED).backward()
    run.optim.zero_grad()
    kept_loss(run, SETTLED).backward()
    run.step()
    run.loss(SETTLED + 1).backward()
    run.step()


def backward_after_a_read(run: Session) -> None:
    """A second backward of a step, past every hook, after gradients were read, which exchanges them."""
    settle(run)
    loss = run.loss(SETTLED)
    loss.backward(retain_graph=True)
    last = blocks(run)[0].layers[2].weight
    assert last.grad is not None
    loss.backward(inputs=[blocks(run)[0].layers[1].bias])
    run.step()
    run.loss(SETTLED + 1).backward()
    run.step()


def second_order(run: Session) -> None:
    """A backward that records a graph of its own."""
    settle(run)
    for number in range(SETTLED, SETTLED + 2):
        run.loss(number).backward(create_graph=number == SETTLED)
        run.step()


ORDERS = ((1, 2), (0, 2), (2, 1, 0), (0, 1, 1, 2, 0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero3", "zero1-node"])
@on_ranks(4)
def test_gradients_in_any_order_after_units_have_settled(name: str) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # create_graph
        for order in ORDERS:
            check_script(functools.wraps(other_order)(partial(other_order, order=order)), (name,), Chosen)
        for script in (failed_backward, second_order):
            check_script(script, (name,), Chosen)
        if name in WHOLE:
            check_script(unreported_backward, WHOLE, Chosen)
            check_script(backward_after_a_read, WHOLE, Chosen)
