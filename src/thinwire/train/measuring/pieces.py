"""Parts of the built-in models that a profile times one by one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.cost import largest_memory
from thinwire.cost.memory.stages import stage_model
from thinwire.errors import UsageError
from thinwire.profile import ModelPiece, Weightless
from thinwire.sharding.api import micro_batches, optimizer, shard
from thinwire.sharding.runtime.runtime import Runtime, runtime_of
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.plan import Dtype
from thinwire.train.models.build import own_model
from thinwire.train.models.common import cross_entropy
from thinwire.train.models.gpt import GPT
from thinwire.train.models.llama import Llama
from thinwire.units import format_bytes

_BLOCKS = 4
"""Number of blocks that are timed one after another, if the memory suffices."""

_WEIGHTLESS = ModelSpec(name="a model of no weight", layers=4, hidden=32, heads=2, ffn=64, vocab=64, seq=8)

_ROOM = 0.8
"""Share of a rank's memory that they may take."""


def pieces(
    shape: ModelSpec, mesh: Factor, *, seq: int, micro_batch: int, dtype: Dtype, memory: int
) -> list[ModelPiece]:
    """The pieces: a block, the head with the loss, the embedding, and a model of some blocks, sharded and plain.

    All ranks of the job, which form the mesh, must have been joined when the pieces are made; a rank may use ``memory``
    bytes.

    Raises:
        UsageError: The memory does not suffice for one block with embedding and head.
    """
    plan = Plan.preset("ddp", nodes=mesh.nodes, local=mesh.local, compute_dtype=dtype, micro_batch=micro_batch)
    repeats = _fitting_blocks(shape, plan, seq, memory)
    tokens = seq * micro_batch
    matrices = shape.flops_per_token(seq) // 3  # of one token's forward
    head = 2 * shape.hidden * shape.vocab
    block = (matrices - head) // shape.layers

    def make(part: Literal["block", "head", "embedding", "whole", "plain"], flops: int, repeats: int = 1) -> ModelPiece:
        on = functools.partial(_make, part, shape, plan, seq, repeats)
        return ModelPiece(part, shape, seq, micro_batch, dtype, flops, on, repeats)

    return [
        make("block", block * tokens, repeats),
        make("head", head * tokens),
        make("embedding", 0),
        make("whole", (block * repeats + head) * tokens, repeats),
        make("plain", (block * repeats + head) * tokens, repeats),
    ]


def weightless(plan: Plan, device: torch.device) -> Weightless:
    """A model of no weight under a plan: what its steps and micro-batches take is what the runtime takes."""
    model = shard(_model(_WEIGHTLESS, _WEIGHTLESS.seq, _WEIGHTLESS.layers).to(device), plan, sync_initial=False)
    runtime = runtime_of(model)
    _compare_no_values(runtime)
    ids = torch.zeros((1, _WEIGHTLESS.seq), dtype=torch.int64, device=device)
    optim = optimizer(model, torch.optim.AdamW, fused=True)
    endless = micro_batches(model, itertools.repeat(ids))

    def run(count: int) -> None:
        for batch in itertools.islice(endless, count):
            cross_entropy(model(batch).logits, batch).backward()
        runtime.drain()

    def steps(count: int) -> None:
        for _ in range(count):
            cross_entropy(model(ids).logits, ids).backward()
            optim.step()
            optim.zero_grad()

    programs = runtime.programs
    middle = [op for op in programs.program(3).operations if op.start.micro_batch == 1]
    return Weightless(run, steps, middle)


def _fitting_blocks(shape: ModelSpec, plan: Plan, seq: int, memory: int) -> int:
    """How many blocks, with embedding and head, a rank can train."""
    for blocks in range(min(_BLOCKS, shape.layers), 0, -1):
        needed = largest_memory(stage_model(shape, blocks), plan, seq=seq, overhead=0).total
        if needed <= _ROOM * memory:
            return blocks
    raise UsageError(
        f"a block of {shape.name or 'the model'} with embedding and head needs {format_bytes(needed)} to be timed, and "
        f"a rank has {format_bytes(memory)}, of which {_ROOM:.0%} may be used: take a smaller --seq or --micro-batch, "
        "fewer ranks on a host, or leave out --model (a small Llama is timed, from whose FLOP/s the time of others "
        "follows)"
    )


def _compare_no_values(runtime: Runtime) -> None:
    """Do not compare parameters before and after forwards: the first step does, and few others."""
    audit = runtime.audit
    audit.compares_values = False


def _make(
    part: str, shape: ModelSpec, plan: Plan, seq: int, blocks: int, device: torch.device
) -> tuple[Sequence[nn.Parameter], Callable[[], Tensor]]:
    """Parameters and the call that is timed, with the plan's micro-batch and dtype."""
    dtype: torch.dtype = getattr(torch, plan.compute_dtype)
    ids = torch.randint(0, shape.vocab, (plan.micro_batch, seq), device=device)
    if part == "whole":  # micro-batches of a step that never ends, so that nothing is sent
        whole = shard(_model(shape, seq, blocks).to(device), plan, sync_initial=False)
        _compare_no_values(runtime_of(whole))
        endless = micro_batches(whole, itertools.repeat(ids))

        def loss() -> Tensor:
            batch = next(endless)
            return cross_entropy(whole(batch).logits, batch)

        return (), loss
    if part == "plain":
        plain = _model(shape, seq, blocks).to(device, dtype)
        return list(plain.parameters()), lambda: cross_entropy(plain(ids).logits, ids)
    # Parts that are not timed are left out, because they take gigabytes in a large model.
    without = shape.with_(vocab=8) if part == "block" else shape
    model = _model(without, seq, blocks if part == "block" else 0).to(device, dtype)
    hidden = torch.randn(plan.micro_batch, seq, shape.hidden, device=device, dtype=dtype, requires_grad=True)
    if part == "embedding":
        embedding = model.embed_tokens if isinstance(model, Llama) else model.embed_in
        assert embedding is not None
        return list(embedding.parameters()), lambda: embedding(ids)
    if part == "head":
        norm = model.norm if isinstance(model, Llama) else model.final_layer_norm
        assert norm is not None
        assert model.lm_head is not None
        head = nn.Sequential(norm, model.lm_head)
        return list(head.parameters()), lambda: cross_entropy(head(hidden), ids)
    cos, sin = model.rotary(seq, dtype) if model.rotary is not None else (None, None)

    def through_blocks() -> Tensor:
        x = hidden
        for layer in model.layers:
            x = layer(x, cos, sin)
        return x

    return list(model.layers.parameters()), through_blocks


def _model(shape: ModelSpec, seq: int, blocks: int) -> Llama | GPT:
    """Some blocks of it, with embedding and head.

    Raises:
        UsageError: The built-in models have no such blocks.
    """
    own_heads = shape.head_dim * shape.heads == shape.hidden
    if shape.latent or shape.biases or shape.shared_ffn or shape.dense_layers or not own_heads:
        raise UsageError(
            f"{shape.name or 'the model'} cannot be timed: thinwire's own blocks have heads of hidden / heads, no "
            "biases, and experts in all blocks or none; leave out --model (a small Llama is timed, from whose FLOP/s "
            "the time of others follows)"
        )
    return own_model(shape, layers=blocks, seq=seq, tied=False)
