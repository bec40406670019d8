"""Peak memory of other systems from the same model: DDP, FSDP2 and DeepSpeed's ZeRO.

Every system computes in bf16 and keeps fp32 masters with AdamW's two moments: DDP under autocast, FSDP2 with
``MixedPrecisionPolicy(param_dtype=bfloat16)``, DeepSpeed with ``bf16``. docs/results/memory.md states each formula with
its source, and what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from thinwire.cost.blocks import ModelPart
from thinwire.cost.memory.activations import GPU_LOSS_CHUNK, activation_bytes, logit_bytes
from thinwire.cost.memory.peak import OVERHEAD, Memory
from thinwire.cost.shapes import parts
from thinwire.errors import SpecError
from thinwire.spec import ModelSpec, Plan

PEER_SYSTEMS: Final = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
"""Systems that :func:`peer_memory` knows."""

_BF16: Final = 2
_FP32: Final = 4
_MOMENTS: Final = 8
"""Bytes per parameter of AdamW's two fp32 moments."""


@dataclass(frozen=True)
class ZeroSettings:
    """Sizes of DeepSpeed's ``zero_optimization``, in elements; the defaults are those of 0.19.8.

    Attributes:
        reduce_bucket: ``reduce_bucket_size``.
        live: ``stage3_max_live_parameters``.
    """

    reduce_bucket: int = 500_000_000
    live: int = 1_000_000_000


@dataclass(frozen=True)
class _PeerSizes:
    """Sizes that the formulae read, in elements or bytes.

    Attributes:
        numel: Parameters of the model.
        matrices: Parameters that autocast casts: those of matrix multiplications.
        block: Parameters of one block.
        root: Parameters outside of blocks: embedding, last norm and head.
        tensor: Elements of the largest parameter.
        ranks: Ranks that shard.
        activations: Bytes of activations kept from forward to backward, in bf16.
        logits: Bytes of logits, their gradients and the loss.
        bf16_logits: Those of logits and their gradients.
        accumulates: Whether a step has several micro-batches, so that gradients exist during the next forward.
        zero: DeepSpeed's settings.
        gloo: Whether gloo carries messages: it reduces a copy of what it is given.
    """

    numel: int
    matrices: int
    block: int
    root: int
    tensor: int
    ranks: int
    activations: int
    logits: int
    bf16_logits: int
    accumulates: bool
    zero: ZeroSettings
    gloo: bool


def peer_memory(
    system: str,
    model: ModelSpec,
    plan: Plan,
    *,
    overhead: int = OVERHEAD,
    zero: ZeroSettings | None = None,
    loss_chunk: int = GPU_LOSS_CHUNK,
    gloo: bool = False,
) -> Memory:
    """Peak memory of one rank of another system.

    Args:
        system: One of ``PEER_SYSTEMS``.
        model: Dimensions of the model; ``seq`` is the length of sequences.
        plan: Data-parallel ranks, micro-batches and recomputation; its factors and codecs are those of thinwire only.
        overhead: Bytes in use without a model.
        zero: Sizes of DeepSpeed's buffers.
        loss_chunk: Most logits of which the loss has fp32 copies at once.
        gloo: Whether gloo carries messages, as among processors: it reduces a copy of what it is given.

    Returns:
        Bytes by content at the moment of the step that needs the most.

    Raises:
        SpecError: The system is unknown.
    """
    formula = _FORMULAE.get(system)
    if formula is None:
        raise SpecError("system", f"there is no {system!r}; valid are {', '.join(PEER_SYSTEMS)}")
    cut = parts(model, "block", 1)
    sizes = _sizes(model, cut, plan, zero or ZeroSettings(), loss_chunk, gloo)
    moments = [Memory(**{**_NOTHING, **moment, "overhead": overhead}) for moment in formula(sizes)]
    return max(moments, key=lambda memory: memory.total)


def _sizes(
    model: ModelSpec, cut: Sequence[ModelPart], plan: Plan, zero: ZeroSettings, loss_chunk: int, gloo: bool
) -> _PeerSizes:
    numel = sum(part.numel for part in cut)
    blocks = [part.numel for part in cut if part.kind == "block"]
    embedding = model.vocab * model.hidden
    tokens = plan.micro_batch * model.seq
    inputs = tokens * model.hidden * _BF16
    block = activation_bytes(model, tokens, _BF16)
    kept = model.layers * inputs + block if plan.recompute else model.layers * block
    return _PeerSizes(
        numel=numel,
        matrices=numel - (0 if model.tied_embedding else embedding),
        block=max(blocks),
        root=numel - sum(blocks),
        tensor=max(tensor.numel for part in cut for tensor in part.tensors),
        ranks=plan.world,
        activations=kept + 3 * inputs,
        logits=logit_bytes(model, tokens, _BF16, loss_chunk),
        bf16_logits=logit_bytes(model, tokens, _BF16, 0),
        accumulates=plan.micro_batches > 1,
        zero=zero,
        gloo=gloo,
    )


