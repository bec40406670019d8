"""Snippets for PyTorch's FSDP2 and HSDP that ``thinwire plan --emit`` writes train as one process does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from thinwire.convert.emit import Emitted, emitted_text
from thinwire.spec import Factor, Plan
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks

ALL, PAIR, ONE = Factor(local=2, nodes=2), Factor(local=2), Factor()


class Blocks(nn.Module):
    """An embedding, three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def make() -> Blocks:
    torch.default_generator.manual_seed(3)
    return Blocks()


def data(step: int, rank: int, number: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return torch.randint(32, (2, 9), generator=chance)


def check(framework: str, group: Factor, **keys: Any) -> None:
    cut = {"params": group, "grads": group, "optimizer": group, **keys}
    plan = Plan(mesh=ALL, compute_dtype="float32", micro_batch=2, micro_batches=2, **cut)
    space: dict[str, Any] = {}
    exec(compile(emitted_text(Emitted(framework, plan, 8, 1.0, "a test")), framework, "exec"), space)
    model = space["shard"](make(), device="cpu")
    assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters())
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    plain = make()
    plain_optim = torch.optim.AdamW(plain.parameters(), lr=0.01)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        loss = space["step"](model, optim, [data(step, rank, number) for number in range(2)], loss_of)
        own = torch.zeros(())
        for other in range(ranks):
            for number in range(2):
                part = loss_of(plain, data(step, other, number)) / 2
                (part / ranks).backward()
                own += part.detach() * (other == rank)
        torch.testing.assert_close(loss, own, rtol=1e-5, atol=1e-6)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        plain_optim.step()
        plain_optim.zero_grad()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "group", "keys"),
    [
        pytest.param("fsdp2", ALL, {}, marks=pytest.mark.slow),
        pytest.param("fsdp2", ALL, {"params": ONE}, marks=pytest.mark.slow),
        ("fsdp2", ALL, {"secondary": PAIR, "recompute": True}),
        ("hsdp", PAIR, {}),
    ],
)
def test_emitted_snippets_train_like_one_process(framework: str, group: Factor, keys: dict[str, Any]) -> None:
    run_ranks(4, partial(check, framework, group, **keys))
