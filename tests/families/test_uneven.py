"""Ranks that run different parts of a model: layers dropped at random, batches without images, experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.families import catalog
from tests.support.families.training import ADAMW, TOLERANCE, differences, plan, quiet
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


class Skipping(nn.Module):
    """Runs the layers that a batch names; each rank names different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, layers: list[int]) -> torch.Tensor:
        for number in layers:
            x = x + torch.tanh(self.layers[number](x))
        return self.head(x).square().mean()


def layers_of(step: int, rank: int) -> list[int]:
    """Different on each rank, in another order at times; layer 4 first trains in step 2, on rank 1 alone."""
    table = [([0, 1], [1, 0, 3]), ([2], [0, 1, 2]), ([0, 1, 2, 3], [4, 3]), ([], [1]), ([0, 1, 2], [0, 1, 2])]
    return table[step % len(table)][rank]


def check_skipping(plan_name: str, micro_batches: int, fields: dict[str, Any]) -> None:
    torch.default_generator.manual_seed(0)
    reference = Skipping()
    torch.default_generator.manual_seed(0)
    model = tw.shard(Skipping(), plan(plan_name, **fields))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    plain = torch.optim.AdamW(reference.parameters(), **ADAMW)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        data = torch.randn(micro_batches, world, 2, 6, generator=torch.Generator().manual_seed(step))
        for k, x in enumerate(tw.micro_batches(model, data[:, rank])):
            model(x, layers_of(step + k, rank)).backward()
        for k, part in enumerate(data):
            for other, x in enumerate(part):
                (reference(x, layers_of(step + k, other)) / world).backward()
        got = float(tw.clip_grad_norm_(model, 1.0))
        want = float(nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        assert abs(got - want) <= TOLERANCE * want, (step, got, want)
        optim.step()
        optim.zero_grad()
        plain.step()
        plain.zero_grad()
    beyond = differences(model, reference)
    assert not beyond, beyond


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("plan_name", ["ddp", "zero1", "zero2"])
def test_ranks_run_different_units_where_parameters_are_whole(plan_name: str, micro_batches: int) -> None:
    run_ranks(2, check_skipping, plan_name, micro_batches, {}, timeout=30)
    run_ranks(2, check_skipping, plan_name, micro_batches, {"granularity": "module", "bucket_bytes": 64}, timeout=30)


def drop_layers(step: int, rank: int) -> dict[str, Any]:
    return catalog.batch("wav2vec2", step, rank)


def text_on_one_rank(step: int, rank: int) -> dict[str, Any]:
    batch = catalog.batch("llava", step, rank)
    if rank == step % 2:
        del batch["pixel_values"]
        batch["input_ids"] = batch["labels"] = batch["input_ids"].clamp(max=catalog.IMAGE_TOKEN - 1)
    return batch


def experts(step: int, rank: int) -> dict[str, Any]:
    return catalog.batch("switch_transformers", step, rank)


@pytest.mark.slow
@pytest.mark.parametrize("plan_name", ["ddp", "zero1"])
@pytest.mark.parametrize(
    ("name", "batch", "granularity"),
    [
        ("wav2vec2", drop_layers, "block"),
        ("llava", text_on_one_rank, "block"),
        ("switch_transformers", experts, "module"),
    ],
)
@on_ranks(2, timeout=60)
def test_models_whose_ranks_differ(name: str, batch: Any, granularity: str, plan_name: str) -> None:
    with quiet():
        reference = catalog.build(name)
        model = catalog.build(name)
        if name == "wav2vec2":
            for trained in (reference, model):
                trained.config.layerdrop = 0.5
        tw.shard(model, plan(plan_name, granularity=granularity))
        optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
        plain = torch.optim.AdamW(reference.parameters(), **ADAMW)
        world = dist.get_world_size()
        for step in range(4):
            torch.default_generator.manual_seed(17 * step + dist.get_rank())
            model(**batch(step, dist.get_rank())).loss.backward()
            optim.step()
            optim.zero_grad()
            for rank in range(world):
                torch.default_generator.manual_seed(17 * step + rank)
                (reference(**batch(step, rank)).loss / world).backward()
            plain.step()
            plain.zero_grad()
        beyond = differences(model, reference)
        assert not beyond, beyond
