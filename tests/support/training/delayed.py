"""Trainings under delays: with exchanges that stay on their device, so that streams are all that orders them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

import thinwire as tw
from thinwire.collectives.links.nccl import Membership, replace_nccl
from thinwire.sharding.grads.reducer import Reducer
from thinwire.sharding.lanes import lanes, streams
from thinwire.sharding.params.param_group import Unit
from thinwire.testing.delays import Place, delay_streams

WORLD = 4
PRESETS = ("ddp", "zero1", "zero3", "zeropp", "thinwire", "amsp-30b")
"""Exchanges of every kind; in the last one, gathers wait for spreads."""

WIDTH, STEPS = 64, 3


class Loopback:
    """A communicator whose other members send what this rank sends them. Its calls queue copies on the current stream,
    as NCCL's do. NCCL refuses two ranks on one card, and connections of the host would let the host wait.

    Args:
        membership: The members.
    """

    def __init__(self, membership: Membership) -> None:
        self._index, self._size = membership.index, len(membership.ranks)

    def _allgather_base(self, whole: torch.Tensor, mine: torch.Tensor, _options: Any) -> None:
        whole.view(self._size, -1).copy_(mine.clone())

    def allgather(self, outs: list[list[torch.Tensor]], mine: list[torch.Tensor], _options: Any) -> None:
        own = mine[0].clone()
        for piece in outs[0]:
            piece.copy_(own)

    def alltoall(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], _options: Any) -> None:
        for ours, theirs in zip(sent, received, strict=True):
            size = min(ours.numel(), theirs.numel())
            theirs[:size].copy_(ours[:size])
            theirs[size:].zero_()

    def _reduce_scatter_base(self, out: torch.Tensor, whole: torch.Tensor, _options: Any) -> None:
        out.copy_(whole.view(self._size, -1)[self._index] * self._size)

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


def train(name: str, device: str, steps: int = STEPS) -> list[float]:
    """Train a preset on this rank.

    Args:
        name: Name of the preset.
        device: Device of the model.
        steps: Updates of two micro-batches each.

    Returns:
        The loss of each step, which the host reads at the end.
    """
    torch.default_generator.manual_seed(0)
    plan = tw.Plan.preset(name, nodes=2, local=2, compute_dtype="float32")
    model = tw.shard(nn.Sequential(*(Block() for _ in range(3))).to(device), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
    losses = []
    for step in range(steps):
        batch = list(torch.randn(2, 8, WIDTH).to(device))
        # If none is marked as the last, a backward begins while the gradients of the one before are on their way.
        for x in tw.micro_batches(model, batch) if step % 2 else batch:
            loss = model(x).square().mean()
            loss.backward()
        losses.append(loss.detach())
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
    return torch.stack(losses).tolist()


def train_on_streams(name: str, device: str, place: Place | None, **options: Any) -> tuple[list[float], int]:
    """Train over :class:`Loopback`.

    Args:
        name: Name of the preset.
        device: Device of the model.
        place: What is late; ``None`` for nothing.
        **options: See :func:`~thinwire.testing.delays.delay_streams`.

    Returns:
        Losses, and the number of delays.
    """
    with replace_nccl(Loopback):
        if place is None:
            return train(name, device), 0
        with delay_streams(place, **options) as delays:
            return train(name, device), delays.number


begin = Reducer.begin


def begin_at_once(reducer: Reducer, turns: Any, *, last: bool) -> None:
    reducer._last = False
    begin(reducer, turns, last=last)


FAULTS: dict[str, list[tuple[type, str, object]]] = {
    "computation does not wait for lanes": [
        (streams._StreamTicket, "wait", streams._StreamTicket._release),
        (lanes._ThreadTicket, "wait", lanes._ThreadTicket.done),
    ],
    "gathers do not wait for spreads": [(Unit, "spreads", ())],
    "a backward does not wait for the one before": [(Reducer, "begin", begin_at_once)],
    "lanes do not wait for computation": [(torch.cuda.Stream, "wait_stream", lambda _stream, _other: None)],
}
"""Waits that can be left out, each by replacing attributes."""


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant one of :data:`FAULTS`."""
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in FAULTS[fault]:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield
