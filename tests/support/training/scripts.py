"""Scripts of forwards and backwards, run on ranks and in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
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
    """The user's own activation checkpointing: of each unit, of parts of units, or of all but the ends at once. The
    backward begins in the head, which is in none; under a reentrant one of all it begins inside, as the head is left
    out."""

    def __init__(self, what: str, *, reentrant: bool) -> None:
        super().__init__(3, Block if what != "parts" else partial(CheckpointedBlock, reentrant))
        self.what, self.reentrant = what, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.what == "all":
            x = checkpoint(self.trunk, x, use_reentrant=self.reentrant)
            return x if self.reentrant else self.last(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.what == "units" else block(x)
        return self.last(x)

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class CheckpointedBlock(Block):
    """A block of which a part is in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(self.part, x, use_reentrant=self.reentrant))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(self.norm(x)))


CHECKPOINTED = [
    partial(Checkpointed, what, reentrant=reentrant)
    for what in ("units", "parts", "all")
    for reentrant in (False, True)
]


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
