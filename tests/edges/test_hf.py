"""Typical uses of Hugging Face models: adapters on frozen weights, their own checkpointing, generation."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from tests.parity.test_models_hf import batches
from tests.parity.test_models_hf import build as build_model
from tests.support.edge import ADAMW, TOLERANCE, close, gap, plan, whole
from torch import nn

import thinwire as tw
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


class Adapted(nn.Module):
    """A frozen layer plus a trainable product of two thin matrices."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(2, layer.in_features) / 8)
        self.b = nn.Parameter(torch.randn(layer.out_features, 2) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


def prepare(kind: str, *, adapted: bool, reentrant: bool | None) -> nn.Module:
    model = build_model(kind)
    if adapted:
        model.requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model.train()


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
    close(model)


def check_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check("llama", "zero3", adapted=True)
        check("llama", "hpz", adapted=True, reentrant=False)
        check("llama", "zero3", adapted=True, reentrant=True)
        check("gpt2", "zero3", reentrant=True)
        check("gpt2", "inter", reentrant=False)
        check("mixtral", "zero3", reentrant=False)
        check("mixtral", "amsp-13b", reentrant=True)


@pytest.mark.slow
def test_adapters_checkpointing_and_generation() -> None:
    run_ranks(4, check_all)
