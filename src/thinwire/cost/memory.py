"""Bytes of one rank at the peak of a step, by what they hold.

Model states as the runtime keeps them: ``P`` in the compute dtype, ``G`` in the accumulate dtype, fp32 masters and
AdamW's two moments; the largest share counts where whole tensors are dealt. Activations follow Korthikanti et al. 2022
("Reducing Activation Recomputation", section 4) for the built-in models without dropout and with fused attention, which
drops the term in the square of the sequence. A pipeline's ranks differ: the first keeps most micro-batches in flight
and the last has the logits, so the one that needs most counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from thinwire.cost.anatomy import ModelPart, parts
from thinwire.cost.anatomy import units as units_of
from thinwire.program import UNDER_WAY, Axis, Even, UnitInfo, axis_shape, together
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.pipeline import STAGES_OF_A_RANK

__all__ = [
    "OVERHEAD",
    "Memory",
    "Stage",
    "States",
    "activation_bytes",
    "demanding_stages",
    "held_units",
    "kept_activations",
    "largest_memory",
    "memory",
    "stage_model",
    "stages",
    "working_memory",
]

OVERHEAD = 1_500 << 20
"""Bytes of a GPU that hold no tensor: contexts, communicators, libraries, fragments. A profile measures it."""

_LOSS_CHUNK = 1 << 22
"""Logits that the loss works on at a time, in two fp32 copies."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one rank has of a pipeline; without one, all of it.

    Attributes:
        blocks: of the model, over all of the rank's chunks.
        chunks: consecutive parts of the model that it holds.
        in_flight: passes through a chunk whose activations it keeps at once.
        first: whether it has the embedding.
        last: whether it has the head.
    """

    blocks: int
    chunks: int
    in_flight: int
    first: bool
    last: bool

    @property
    def kept_blocks(self) -> int:
        """Passes through a block whose activations it keeps at once."""
        return -(-self.in_flight * self.blocks // self.chunks)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes per parameter of what a rank keeps.

    Attributes:
        params: of ``P``.
        grads: of ``G``.
        optimizer: of ``OS``: master and moments.
    """

    params: int
    grads: int
    optimizer: int

    @classmethod
    def of(cls, plan: Plan) -> States:
        """As thinwire's runtime keeps them, with AdamW; fp32 parameters are their own master."""
        master = 0 if plan.compute_dtype == "float32" and plan.params == plan.optimizer else 4
        return cls(ITEMSIZE[plan.compute_dtype], ITEMSIZE[plan.accumulate_dtype], master + 8)


