"""Scripts of forwards and backwards, run on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from tests.support.training.edge import (
    ADAMW,
    PLANS,
    TOLERANCE,
    Place,
    build,
    close,
    gap,
    plan,
    samples,
    whole,
)
from tests.support.training.models import Block, Stack
from torch import nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.sharding.api import runtime
from thinwire.sharding.params.param_group import State


class Session:
    """One model in training, sharded or alone: the same user code for both.

    Alone, a loss is the mean over the ranks' data; sharded, it is this rank's.
    """

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer, *, sharded: bool) -> None:
        self.model, self.optim, self.sharded = model, optim, sharded

    def loss(self, number: int) -> torch.Tensor:
        """A loss on the numbered piece of data."""
        data = samples(number, 1, 4)[0]
        if self.sharded:
            return self.model(data[dist.get_rank()]).square().mean()
        return torch.stack([self.model(x).square().mean() for x in data]).mean()

    def check_freed(self) -> None:
        """Nothing stays gathered."""
        if self.sharded:
            assert all(unit.state is State.SHARDED for unit in runtime(self.model).units if unit.sharded)

    def step(self) -> None:
        self.optim.step()
        self.optim.zero_grad()


def check_script(
    script: Callable[[Session], None],
    plans: Iterable[str] = PLANS,
    model_class: Callable[[], nn.Module] = Stack,
    **changes: Any,
) -> None:
    """On every rank: a script leaves the same parameters behind, sharded and alone."""
    reference = build(model_class)
    script(Session(reference, torch.optim.AdamW(reference.parameters(), **ADAMW), sharded=False))
    for name in plans:
        model = tw.shard(build(model_class), plan(name, **changes))
        script(Session(model, tw.optimizer(model, torch.optim.AdamW, **ADAMW), sharded=True))
        error = gap(whole(model), list(reference.parameters()))
        assert error <= TOLERANCE, f"{script.__name__} under {name}: parameters differ by {error:.1e}"
        close(model)


def two_forwards_one_backward(run: Session) -> None:
    for number in range(3):
        (run.loss(2 * number) + run.loss(2 * number + 1)).backward()
        run.step()


def two_forwards_two_backwards(run: Session) -> None:
    """In the order of a stack, then in that of a queue."""
    for number in range(3):
        losses = [run.loss(2 * number), run.loss(2 * number + 1)]
        for loss in losses if number % 2 else losses[::-1]:
            loss.backward()
        run.step()


def retained_graph(run: Session) -> None:
    for number in range(3):
        loss = run.loss(number)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        run.step()


def second_order(run: Session) -> None:
    """A penalty on the gradient with respect to the input."""
    for number in range(3):
        data = samples(number, 1, 4)[0]
        total = []
        for x in data[dist.get_rank()][None] if run.sharded else data:
            x = x.clone().requires_grad_()
            loss = run.model(x).square().mean()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            total.append(loss + gradient.square().sum())
        torch.stack(total).mean().backward()
        run.check_freed()
        run.step()
    run.loss(3).backward()
    run.step()


class Checkpointed(Stack):
    """The user's own activation checkpointing, around units."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedInside(Stack):
    """Checkpointing of parts of units."""

    def __init__(self) -> None:
        super().__init__(3, CheckpointedBlock)


class CheckpointedBlock(Block):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self.part, x, use_reentrant=self.reentrant))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(self.norm(x)))


class CheckpointedInsideReentrant(Stack):
    def __init__(self) -> None:
        super().__init__(3, CheckpointedReentrantBlock)


class CheckpointedReentrantBlock(CheckpointedBlock):
    reentrant = True


class CheckpointedWhole(Stack):
    """Several units in one checkpoint, the head in none: the backward begins outside."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.trunk, self.first(x), use_reentrant=self.reentrant))

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CheckpointedWholeReentrant(CheckpointedWhole):
    """The last thing to run: the backward begins inside."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.trunk, self.first(x), use_reentrant=True)


CHECKPOINTED = (
    Checkpointed,
    CheckpointedReentrant,
    CheckpointedInside,
    CheckpointedInsideReentrant,
    CheckpointedWhole,
    CheckpointedWholeReentrant,
)


class DroppingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


class Dropping(Stack):
    """Random numbers are drawn again as they were."""

    def __init__(self) -> None:
        super().__init__(3, DroppingBlock)

    @staticmethod
    def objective(model: nn.Module, x: torch.Tensor, place: Place) -> torch.Tensor:
        torch.default_generator.manual_seed(100 * place.step + 10 * place.micro_batch + place.rank)
        return model(x).square().mean()
