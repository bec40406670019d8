"""Peak memory of one rank during a step, in bytes, by content.

Model states are counted as the runtime keeps them: ``P`` in the compute dtype, ``G`` in the accumulate dtype, fp32
masters and AdamW's two moments. If whole tensors are assigned to ranks, the largest share counts. Activations follow
Korthikanti et al. 2022 ("Reducing Activation Recomputation", section 4) for the built-in models, without dropout and
with fused attention, which removes the term that is quadratic in the sequence length. The ranks of a pipeline differ:
the first keeps the most micro-batches in flight, and the last holds the logits. The rank that needs the most memory
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from thinwire.cost.shapes import ModelPart, parts
from thinwire.cost.transient import Transient
from thinwire.cost.units import units as units_of
from thinwire.program import (
    Axis,
    Even,
    UnitInfo,
    axis_shape,
    together,
)
from thinwire.program.wire import ITEMSIZE, reduction_codecs
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.block_shapes import expert_layers
from thinwire.spec.pipeline import STAGES_OF_A_RANK

__all__ = [
    "GPU_LOSS_CHUNK",
    "HOST_LOSS_CHUNK",
    "OVERHEAD",
    "Memory",
    "PipelineShare",
    "States",
    "activation_bytes",
    "demanding_stages",
    "held_units",
    "kept_activations",
    "largest_memory",
    "logit_bytes",
    "memory",
    "stage_model",
    "stages",
    "working_memory",
]

OVERHEAD = 1_500 << 20
"""Bytes of GPU memory that hold no tensors: contexts, communicators, libraries, fragmentation. A profile measures
them."""

GPU_LOSS_CHUNK = 1 << 24
"""Most logits of which the built-in models' loss has fp32 copies at once on a GPU, where launches cost more than
caches: 64 MiB a copy."""

HOST_LOSS_CHUNK = 1 << 22
"""The same on a processor: 16 MiB a copy."""


@dataclass(frozen=True, slots=True)
class PipelineShare:
    """One rank's share of a pipeline; the whole model if there is no pipeline.

    Attributes:
        blocks: Number of blocks in all of the rank's chunks.
        chunks: Number of chunks (consecutive parts of the model) on the rank.
        in_flight: Most passes through a chunk whose activations the rank keeps at once.
        first: Whether the rank has the embedding.
        last: Whether the rank has the head.
    """

    blocks: int
    chunks: int
    in_flight: int
    first: bool
    last: bool

    @property
    def kept_blocks(self) -> int:
        """Most passes through a block whose activations the rank keeps at once."""
        return -(-self.in_flight * self.blocks // self.chunks)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of model states per parameter.

    Attributes:
        params: Bytes of ``P``.
        grads: Bytes of ``G``.
        optimizer: Bytes of ``OS``: the master parameter and the moments.
    """

    params: int
    grads: int
    optimizer: int

    @classmethod
    def of(cls, plan: Plan) -> States:
        """The states of thinwire's runtime with AdamW. fp32 parameters serve as their own masters."""
        return cls.of_dtypes(plan.compute_dtype, plan.accumulate_dtype, alike=plan.params == plan.optimizer)

    @classmethod
    def of_dtypes(cls, compute_dtype: str, accumulate_dtype: str, *, alike: bool) -> States:
        """The same by dtypes; ``alike``: whether ``P`` and ``OS`` are cut alike."""
        master = 0 if compute_dtype == "float32" and alike else 4
        return cls(ITEMSIZE[compute_dtype], ITEMSIZE[accumulate_dtype], master + 8)


