"""Ranks with different numbers of batches make the same calls, whatever the loop does with its batches."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks


def sharded() -> nn.Module:
    return tw.shard(nn.Linear(8, 8), tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))


def bare(value: dict[str, torch.Tensor]) -> Any:
    return value


def of_another_library(value: dict[str, torch.Tensor]) -> Any:
    return UserDict(value)


def nested(value: dict[str, torch.Tensor]) -> Any:
    return ["name", {"inner": UserDict(value)}]


@pytest.mark.parametrize("packed", [bare, of_another_library, nested])
@on_ranks(2)
def test_a_loop_may_take_keys_out_of_its_batch(packed: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    model, rank = sharded(), dist.get_rank()
    batches = [packed({"x": torch.ones(2, 8), "labels": torch.zeros(2, 8)}) for _ in range(3 if rank == 0 else 1)]
    steps = 0
    for batch in tw.join(model, batches):
        assert steps or batch is batches[0]
        inner = batch.pop()["inner"] if isinstance(batch, list) else batch
        labels = inner.pop("labels")
        (model(inner["x"]) - labels).square().mean().backward()
        steps += 1
    assert steps == 3


@on_ranks(2)
def test_a_rank_without_a_batch_is_named_on_every_rank() -> None:
    model = sharded()
    mine = [torch.ones(2, 8)] * (0 if dist.get_rank() == 1 else 2)
    with pytest.raises(UsageError, match=r"^no batch for thinwire\.join on rank 1: give every rank at least one$"):
        list(tw.join(model, mine))
    assert not list(tw.join(model, []))


@on_ranks(2)
def test_a_batch_that_is_an_iterator_is_refused_on_every_rank() -> None:
    mine = [iter([torch.ones(2, 8)]) if dist.get_rank() == 1 else [torch.ones(2, 8)]]
    with pytest.raises(UsageError, match=r"^a batch that is an iterator for thinwire\.join on rank 1: .* give a list"):
        list(tw.join(sharded(), mine))
