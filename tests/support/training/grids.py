"""Models cut by tensor and pipeline parallelism, on grids of ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import thinwire as tw
from thinwire.collectives.group import control
from thinwire.parallel import ParallelModel, ParallelOptimizer
from thinwire.train.data.samples import Batch
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.llama import Llama, LlamaConfig

VOCABULARY, LENGTH, STEPS = 64, 16, 3

LR, EPS, CLIP = 1e-2, 1e-1, 0.25

PARAMETER_TOLERANCE = 1e-6
"""Relative to a parameter's largest value, after three steps: the contract of unsharded and sharded training."""

Kind = Literal["llama", "tied", "gpt", "learned"]


def build(kind: Kind) -> nn.Module:
    shape: dict[str, Any] = {"vocab": VOCABULARY, "hidden": 32, "layers": 4, "heads": 4, "ffn": 48, "seq": LENGTH}
    if kind in ("llama", "tied"):
        return Llama(LlamaConfig(kv_heads=2, tied=kind == "tied", **shape))
    return GPT(GPTConfig(positions="learned" if kind == "learned" else "rotary", **shape))


def plan_for(dp: int, tp: int, pp: int, **fields: Any) -> tw.Plan:
    changes = {"compute_dtype": "float32", "micro_batches": 4 if pp > 1 else 2, **fields}
    return tw.Plan.preset("zero1", nodes=1, local=dp, tp=tp, pp=pp, **changes)


def batches(plan: tw.Plan, rank: int | None, sequences: int = 2) -> list[list[Batch]]:
    """Micro-batches of every step, of one of the ranks with data of their own or of all; the same samples on any grid
    of as many micro-batches."""
    generator = torch.Generator().manual_seed(3)
    shape = (STEPS, plan.micro_batches * plan.samplers, sequences, LENGTH + 1)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    own = tokens if rank is None else tokens[:, rank :: plan.samplers]
    return [[Batch(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in step] for step in own]


def alone(model: nn.Module, plan: tw.Plan) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """One process on the samples of all ranks: losses, norms, parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    losses, norms = [], []
    for step in batches(plan, None):
        total = 0.0
        for batch in step:
            loss = model(batch.input_ids, batch.labels).loss / len(step)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def start(kind: Kind, plan: tw.Plan, **options: Any) -> tuple[ParallelModel, ParallelOptimizer]:
    model = tw.parallelize(build(kind), plan, loss=cross_entropy, **options)
    return model, model.optimizer(torch.optim.AdamW, lr=LR, eps=EPS)


def train(
    model: ParallelModel, optimizer: ParallelOptimizer, steps: list[list[Batch]]
) -> tuple[list[float], list[float]]:
    """Losses, as all ranks learn them, and norms."""
    losses, norms = [], []
    for step in steps:
        loss = float(model.step(step))
        share = model.plan.pp if model.knows_loss else 0
        losses.append(control().all_reduce_mean([loss * share])[0])
        norms.append(model.clip_grad_norm_(CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def whole_parameters(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Those of this rank's stages, put together from all slices."""
    by_name = {}
    for chunk in model.chunks:
        with tw.full_parameters(chunk):
            for name, parameter in chunk.named_parameters():
                value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                by_name[name] = value.detach().clone()
    return by_name


def gap(parameters: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    return max(
        float((value - reference[name]).abs().max() / reference[name].abs().max()) for name, value in parameters.items()
    )