AMSP_STATES = States(2, 2, 12)
"""States as AMSP counts them (section 3), with bf16 gradients."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's memory, by content.

    Attributes:
        params: Bytes of the ``P`` shard.
        grads: Bytes of the ``G`` shard.
        optimizer: Bytes of the ``OS`` shard.
        secondary: Bytes of the secondary parameter shard.
        gathered: Bytes of the units that are gathered at once.
        buffers: Bytes of gradients in flight, encoded messages and sums.
        feedback: Bytes of rounding errors that error feedback keeps.
        islands: Bytes of what islands agreed on, of the outer momentum, and of an exchange under way.
        activations: Bytes of activations kept from forward to backward.
        logits: Bytes of logits, their gradients and the loss.
        overhead: Bytes in use without a model.
    """

    params: int
    grads: int
    optimizer: int
    secondary: int
    gathered: int
    buffers: int
    feedback: int
    islands: int
    activations: int
    logits: int
    overhead: int

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, int]:
        """Bytes by name of the attribute."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def memory(
    model: ModelSpec,
    plan: Plan,
    units: Sequence[UnitInfo],
    *,
    seq: int,
    states: States | None = None,
    overhead: int = OVERHEAD,
    loss_chunk: int = GPU_LOSS_CHUNK,
    share: int | None = None,
    stage: PipelineShare | None = None,
) -> Memory:
    """Peak memory of one rank under a plan.

    Args:
        model: Dimensions of the model, or of the rank's part of it in a pipeline.
        plan: The plan; factors, dtypes, micro-batch and recomputation matter.
        units: Units of the model.
        seq: Tokens per sequence.
        states: Bytes per parameter of another system; default: those of thinwire's runtime.
        overhead: Bytes in use without a model.
        loss_chunk: Most logits of which the loss has fp32 copies at once.
        share: Number of elements on the rank that owns the most; default: computed from ``units``.
        stage: The rank's share of thinwire's own pipeline or tensor parallelism. The default describes any system: as
            many micro-batches in flight as on the first rank, the logits of the last, and no buffers for messages.
    """
    if own := [unit for unit in units if unit.experts]:
        rest = [unit for unit in units if not unit.experts]
        whole = memory(model, plan, rest, seq=seq, overhead=overhead, loss_chunk=loss_chunk, stage=stage)
        return _with_experts(whole, plan.for_experts(), own, _exchange_bytes(model, plan, seq))
    share = _largest_share(units) if share is None else share
    padded = sum(buffer.numel for unit in units for buffer in unit.buffers)
    grads = _gradient_shards(plan, padded, share) if states is None else padded // plan.grads.ranks
    states, transient = states or States.of(plan), Transient(units)
    return Memory(
        params=states.params * padded // plan.params.ranks,
        grads=states.grads * grads,
        optimizer=states.optimizer * share,
        secondary=states.params * padded // plan.secondary.ranks if plan.secondary else 0,
        gathered=transient.gathered(plan),
        buffers=transient.buffers(plan) + _messages(model, plan, seq, stage),
        feedback=_feedback(plan, padded),
        islands=_exchanged(plan, share),
        activations=_activations(model, plan, seq, stage),
        logits=logit_bytes(model, *_tokens(plan, seq), loss_chunk) if stage is None or stage.last else 0,
        overhead=overhead,
    )


def _with_experts(rest: Memory, plan: Plan, units: Sequence[UnitInfo], exchanges: int) -> Memory:
    """The memory of a model with that of its experts, which are sharded by a plan of their own."""
    share, states, transient = _largest_share(units), States.of(plan), Transient(units)
    padded = sum(buffer.numel for unit in units for buffer in unit.buffers)
    return replace(
        rest,
        params=rest.params + states.params * padded // plan.params.ranks,
        grads=rest.grads + states.grads * _gradient_shards(plan, padded, share),
        optimizer=rest.optimizer + states.optimizer * share,
        secondary=rest.secondary + (states.params * padded // plan.secondary.ranks if plan.secondary else 0),
        gathered=rest.gathered + transient.gathered(plan),
        buffers=rest.buffers + transient.buffers(plan) + exchanges,
        feedback=rest.feedback + _feedback(plan, padded),
    )


def _exchange_bytes(model: ModelSpec, plan: Plan, seq: int) -> int:
    """Bytes of the rows that a rank sends to experts, which nobody needs any more once they have arrived."""
    tokens, itemsize = _tokens(plan, seq)
    return tokens * model.active_experts * model.hidden * itemsize


def working_memory(
    model: ModelSpec, plan: Plan, *, seq: int, stage: PipelineShare, loss_chunk: int = GPU_LOSS_CHUNK
) -> int:
    """Bytes that depend on the micro-batch: activations, messages between stages, logits and the loss."""
    logits = logit_bytes(model, *_tokens(plan, seq), loss_chunk) if stage.last else 0
    return _activations(model, plan, seq, stage) + _messages(model, plan, seq, stage) + logits


def largest_memory(
    model: ModelSpec, plan: Plan, *, seq: int, overhead: int, loss_chunk: int = GPU_LOSS_CHUNK
) -> Memory:
    """Peak memory of the rank that needs the most, under thinwire's own tensor and pipeline parallelism.

    Args:
        model: Dimensions of the whole model.
        plan: The plan.
        seq: Tokens per sequence.
        overhead: Bytes in use without a model.
        loss_chunk: Most logits of which the loss has fp32 copies at once.
    """
    by_stage = []
    for stage in demanding_stages(stages(model.layers, plan)):
        part = stage_model(model, stage.blocks)
        held = held_units(part, plan, stage)
        needed = memory(part, plan, held, seq=seq, overhead=overhead, loss_chunk=loss_chunk, stage=stage)
        by_stage.append(needed)
    return max(by_stage, key=lambda needed: needed.total)


def stages(layers: int, plan: Plan) -> list[PipelineShare]:
    """The pipeline shares of all ranks, as ``thinwire.parallel`` assigns blocks and torch's schedules run them.

    Under 1F1B, a rank has one micro-batch in flight for itself and one for each later rank. Under the interleaved
    schedule, a rank first runs a round of micro-batches through all chunks but one, then two more passes for each later
    rank (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Args:
        layers: Number of blocks in the model.
        plan: The plan; stages, schedule and micro-batches matter.
    """
    return list(_stages(layers, plan.pp, STAGES_OF_A_RANK[plan.schedule], plan.micro_batches))


@lru_cache(maxsize=4096)
def _stages(layers: int, pp: int, chunks: int, count: int) -> tuple[PipelineShare, ...]:
    bounds = [index * layers // (pp * chunks) for index in range(pp * chunks + 1)]
    shares = []
    for rank in range(pp):
        blocks = sum(bounds[index + 1] - bounds[index] for index in range(rank, pp * chunks, pp))
        if chunks == 1:
            in_flight = min(count, pp - rank)
        else:
            a_round = count // max(1, count // pp)
            in_flight = min(count * chunks, (chunks - 1) * a_round + 2 * (pp - 1 - rank) + 1)
        shares.append(PipelineShare(blocks, chunks, in_flight, rank == 0, rank == pp - 1))
    return tuple(shares)


def demanding_stages(shares: Sequence[PipelineShare]) -> list[PipelineShare]:
    """The shares that may need the most memory: both ends, and the first of those with equally many blocks between."""
    if len(shares) == 1:
        return list(shares)
    between: dict[int, PipelineShare] = {}
    for share in shares[1:-1]:
        between.setdefault(share.blocks, share)
    return [shares[0], *between.values(), shares[-1]]


@lru_cache(maxsize=64)
def stage_model(model: ModelSpec, blocks: int) -> ModelSpec:
    """The model with ``blocks`` blocks."""
    return model if blocks == model.layers else model.with_(layers=blocks)


def held_units(model: ModelSpec, plan: Plan, stage: PipelineShare) -> list[UnitInfo]:
    """Units of one rank. The first rank has the embedding and the last rank has the head.

    Args:
        model: Dimensions of the model, with the rank's number of blocks.
        plan: The plan.
        stage: The rank's share of the pipeline.
    """
    cut = parts(model, plan.granularity, plan.tp, plan.ep)
    return [
        unit
        for part, unit in zip(cut, units_of(model, plan), strict=True)
        if (stage.first or part.kind != "embedding") and (stage.last or part.kind != "head" or not part.name)
    ]


def _largest_share(units: Sequence[UnitInfo]) -> int:
    """Number of elements on the rank that owns the most."""
    shares = together([buffer.shares for unit in units for buffer in unit.buffers])
    return shares[0] if isinstance(shares, Even) else max(shares)


def _gradient_shards(plan: Plan, padded: int, share: int) -> int:
    """Elements of the gradients that this runtime keeps: those of the optimizer's share, and a ``G`` shard where G is
    cut less finely. With one micro-batch and whole parameters, no ``G`` shard is made: gradients go straight from
    autograd to the reduction."""
    apart = not plan.grads_like_optimizer and (plan.params.ranks > 1 or plan.micro_batches > 1)
    return share + (padded // plan.grads.ranks if apart else 0)


def _exchanged(plan: Plan, share: int) -> int:
    """Bytes of what a rank keeps for exchanges with other islands, in fp32, and of the largest exchange under way: the
    change and its mean, and the new values where ranks of an island keep parts for each other."""
    islands = plan.islands
    if islands is None or islands.count == 1:
        return 0
    replicas = plan.world // plan.optimizer.ranks
    piece = -(-share // replicas)
    kept = piece * (1 + (islands.outer.momentum > 0))
    if islands.error_feedback:
        kept += piece if islands.count == 2 else piece + piece // islands.count
    under_way = 2 * piece + (share if replicas > 1 else 0)
    return 4 * (kept + -(-under_way // islands.fragments))


def _feedback(plan: Plan, padded: int) -> int:
    """Bytes of fp32 rounding errors, one for each value that the last hop of a reduction sends."""
    if not plan.wire.error_feedback:
        return 0
    shard, total = padded // plan.params.ranks, 0
    for axis, numel in ((Axis.PARAMS, padded), (Axis.SHARD, shard), (Axis.REPLICA, padded // plan.optimizer.ranks)):
        local, nodes = axis_shape(plan, axis)
        intra, inter = reduction_codecs(plan, axis)
        codec = inter if nodes > 1 else intra
        if local * nodes > 1 and not codec.is_lossless:
            total += 4 * (numel // local if nodes > 1 else numel)
    return total


def activation_bytes(model: ModelSpec, tokens: int, itemsize: int) -> int:
    """Bytes that one block keeps from its forward to its backward for ``tokens`` tokens."""
    # Input and output of both norms, rotated queries and keys, values, the attention output twice (plain and
    # flattened); then gate, up, silu(gate) and their product, or the input and output of GELU.
    width = 4 * model.hidden + _attention_values(model)
    of_values = 4 if model.kind == "llama" else 2
    dense = of_values * model.ffn if expert_layers(model) < model.layers else 0
    width += max(dense, of_values * model.shared_ffn + _expert_values(model))
    softmax = 4 * (model.heads + (model.experts or 0))  # one fp32 normaliser for each head, a chance for each expert
    return tokens * (itemsize * width + softmax)


def _attention_values(model: ModelSpec) -> int:
    """Values that attention keeps of a token."""
    queries = model.heads * model.head_dim
    if model.latent is None:
        return 3 * queries + 2 * model.kv_hidden
    latent = model.latent
    # Compressed vectors before and after their norms; whole queries, keys and values.
    compressed = 2 * ((latent.query_rank or 0) + latent.kv_rank)
    return compressed + 2 * queries + 3 * model.heads * latent.value_dim


def _expert_values(model: ModelSpec) -> int:
    """Values that experts keep of a token: for each that it visits, its copy, gate and up, silu(gate), their product,
    and what the expert makes of it."""
    if model.experts is None:
        return 0
    return model.active_experts * (2 * model.hidden + 4 * model.expert_ffn)


def kept_activations(
    model: ModelSpec, plan: Plan, parts: Sequence[ModelPart], *, seq: int, loss_chunk: int = GPU_LOSS_CHUNK
) -> tuple[int, ...]:
    """Bytes that each part of a model keeps from its forward to its backward.

    Args:
        model: Dimensions of the model.
        plan: The plan; micro-batch, tensor parallelism and recomputation matter.
        parts: Parts of the model.
        seq: Tokens per sequence.
        loss_chunk: Most logits of which the loss has fp32 copies at once.
    """
    tokens, itemsize = _tokens(plan, seq)
    inputs = tokens * model.hidden * itemsize
    block = inputs if plan.recompute else activation_bytes(model, tokens, itemsize)
    blocks = sum(part.kind == "block" for part in parts)
    # A block may be cut into several parts.
    share = block * model.layers // max(1, blocks)
    heads = [part.kind in ("head", "rest") for part in parts]
    last = len(heads) - 1 - heads[::-1].index(True) if any(heads) else -1
    return tuple(
        share if part.kind == "block" else logit_bytes(model, tokens, itemsize, loss_chunk) if index == last else 0
        for index, part in enumerate(parts)
    )


def _tokens(plan: Plan, seq: int) -> tuple[int, int]:
    """Tokens of a micro-batch on one tensor-parallel rank, and bytes per value."""
    # Tensor-parallel ranks split the sequence wherever they do not split heads and channels (Korthikanti et al.,
    # section 4.2).
    return -(-plan.micro_batch * seq // (plan.tp * plan.cp)), ITEMSIZE[plan.compute_dtype]


def _activations(model: ModelSpec, plan: Plan, seq: int, stage: PipelineShare | None) -> int:
    tokens, itemsize = _tokens(plan, seq)
    block = activation_bytes(model, tokens, itemsize)
    block += 2 * (plan.cp - 1) * tokens * model.kv_hidden * itemsize  # gathered keys and values
    inputs = tokens * model.hidden * itemsize
    if stage is None:
        kept, ends = model.layers * min(plan.pp, plan.micro_batches), 3 * inputs
    else:
        # The inputs of attention, feed-forward and head are gathered over the tensor-parallel ranks. Torch keeps them
        # gathered for the gradients of the weights, whereas Korthikanti et al. gather them again.
        block += 2 * (plan.tp - 1) * inputs
        kept = stage.kept_blocks
        # The embedding's output, the final norm's input and output, and messages sent to other stages.
        ends = stage.first * inputs + stage.last * (1 + plan.tp) * inputs
        ends += stage.in_flight * (stage.chunks - stage.last) // stage.chunks * inputs
    return (kept * inputs + block if plan.recompute else kept * block) + ends


def _messages(model: ModelSpec, plan: Plan, seq: int, stage: PipelineShare | None) -> int:
    """Bytes of a stage's receive buffers. Torch's pipelining has one for each micro-batch of a step and each direction.

    The buffers of micro-batches in flight are counted with the activations.
    """
    if stage is None or plan.pp == 1:
        return 0
    tokens, itemsize = _tokens(plan, seq)
    forward = max(0, (stage.chunks - stage.first) * plan.micro_batches - stage.in_flight)
    backward = (stage.chunks - stage.last) * plan.micro_batches
    return (forward + backward) * tokens * model.hidden * itemsize


def logit_bytes(model: ModelSpec, tokens: int, itemsize: int, loss_chunk: int = GPU_LOSS_CHUNK) -> int:
    """Bytes of the logits of ``tokens`` tokens, their gradients and the loss."""
    logits = tokens * model.vocab
    return 2 * logits * itemsize + 2 * 4 * min(logits, loss_chunk)
