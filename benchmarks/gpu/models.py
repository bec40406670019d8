"""Part: blocks under torch.compile, recomputation, and a Hugging Face model, sharded and whole."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch
from benchmarks.gpu.case import GIB, Case, Report
from benchmarks.gpu.outcome import Check, Outcome
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.step import joined, synchronize
from benchmarks.gpu.systems import tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from thinwire.report.sheet import Sheet
from thinwire.spec import Plan
from thinwire.train.models.llama import Llama, LlamaConfig

__all__ = ["cases"]

TOLERANCE: Final = 0.02
"""Largest relative difference of losses in bf16."""

_STEPS: Final = 5
_MIDDLE: Final = {"vocab": 32000, "hidden": 1024, "layers": 8, "heads": 8, "kv_heads": 8, "ffn": 2816, "seq": 1024}


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Each way to train that users combine with sharding."""
    del stack
    return [
        Case("compiled blocks", partial(_compiled, scale), 60, 8 * GIB),
        Case("recomputed blocks", partial(_recomputed, scale), 15, 8 * GIB),
        Case("Hugging Face Llama", partial(_hugging_face, scale), 40, 30 * GIB),
    ]


def _middle(scale: Scale, *, recompute: bool = False) -> Llama:
    fields: dict[str, Any] = dict(_MIDDLE if scale.device == "cuda" else scale.model)
    model = Llama(LlamaConfig(**fields), seed=0)
    for block in model.layers if recompute else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _compiled(scale: Scale, report: Report) -> Outcome:
    """Blocks compiled before they are sharded, as in the guide of FSDP2."""

    def compiled() -> nn.Module:
        model = _middle(scale)
        for layer in model.layers:
            layer.compile()
        return model

    return _beside("blocks under torch.compile", lambda: _middle(scale), compiled, scale, report)


def _recomputed(scale: Scale, report: Report) -> Outcome:
    return _beside("blocks recomputed", lambda: _middle(scale), lambda: _middle(scale, recompute=True), scale, report)


def _hugging_face(scale: Scale, report: Report) -> Outcome:
    """A LlamaForCausalLM of 1.0 billion parameters, as users have it, whole and sharded."""
    from transformers import LlamaConfig as HuggingFaceConfig
    from transformers import LlamaForCausalLM

    shape = dict(scale.model)
    config = HuggingFaceConfig(
        vocab_size=shape["vocab"], hidden_size=shape["hidden"], intermediate_size=shape["ffn"],
        num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=shape["seq"], use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip

    def model() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(scale.device):
            made: nn.Module = LlamaForCausalLM(config)
        return made

    return _beside("Hugging Face's LlamaForCausalLM", model, model, scale, report)


def _beside(
    what: str, plain: Callable[[], nn.Module], ours: Callable[[], nn.Module], scale: Scale, report: Report
) -> Outcome:
    """Losses and times of ``ours`` under zero3 beside ``plain`` in autocast, one after the other."""
    ids = tokens(_MIDDLE if scale.device == "cuda" else dict(scale.model), 2, scale.device)
    rows, losses = [], {}
    with joined(scale.device):
        report(f"{what}: PyTorch")
        losses["PyTorch"], seconds = _train(plain().to(scale.device), ids, sharded=False)
        rows.append([what, "PyTorch", f"{losses['PyTorch'][-1]:.4f}", f"{1e3 * seconds:.2f}"])
        report(f"{what}: thinwire")
        losses["thinwire"], seconds = _train(ours().to(scale.device), ids, sharded=True)
        rows.append([what, "thinwire zero3", f"{losses['thinwire'][-1]:.4f}", f"{1e3 * seconds:.2f}"])
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses["thinwire"], losses["PyTorch"], strict=True))
    check = Check(f"{what}: losses", f"{worst:.1e}", f"at most {TOLERANCE:.0e}", worst <= TOLERANCE)
    columns = ("model", "system", "last loss", "ms per step")
    return Outcome((Sheet(f"{_STEPS} steps in bf16", columns, 2, rows),), (check,), data={"losses": losses})


def _train(model: nn.Module, ids: Tensor, *, sharded: bool) -> tuple[list[float], float]:
    """Losses, and median seconds of a step after the first."""
    device = ids.device.type
    if sharded:
        tw.shard(model, Plan.preset("zero3", nodes=1, local=1))
        optim: torch.optim.Optimizer = tw.optimizer(model, torch.optim.AdamW, lr=1e-4)
    else:
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4)
    # A Hugging Face model moves the labels by itself.
    moves = not isinstance(model, Llama)
    inputs, labels = (ids, ids) if moves else (ids[:, :-1], ids[:, 1:])
    losses, seconds = [], []
    for _ in range(_STEPS):
        synchronize(device)
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=not sharded):
            loss = model(input_ids=inputs, labels=labels).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(float(loss))
        seconds.append(time.perf_counter() - started)
    return losses, statistics.median(seconds[1:])
