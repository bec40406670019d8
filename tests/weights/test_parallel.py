"""Published weights arrive whole, whatever the grid of ranks that cuts the model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.grids import Kind, batches, build, plan_for, train, whole_parameters
from tests.support.weights import differences
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.testing import RankPool, run_ranks
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.ranks


def whole(model: tw.ParallelModel) -> dict[str, torch.Tensor]:
    """The parameters of all stages, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, whole_parameters(model))
    return {name: value for of_rank in everyone for name, value in of_rank.items()}


def followed(store: str, model: nn.Module, plan: tw.Plan, names: set[str]) -> list[str]:
    """What differs at a subscriber of any version, and at one that comes late."""
    parallel = tw.parallelize(model, plan, loss=cross_entropy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    publisher, subscriber = tw.publisher(parallel, store, anchor_every=5), tw.Subscriber(store)
    problems = []
    for number, step in enumerate(2 * batches(plan, parallel.grid.data)):
        train(parallel, optimizer, [step])
        publisher.step()
        assert publisher._thread is not None
        publisher._thread.join()
        dist.barrier()
        assert subscriber.update() == number + 1
        expected = whole(parallel)
        problems += sorted(expected.keys() ^ names)
        for weights in (subscriber.state_dict(), _late(store)):
            problems += differences(weights, expected)
    return problems


def _late(store: str) -> dict[str, torch.Tensor]:
    late = tw.Subscriber(store)
    late.update()
    return late.state_dict()


def rank_of_a_grid(store: str, kind: Kind, plan: tw.Plan) -> list[str]:
    model = build(kind)
    return followed(store, model, plan, {name for name, _ in model.named_parameters()})


@pytest.mark.parametrize(
    ("kind", "grid", "fields"),
    [
        ("learned", (2, 2, 1), {"params": {"local": 2}, "grads": {"local": 2}}),
        pytest.param("llama", (1, 2, 2), {"compute_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("tied", (2, 2, 1), {"compute_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param("gpt", (2, 1, 2), {}, marks=pytest.mark.slow),
        pytest.param("llama", (2, 1, 2), {"schedule": "interleaved"}, marks=pytest.mark.slow),
    ],
    ids=["zero3-tp2", "tp2pp2-bf16", "tied-tp2-bf16", "dp2pp2", "interleaved"],
)
def test_a_model_that_is_cut_arrives_whole(
    tmp_path: Path, kind: Kind, grid: tuple[int, int, int], fields: dict[str, Any]
) -> None:
    plan = plan_for(*grid, **fields)
    assert run_ranks(plan.ranks, rank_of_a_grid, str(tmp_path), kind, plan) == [[]] * plan.ranks


@on_ranks(2)
def test_prefixes_are_those_of_any_stage(tmp_path: Path) -> None:
    parallel = tw.parallelize(build("gpt"), plan_for(1, 1, 2), loss=cross_entropy)
    with pytest.raises(UsageError, match=r"prefix = 'model\.': no name of the model begins with it"):
        tw.publisher(parallel, str(tmp_path), prefix="model.")
    tw.publisher(parallel, str(tmp_path), prefix="lm_head.").close()


def rank_of_experts(store: str, plan: tw.Plan) -> list[str]:
    config = LlamaConfig(
        vocab=64, hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, seq=16, experts=4, active_experts=2
    )
    model = Llama(config)
    return followed(store, model, plan, {name for name, _ in model.named_parameters()})


def test_experts_that_ranks_share_arrive_whole(tmp_path: Path) -> None:
    plan = tw.Plan.preset("zero3", nodes=2, local=2, ep=2, compute_dtype="bfloat16", micro_batches=2)
    # New processes: DTensor remembers the groups of an earlier mesh that equals this one.
    with contextlib.closing(RankPool(4)) as ranks:
        assert ranks.run(rank_of_experts, str(tmp_path), plan) == [[]] * 4