AMSP_STATES = States(2, 2, 12)
"""As AMSP counts (section 3): gradients in bf16."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by what they hold.

    Attributes:
        params: the ``P`` shard.
        grads: the ``G`` shard.
        optimizer: the ``OS`` shard.
        secondary: the secondary parameter shard.
        gathered: whole units during their computation.
        buffers: gradients on their way, codecs' messages and sums.
        feedback: what error feedback keeps.
        activations: kept from forward to backward.
        logits: logits, their gradient and the loss.
        overhead: what is in use without any model.
    """

    params: int
    grads: int
    optimizer: int
    secondary: int
    gathered: int
    buffers: int
    feedback: int
    activations: int
    logits: int
    overhead: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, int]:
        """Bytes by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def memory(
    model: ModelSpec,
    plan: Plan,
    units: Sequence[UnitInfo],
    *,
    seq: int,
    states: States | None = None,
    overhead: int = OVERHEAD,
    touched_only: bool = False,
    share: int | None = None,
    stage: Stage | None = None,
) -> Memory:
    """Bytes of a rank under a plan.

    Args:
        model: its shape; of a pipeline, a rank's part of it.
        plan: factors, dtypes, micro-batch and recomputation.
        units: of the model.
        seq: tokens of a sequence.
        states: bytes per parameter; thinwire's by default.
        overhead: bytes in use without any model.
        touched_only: whether memory counts when it is written, as on a host, not when it is allocated: with one
            micro-batch gradients go from autograd to the reduction, past the ``G`` shard.
        share: elements that the rank owns which owns most; from ``units`` by default.
        stage: the rank of thinwire's own pipeline, or of its tensor parallelism. By default any system's: with as many
            micro-batches in flight as the first rank, with the logits of the last, and with no buffers for messages.
    """
    states = states or States.of(plan)
    share = _largest_share(units) if share is None else share
    padded = sum(buffer.numel for unit in units for buffer in unit.buffers)
    written_once = touched_only and plan.micro_batches == 1
    return Memory(
        params=states.params * padded // plan.params.ranks,
        grads=states.grads * (share if plan.grads_like_optimizer or written_once else padded // plan.grads.ranks),
        optimizer=states.optimizer * share,
        secondary=states.params * padded // plan.secondary.ranks if plan.secondary else 0,
        gathered=_gathered(plan, units),
        buffers=_buffers(plan, units) + _messages(model, plan, seq, stage),
        feedback=_feedback(plan, padded),
        activations=_activations(model, plan, seq, stage),
        logits=_logits(model, *_tokens(plan, seq)) if stage is None or stage.last else 0,
        overhead=overhead,
    )


def working_memory(model: ModelSpec, plan: Plan, *, seq: int, stage: Stage) -> int:
    """Bytes that depend on the micro-batch: activations, messages between stages, logits and the loss."""
    logits = _logits(model, *_tokens(plan, seq)) if stage.last else 0
    return _activations(model, plan, seq, stage) + _messages(model, plan, seq, stage) + logits


def largest_memory(model: ModelSpec, plan: Plan, *, seq: int, overhead: int, touched_only: bool = False) -> Memory:
    """Bytes of the rank that needs most, as thinwire runs a plan with its tensor and pipeline parallelism.

    Args:
        model: the whole model.
        plan: the plan.
        seq: tokens of a sequence.
        overhead: bytes in use without any model.
        touched_only: see :func:`memory`.
    """
    found = []
    for stage in demanding_stages(stages(model.layers, plan)):
        part = stage_model(model, stage.blocks)
        held = held_units(part, plan, stage)
        needed = memory(part, plan, held, seq=seq, overhead=overhead, touched_only=touched_only, stage=stage)
        found.append(needed)
    return max(found, key=lambda needed: needed.total)


def stages(layers: int, plan: Plan) -> list[Stage]:
    """Every rank of the pipeline, as ``thinwire.parallel`` deals blocks out and torch's schedules run them.

    1F1B has as many micro-batches in flight as there are ranks from here to the last. Interleaved, the first pass of a
    round of micro-batches through all chunks but one comes before, and two for each rank behind (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2).

    Args:
        layers: blocks of the model.
        plan: with stages, schedule and micro-batches.
    """
    pp, chunks, count = plan.pp, STAGES_OF_A_RANK[plan.schedule], plan.micro_batches
    bounds = [index * layers // (pp * chunks) for index in range(pp * chunks + 1)]
    found = []
    for rank in range(pp):
        blocks = sum(bounds[index + 1] - bounds[index] for index in range(rank, pp * chunks, pp))
        if chunks == 1:
            in_flight = min(count, pp - rank)
        else:
            a_round = count // max(1, count // pp)
            in_flight = min(count * chunks, (chunks - 1) * a_round + 2 * (pp - 1 - rank) + 1)
        found.append(Stage(blocks, chunks, in_flight, rank == 0, rank == pp - 1))
    return found


def demanding_stages(found: Sequence[Stage]) -> list[Stage]:
    """Those of which one needs most memory: both ends, and of others with equally many blocks the first."""
    if len(found) == 1:
        return list(found)
    between: dict[int, Stage] = {}
    for stage in found[1:-1]:
        between.setdefault(stage.blocks, stage)
    return [found[0], *between.values(), found[-1]]


@lru_cache(maxsize=64)
def stage_model(model: ModelSpec, blocks: int) -> ModelSpec:
    """The shape with so many blocks."""
    return model if blocks == model.layers else model.with_(layers=blocks)


def held_units(model: ModelSpec, plan: Plan, stage: Stage) -> list[UnitInfo]:
    """Units of a stage: the embedding is the first rank's, the head the last one's.

    Args:
        model: with the stage's blocks.
        plan: the plan.
        stage: the rank.
    """
    cut = parts(model, plan.granularity, plan.tp)
    return [
        unit
        for part, unit in zip(cut, units_of(model, plan), strict=True)
        if (stage.first or part.kind != "embedding") and (stage.last or part.kind != "head" or not part.name)
    ]


def _largest_share(units: Sequence[UnitInfo]) -> int:
    """Elements of the rank that owns most."""
    shares = together([buffer.shares for unit in units for buffer in unit.buffers])
    return shares[0] if isinstance(shares, Even) else max(shares)


def _gathered(plan: Plan, units: Sequence[UnitInfo]) -> int:
    """The units that computation and prefetch hold at once, and those that stay gathered until backward."""
    if plan.params.ranks == 1:
        return 0
    sizes = [unit.nbytes for unit in units]
    around = sizes[0] if units[0].name == "" else 0
    inner = sizes[1:] if units[0].name == "" else sizes
    ahead = 1 + max(1, plan.prefetch)
    window = max(sum(inner[i : i + ahead]) for i in range(len(inner)))
    return around + max(window, inner[-1] + max((sum(inner[i : i + 2]) for i in range(len(inner) - 1)), default=0))


def _buffers(plan: Plan, units: Sequence[UnitInfo]) -> int:
    """Gradients of one unit before they are reduced, a bucket that is filled, and what is under way; messages of
    codecs."""
    reduce_size = ITEMSIZE[plan.effective_reduce_dtype]
    largest = max(sum(b.numel for b in unit.buffers) for unit in units)
    padded = sum(b.numel for unit in units for b in unit.buffers)
    produced = largest * ITEMSIZE[plan.compute_dtype]
    if plan.world == 1:
        return produced
    shard = padded // plan.params.ranks
    total = produced + _spread_bytes(plan, shard)
    if plan.params.ranks > 1:
        total += min(UNDER_WAY if plan.overlap.reduce else 1, len(units)) * _scattered(plan, largest)
    if plan.params.ranks < plan.world:
        bucket = min(shard, max(plan.bucket_bytes // reduce_size, largest // plan.params.ranks))
        under_way = UNDER_WAY if plan.overlap.sync else 1
        total += reduce_size * bucket + min(under_way, -(-shard // bucket)) * _reduced(plan, bucket)
    return total


def _scattered(plan: Plan, numel: int) -> int:
    """Gradients in a reduce-scatter, and what is received: messages, or values as they are."""
    values = ITEMSIZE[plan.effective_reduce_dtype] * numel
    return values + (_message_bytes(plan, numel) or values)


def _reduced(plan: Plan, numel: int) -> int:
    """A bucket in a reduce-scatter over the ranks that share OS, or in an all-reduce over replicas, or in both."""
    total, ranks = 0, plan.optimizer.ranks // plan.params.ranks
    if ranks > 1:
        numel, whole = numel // ranks, numel
        total += _scattered(plan, whole) + 4 * numel
    if plan.optimizer.ranks < plan.world:
        total += (ITEMSIZE[plan.effective_reduce_dtype] + 4) * numel + _message_bytes(plan, numel)
    return total


def _message_bytes(plan: Plan, numel: int) -> int:
    """Of gradients, encoded; and the node's sums between the hops."""
    local, _ = axis_shape(plan, Axis.SHARD)
    wire, total = plan.wire, 0
    if not wire.reduce_intra.is_none:
        total += wire.reduce_intra.max_wire_bytes(numel, plan.effective_reduce_dtype)
    if not wire.reduce_inter.is_none:
        total += 4 * numel // local
    return total