_NOTHING: Final = dict.fromkeys(Memory.__dataclass_fields__, 0)

Moment = Mapping[str, int]
"""Bytes by attribute of :class:`Memory` at one moment of a step; attributes left out are 0."""


def _ddp(sizes: _PeerSizes) -> list[Moment]:
    """Everything whole, in fp32; gradients are views of the buckets. Those that several micro-batches add up under
    ``no_sync`` have memory of their own beside the buckets. Autocast keeps a bf16 copy of each matrix from forward to
    backward, and some activations stay in fp32."""
    states = {"params": _FP32 * sizes.numel, "grads": _FP32 * sizes.numel, "optimizer": _MOMENTS * sizes.numel}
    states["grads"] *= 1 + sizes.accumulates
    casts = {"gathered": _BF16 * sizes.matrices, "buffers": _FP32 * sizes.block}
    return [states | casts | {"activations": sizes.activations, "logits": sizes.logits}]


def _fsdp2(sizes: _PeerSizes) -> list[Moment]:
    """fp32 shards. The root's parameters stay gathered, and two blocks at a time; the root is reduced last."""
    shard = -(-sizes.numel // sizes.ranks)
    states = {"params": _FP32 * shard, "optimizer": _MOMENTS * shard}
    root, block = _BF16 * sizes.root, _BF16 * sizes.block
    turning = {
        # Two blocks, and the flat buffer from which one of them is copied.
        "gathered": root + 3 * block,
        # The gradients of the head; those of the last block, and their copy for the reduce-scatter.
        "buffers": _BF16 * sizes.tensor + 2 * block,
        "grads": _FP32 * shard * sizes.accumulates,
        "activations": sizes.activations,
        "logits": sizes.logits,
    }
    # The root's shards get their gradients at the end, unless a micro-batch before has left some.
    reduced = shard if sizes.accumulates else (sizes.numel - sizes.root) // sizes.ranks
    blocks = {"gathered": root + 2 * block, "buffers": root + 2 * block, "grads": _FP32 * reduced}
    last = {"grads": _FP32 * shard, "buffers": (2 + sizes.gloo) * root}
    return [states | turning, states | blocks, states | last]


def _zero1(sizes: _PeerSizes) -> list[Moment]:
    """As ZeRO-2, but gradients are whole until the last micro-batch has reduced them; then a rank copies its share."""
    turning, update = _zero2(sizes)
    whole, shard = _BF16 * sizes.numel, update["grads"]
    if sizes.accumulates:
        turning = {**turning, "grads": whole}
    last = {**update, "grads": whole, "buffers": turning["buffers"] // 2 + shard + _BF16 * sizes.tensor}
    return [turning, last, update]


def _zero2(sizes: _PeerSizes) -> list[Moment]:
    """bf16 parameters whole, fp32 masters and moments sharded. The update flattens the rank's bf16 gradients and casts
    them to fp32."""
    shard = -(-sizes.numel // sizes.ranks)
    bucket = _BF16 * min(sizes.zero.reduce_bucket, sizes.numel)
    states = {"params": _BF16 * sizes.numel, "optimizer": (_FP32 + _MOMENTS) * shard, "grads": _BF16 * shard}
    # A bucket, and its copy that is reduced.
    turning = {"buffers": 2 * bucket, "activations": sizes.activations, "logits": sizes.logits}
    update = {"buffers": bucket + (_BF16 + _FP32) * shard}
    return [states | turning, states | update]


def _zero3(sizes: _PeerSizes) -> list[Moment]:
    """Everything sharded; the update casts the gradients of a sub-group, usually all, to fp32.

    Prefetching stops at the live parameters that are allowed; what a module needs itself comes on top. The loss has
    freed its fp32 copies before the head's gradient exists."""
    shard = -(-sizes.numel // sizes.ranks)
    bucket = _BF16 * min(sizes.zero.reduce_bucket, sizes.numel)
    states = {"params": _BF16 * shard, "optimizer": (_FP32 + _MOMENTS) * shard, "grads": _BF16 * shard}
    gathered = _BF16 * min(sizes.numel, sizes.zero.live + sizes.tensor)
    turning = {"gathered": gathered, "activations": sizes.activations}
    loss = {"buffers": bucket, "logits": sizes.logits}
    # The largest gradient, which is reduced where it is.
    head = {"buffers": bucket + (1 + sizes.gloo) * _BF16 * sizes.tensor, "logits": sizes.bf16_logits}
    update = {"buffers": bucket + (_BF16 + _FP32) * shard}
    return [states | turning | loss, states | turning | head, states | update]


_FORMULAE: Final[Mapping[str, Callable[[_PeerSizes], list[Moment]]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
}
