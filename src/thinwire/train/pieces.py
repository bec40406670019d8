"""Parts of the built-in models that run by themselves: what a profile times."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.profile import Piece
from thinwire.shard.api import micro_batches, shard
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.llama import Llama, LlamaConfig

__all__ = ["pieces"]

_BLOCKS = 4
"""Blocks that are timed one after another."""


def pieces(
    shape: ModelSpec, mesh: Factor, *, seq: int, micro_batch: int, dtype: Literal["bfloat16", "float32"]
) -> list[Piece]:
    """A block, the head with the loss, the embedding, and a model of some blocks as a whole, as the runtime trains it.

    Args:
        shape: of the model.
        mesh: all ranks of the job, which has been joined when they are made.
        seq: tokens of a sequence.
        micro_batch: sequences.
        dtype: in which they compute.
    """
    tokens = seq * micro_batch
    matrices = shape.flops_per_token(seq) // 3  # of one token's forward
    head = 2 * shape.hidden * shape.vocab
    block = (matrices - head) // shape.layers
    compute: torch.dtype = getattr(torch, dtype)

    def make(part: Literal["block", "head", "embedding", "whole"], flops: int, repeats: int = 1) -> Piece:
        def on(device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
            if part == "whole":
                plan = Plan.preset("ddp", nodes=mesh.nodes, local=mesh.local, compute_dtype=dtype)
                return _make_whole(shape, plan, seq, micro_batch, repeats, device)
            return _make(part, shape, seq, micro_batch, repeats, compute, device)

        return Piece(part, shape, seq, micro_batch, dtype, flops, on, repeats)

    repeats = min(_BLOCKS, shape.layers)
    return [
        make("block", block * tokens, repeats),
        make("head", head * tokens),
        make("embedding", 0),
        make("whole", (block * repeats + head) * tokens, repeats),
    ]


def _make_whole(
    shape: ModelSpec, plan: Plan, seq: int, micro_batch: int, blocks: int, device: torch.device
) -> tuple[nn.Module, Callable[[], Tensor]]:
    """One micro-batch after another of a step that never ends, so that nothing is sent."""
    model = shard(_model(shape, seq, blocks).to(device), plan, sync_initial=False)
    ids = torch.randint(0, shape.vocab, (micro_batch, seq), device=device)
    endless = micro_batches(model, itertools.repeat(ids))

    def loss() -> Tensor:
        batch = next(endless)
        return cross_entropy(model(batch).logits, batch)

    return model, loss


def _make(
    part: str,
    shape: ModelSpec,
    seq: int,
    micro_batch: int,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[nn.Module, Callable[[], Tensor]]:
    model = _model(shape, seq, blocks).to(device, dtype)
    ids = torch.randint(0, shape.vocab, (micro_batch, seq), device=device)
    hidden = torch.randn(micro_batch, seq, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    if part == "embedding":
        embedding = model.embed_tokens if isinstance(model, Llama) else model.embed_in
        assert embedding is not None
        return embedding, lambda: embedding(ids)
    if part == "head":
        norm = model.norm if isinstance(model, Llama) else model.final_layer_norm
        assert norm is not None
        assert model.lm_head is not None
        head = nn.Sequential(norm, model.lm_head)
        return head, lambda: cross_entropy(head(hidden), ids)
    cos, sin = model.rotary(seq, dtype) if model.rotary is not None else (None, None)

    def through_blocks() -> Tensor:
        x = hidden
        for layer in model.layers:
            x = layer(x, cos, sin)
        return x

    return model.layers, through_blocks


def _model(shape: ModelSpec, seq: int, blocks: int) -> Llama | GPT:
    """Some blocks of it, with embedding and head."""
    if shape.kind == "llama":
        return Llama(
            LlamaConfig(
                vocab=shape.vocab, hidden=shape.hidden, layers=blocks, heads=shape.heads, kv_heads=shape.kv_heads,
                ffn=shape.ffn, seq=seq,
            )
        )  # fmt: skip
    return GPT(
        GPTConfig(vocab=shape.vocab, hidden=shape.hidden, layers=blocks, heads=shape.heads, ffn=shape.ffn, seq=seq)
    )
