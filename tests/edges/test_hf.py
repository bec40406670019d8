"""Typical uses of Hugging Face models: adapters on frozen weights, their own checkpointing, generation."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training.edge import ADAMW, TOLERANCE, gap, plan, whole
from tests.support.training.hf import batches, prepare
from torch import nn

import thinwire as tw

pytestmark = pytest.mark.ranks


def generate(model: nn.Module) -> torch.Tensor:
    model.eval()
    try:
        prompt = torch.tensor([[5, 9, 2]])
        return model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    finally:
        model.train()


def check(kind: str, name: str, *, adapted: bool = False, reentrant: bool | None = None) -> None:
    label = f"{kind} under {name}, adapted = {adapted}, reentrant = {reentrant}"
    rank = dist.get_rank()
    reference = prepare(kind, adapted=adapted, reentrant=reentrant)
    model = tw.shard(prepare(kind, adapted=adapted, reentrant=reentrant), plan(name))
    optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
    plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], **ADAMW)
    for step in range(2):
        parts = batches(step, 4)
        model(input_ids=parts[rank], labels=parts[rank]).loss.backward()
        optim.step()
        optim.zero_grad()
        for part in parts:
            (reference(input_ids=part, labels=part).loss / 4).backward()
        plain.step()
        plain.zero_grad()
        assert torch.equal(generate(model), generate(reference)), label
    with tw.full_parameters(model):
        assert torch.equal(generate(model), generate(reference)), label
    error = gap(whole(model), list(reference.parameters()))
    assert error <= TOLERANCE, f"{label}: parameters differ by {error:.1e}"


@pytest.mark.slow
@on_ranks(4)
def test_adapters_checkpointing_and_generation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check("llama", "zero3", adapted=True)
        check("llama", "hpz", adapted=True, reentrant=False)
        check("llama", "zero3", adapted=True, reentrant=True)
        check("gpt2", "zero3", reentrant=True)
        check("gpt2", "inter", reentrant=False)
        check("mixtral", "zero3", reentrant=False)
        check("mixtral", "amsp-13b", reentrant=True)
