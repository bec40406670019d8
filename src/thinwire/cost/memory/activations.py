"""What lives from forward to backward: activations, messages between stages, logits and the loss.

Activations follow Korthikanti et al. 2022 ("Reducing Activation Recomputation", section 4) for the built-in models,
without dropout and with fused attention, which removes the term that is quadratic in the sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.cost.blocks import ModelPart
from thinwire.cost.memory.stages import PipelineShare
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.models.model import expert_layers

GPU_LOSS_CHUNK = 1 << 24
"""Most logits of which the built-in models' loss has fp32 copies at once on a GPU, where launches cost more than
caches: 64 MiB a copy."""

HOST_LOSS_CHUNK = 1 << 22
"""The same on a processor: 16 MiB a copy."""


def working_memory(
    model: ModelSpec, plan: Plan, *, seq: int, stage: PipelineShare, loss_chunk: int = GPU_LOSS_CHUNK
) -> int:
    """Bytes that depend on the micro-batch: activations, messages between stages, logits and the loss."""
    kept = held_activations(model, plan, seq, stage) + message_bytes(model, plan, seq, stage)
    return kept + (loss_bytes(model, plan, seq, loss_chunk) if stage.last else 0)


def exchange_bytes(model: ModelSpec, plan: Plan, seq: int) -> int:
    """Bytes of the rows that a rank sends to experts, which nobody needs any more once they have arrived."""
    tokens, itemsize = _tokens(plan, seq)
    return tokens * model.active_experts * model.hidden * itemsize


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


def kept_activations(model: ModelSpec, plan: Plan, parts: Sequence[ModelPart], *, seq: int) -> tuple[int, ...]:
    """Bytes that each part of a model keeps from its forward to its backward on a GPU. Of the plan, micro-batch, tensor
    parallelism and recomputation matter."""
    tokens, itemsize = _tokens(plan, seq)
    block = _input_bytes(model, plan, seq) if plan.recompute else _block_bytes(model, plan, seq)
    blocks = sum(part.kind == "block" for part in parts)
    # A block may be cut into several parts.
    share = block * model.layers // max(1, blocks)
    heads = [part.kind in ("head", "rest") for part in parts]
    last = len(heads) - 1 - heads[::-1].index(True) if any(heads) else -1
    return tuple(
        share if part.kind == "block" else logit_bytes(model, tokens, itemsize) if index == last else 0
        for index, part in enumerate(parts)
    )


def _tokens(plan: Plan, seq: int) -> tuple[int, int]:
    """Tokens of a micro-batch on one tensor-parallel rank, and bytes per value."""
    # Tensor-parallel ranks split the sequence wherever they do not split heads and channels (Korthikanti et al.,
    # section 4.2). Without sequence parallelism, _block_bytes adds what is whole there.
    return -(-plan.micro_batch * seq // (plan.tp * plan.cp)), ITEMSIZE[plan.compute_dtype]


def _input_bytes(model: ModelSpec, plan: Plan, seq: int) -> int:
    """Bytes of hidden states between matrices on one rank: of its tokens, or of all without sequence parallelism."""
    tokens, itemsize = _tokens(plan, seq)
    return (1 if plan.sequence_parallel else plan.tp) * tokens * model.hidden * itemsize


def _block_bytes(model: ModelSpec, plan: Plan, seq: int, *, gathered: int = 0) -> int:
    """Bytes that one block keeps of a micro-batch on one rank.

    Of the inputs and outputs of both norms, so many as are ``gathered`` are kept of all tokens under sequence
    parallelism. Without it, all four are (Korthikanti et al., equation 2).
    """
    tokens, itemsize = _tokens(plan, seq)
    whole = gathered if plan.sequence_parallel else 4
    return activation_bytes(model, tokens, itemsize) + whole * (plan.tp - 1) * tokens * model.hidden * itemsize


def held_activations(model: ModelSpec, plan: Plan, seq: int, stage: PipelineShare | None) -> int:
    tokens, itemsize = _tokens(plan, seq)
    inputs = _input_bytes(model, plan, seq)
    # The inputs of attention, feed-forward and head are gathered over the tensor-parallel ranks. Torch keeps them
    # gathered for the gradients of the weights, whereas Korthikanti et al. gather them again.
    block = _block_bytes(model, plan, seq, gathered=0 if stage is None else 2)
    block += 2 * (plan.cp - 1) * tokens * model.kv_hidden * itemsize  # gathered keys and values
    if stage is None:
        kept, ends = model.layers * min(plan.pp, plan.micro_batches), 3 * inputs
    else:
        kept = stage.kept_blocks
        # The embedding's output, the final norm's input and output, and messages sent to other stages.
        ends = stage.first * inputs + stage.last * (inputs + plan.tp * tokens * model.hidden * itemsize)
        ends += stage.in_flight * (stage.chunks - stage.last) // stage.chunks * inputs
    return (kept * inputs + block if plan.recompute else kept * block) + ends


def message_bytes(model: ModelSpec, plan: Plan, seq: int, stage: PipelineShare | None) -> int:
    """Bytes of a stage's receive buffers. Torch's pipelining has one for each micro-batch of a step and each direction.

    The buffers of micro-batches in flight are counted with the activations.
    """
    if stage is None or plan.pp == 1:
        return 0
    forward = max(0, (stage.chunks - stage.first) * plan.micro_batches - stage.in_flight)
    backward = (stage.chunks - stage.last) * plan.micro_batches
    return (forward + backward) * _input_bytes(model, plan, seq)


def logit_bytes(model: ModelSpec, tokens: int, itemsize: int, loss_chunk: int = GPU_LOSS_CHUNK) -> int:
    """Bytes of the logits of ``tokens`` tokens, their gradients and the loss."""
    logits = tokens * model.vocab
    return 2 * logits * itemsize + 2 * 4 * min(logits, loss_chunk)


def loss_bytes(model: ModelSpec, plan: Plan, seq: int, loss_chunk: int = GPU_LOSS_CHUNK) -> int:
    """The same of a micro-batch."""
    return logit_bytes(model, *_tokens(plan, seq), loss_chunk)
