"""Hugging Face models, built from a config, train sharded as they do in one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from tests.support.training.hf import batches, build
from torch import nn

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.sharding.api import runtime
from thinwire.spec import Plan

pytestmark = pytest.mark.ranks


@functools.cache
def train_alone(kind: str, world: int) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """Three steps on the global batch, with torch only; losses, gradient norms and parameters."""
    model = build(kind)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-1)
    losses, norms = [], []
    for step in range(3):
        total = 0.0
        for part in batches(step, world):
            loss = model(input_ids=part, labels=part).loss / world
            loss.backward()
            total += float(loss)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optim.step()
        optim.zero_grad()
        losses.append(total)
    return losses, norms, [parameter.detach() for parameter in model.parameters()]


def train(kind: str, plan: Plan, checkpointing: str = "") -> tuple[list[float], float, int]:
    """Three steps sharded, compared with three steps alone; losses, parameter error, number of units."""
    me = control()
    model = build(kind)
    expected_losses, expected_norms, expected_parameters = train_alone(kind, me.size)
    if checkpointing:
        kwargs = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        model.train()
    tw.shard(model, plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-1)
    losses = []
    for step in range(3):
        mine = batches(step, me.size)[me.rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        norm = tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        mean = me.all_reduce_mean([float(loss)])[0]
        if plan.compute_dtype == "float32":
            assert abs(mean - expected_losses[step]) < 1e-5, (step, mean, expected_losses[step])
            torch.testing.assert_close(norm, expected_norms[step], rtol=1e-5, atol=1e-6)
        losses.append(mean)
    with tw.full_parameters(model):
        error = max(
            float((a.float() - b).norm() / b.norm().clamp_min(1e-3))
            for a, b in zip(model.parameters(), expected_parameters, strict=True)
        )
    return losses, error, len(runtime(model).units)


def plans(**changes: Any) -> list[Plan]:
    fields = {"compute_dtype": "float32"} | changes
    return [Plan.preset(name, nodes=2, local=2, **fields) for name in ("zero3", "zero1-node", "hpz", "amsp-13b")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral", "llama-tied", "gpt2"])
@on_ranks(4)
def test_trains_as_in_one_process(kind: str) -> None:
    for plan in plans():
        _, error, num_units = train(kind, plan)
        assert error <= 2e-6
        assert num_units >= 4, "blocks were not found"


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant"])
@on_ranks(4)
def test_gradient_checkpointing_of_the_model_itself(checkpointing: str) -> None:
    for plan in plans():
        assert train("llama", plan, checkpointing)[1] <= 2e-6


@pytest.mark.slow
@on_ranks(4)
def test_bf16_follows_fp32() -> None:
    for exact, narrow in zip(plans(), plans(compute_dtype="bfloat16"), strict=True):
        assert train("mixtral", narrow)[0] == pytest.approx(train("mixtral", exact)[0], rel=1e-2)