def _spread_bytes(plan: Plan, shard: int) -> int:
    """Messages of all spread parameters: the optimizer has every unit's ready before the first is on its way."""
    if plan.wire.spread.is_none or plan.optimizer == plan.params:
        return 0
    return plan.wire.spread.max_wire_bytes(shard, plan.compute_dtype)


def _feedback(plan: Plan, padded: int) -> int:
    """fp32 of what the last hop of every reduction sends."""
    if not plan.wire.error_feedback:
        return 0
    shard, total = padded // plan.params.ranks, 0
    for axis, numel in ((Axis.PARAMS, padded), (Axis.SHARD, shard), (Axis.REPLICA, padded // plan.optimizer.ranks)):
        local, nodes = axis_shape(plan, axis)
        codec = plan.wire.reduce_inter if nodes > 1 else plan.wire.reduce_intra
        if local * nodes > 1 and not codec.is_lossless:
            total += 4 * (numel // local if nodes > 1 else numel)
    return total


def activation_bytes(model: ModelSpec, tokens: int, itemsize: int) -> int:
    """What one block keeps of so many tokens from its forward to its backward."""
    h, kv, ffn = model.hidden, model.kv_hidden, model.ffn
    # Input and output of both norms, rotated queries and keys, values, attention's output twice (as it is and
    # flattened); then gate, up, silu(gate) and their product, or GELU's input and output.
    width = 7 * h + 2 * kv + (4 if model.kind == "llama" else 2) * ffn
    softmax = 4 * model.heads  # one fp32 normaliser for each head
    return tokens * (itemsize * width + softmax)


def kept_activations(model: ModelSpec, plan: Plan, parts: Sequence[ModelPart], *, seq: int) -> tuple[int, ...]:
    """Bytes that each part of a model keeps from its forward to its backward.

    Args:
        model: its shape.
        plan: micro-batch, tensor parallelism, recomputation.
        parts: of the model.
        seq: tokens of a sequence.
    """
    tokens, itemsize = -(-plan.micro_batch * seq // plan.tp), ITEMSIZE[plan.compute_dtype]
    inputs = tokens * model.hidden * itemsize
    block = inputs if plan.recompute else activation_bytes(model, tokens, itemsize)
    blocks = sum(part.kind == "block" for part in parts)
    # A block may be cut into several parts.
    share = block * model.layers // max(1, blocks)
    heads = [part.kind in ("head", "rest") for part in parts]
    last = len(heads) - 1 - heads[::-1].index(True) if any(heads) else -1
    return tuple(
        share if part.kind == "block" else _logits(model, tokens, itemsize) if index == last else 0
        for index, part in enumerate(parts)
    )


def _tokens(plan: Plan, seq: int) -> tuple[int, int]:
    """Tokens of a micro-batch on a tensor-parallel rank, and bytes of a value."""
    # Tensor-parallel ranks cut the sequence where they do not cut heads and channels (Korthikanti et al., section 4.2).
    return -(-plan.micro_batch * seq // plan.tp), ITEMSIZE[plan.compute_dtype]


def _activations(model: ModelSpec, plan: Plan, seq: int, stage: Stage | None) -> int:
    tokens, itemsize = _tokens(plan, seq)
    block = activation_bytes(model, tokens, itemsize)
    inputs = tokens * model.hidden * itemsize
    if stage is None:
        kept, ends = model.layers * min(plan.pp, plan.micro_batches), 3 * inputs
    else:
        # What attention, the feed-forward and the head read is gathered over the tensor-parallel ranks, and torch keeps
        # it so for the gradients of their weights; Korthikanti et al. gather it again.
        block += 2 * (plan.tp - 1) * inputs
        kept = stage.kept_blocks
        # The embedding's output; the final norm's input and output; what other stages have been sent.
        ends = stage.first * inputs + stage.last * (1 + plan.tp) * inputs
        ends += stage.in_flight * (stage.chunks - stage.last) // stage.chunks * inputs
    return (kept * inputs + block if plan.recompute else kept * block) + ends


def _messages(model: ModelSpec, plan: Plan, seq: int, stage: Stage | None) -> int:
    """Buffers for what a stage receives: torch's pipelining has one for each micro-batch of a step, both ways.

    Those that micro-batches in flight came in are counted with their activations.
    """
    if stage is None or plan.pp == 1:
        return 0
    tokens, itemsize = _tokens(plan, seq)
    forward = max(0, (stage.chunks - stage.first) * plan.micro_batches - stage.in_flight)
    backward = (stage.chunks - stage.last) * plan.micro_batches
    return (forward + backward) * tokens * model.hidden * itemsize


def _logits(model: ModelSpec, tokens: int, itemsize: int) -> int:
    logits = tokens * model.vocab
    return 2 * logits * itemsize + 2 * 4 * min(logits, _LOSS_CHUNK)
