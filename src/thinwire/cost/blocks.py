"""The modules of one block of the built-in models: their parameters, their matrices, and what their kernels move.

Names, shapes and order are those of the built-in Llama, its mixture of experts, and GPT. Of other mixtures of experts,
only sizes are alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from thinwire.spec import ModelSpec
from thinwire.spec.models.model import attention_width, block_matrices, latent_norms

__all__ = ["EXPERTS", "BlockModule", "Routed", "block_modules", "norm_parameters"]

EXPERTS = "mlp.experts"
"""Name of a block's experts below the block."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of a part.

    Attributes:
        matrices: Rows and columns of one expert's matrices.
        experts: Number of experts that the tokens are spread over.
        active: Number of experts that a token visits.
    """

    matrices: tuple[tuple[int, int], ...]
    experts: int
    active: int


@dataclass(frozen=True, slots=True)
class BlockModule:
    """A module of a block: its name below the block, its parameters, and what it computes besides; see ModelPart."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    matrices: tuple[tuple[int, int], ...] = ()
    attention_width: int = 0
    heads: int = 0
    split_values: int = 0
    whole_values: int = 0
    routed: Routed | None = None


def norm_parameters(model: ModelSpec) -> tuple[tuple[str, int], ...]:
    weight = (("weight", model.hidden),)
    return (*weight, ("bias", model.hidden)) if model.kind == "gpt" else weight


def _linear(rows: int, columns: int, *, bias: bool) -> tuple[tuple[str, int], ...]:
    weight = (("weight", rows * columns),)
    return (*weight, ("bias", rows)) if bias else weight


@lru_cache(maxsize=64)
def block_modules(model: ModelSpec, *, experts: bool) -> tuple[BlockModule, ...]:
    linears = block_matrices(model, experts=experts)
    norms = ("input_layernorm", "post_attention_layernorm")
    of_attention = [name for name in linears if not name.startswith("mlp")]
    of_feed_forward = [name for name in linears if name.startswith("mlp")]
    order = [norms[0], *of_attention, norms[1], *of_feed_forward] if model.kind == "llama" else [*norms, *linears]
    split, whole = _kernel_values(model, experts=experts)
    modules = []
    vectors = latent_norms(model)
    for name in order:
        matrices = (linears[name],) if name in linears else ()
        bias = model.kind == "gpt" or (model.biases and (name in of_attention or name == "mlp.gate"))
        parameters = _linear(*linears[name], bias=bias) if name in linears else norm_parameters(model)
        attention = (attention_width(model), model.heads) if name == of_attention[-1] else (0, 0)
        modules.append(BlockModule(name, parameters, matrices, *attention, split.get(name, 0), whole.get(name, 0)))
        if name in vectors:
            normalised, width = vectors[name]
            modules.append(BlockModule(normalised, (("weight", width),), whole_values=2 * width))
        if name == "mlp.gate":
            modules.append(_experts(model))
    return tuple(modules)


def _experts(model: ModelSpec) -> BlockModule:
    """All experts of a block, as tensors that hold the matrices of one kind of all experts."""
    assert model.experts is not None
    h, width, active = model.hidden, model.expert_ffn, model.active_experts
    parameters = [("gate_up_proj", model.experts * 2 * width * h), ("down_proj", model.experts * h * width)]
    if model.biases:
        parameters += [("gate_up_proj_bias", model.experts * 2 * width), ("down_proj_bias", model.experts * h)]
    # A token is copied for each expert and back, weighted and added up; SiLU and gate as in a feed-forward.
    values = active * (4 * h + 3 * width) + 4 * h
    routed = Routed(((2 * width, h), (h, width)), model.experts, active)
    return BlockModule(EXPERTS, tuple(parameters), split_values=values, routed=routed)


def _kernel_values(model: ModelSpec, *, experts: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Values of a token that kernels between the matrix products read and write in the forward, by module: those that
    tensor parallelism splits, and those that it does not. A norm reads and writes the stream once; a residual addition
    reads two and writes one; a rotation reads and writes its vector."""
    h, queries, kv = model.hidden, model.heads * model.head_dim, model.kv_hidden
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), 2 * h)
    if model.kind != "llama":
        # GELU, and dropout before each residual addition, which adds a read and a write (Korthikanti et al. 2022).
        return {"mlp.dense_h_to_4h": 2 * model.ffn}, {**norms, "attention.dense": 5 * h, "mlp.dense_4h_to_h": 5 * h}
    if model.latent is None:
        split = {"self_attn.q_proj": 2 * queries, "self_attn.k_proj": 2 * kv}
    else:  # only a part of the queries is rotated, and one key for all heads
        split = {"self_attn.kv_b_proj": 2 * (model.heads + 1) * model.latent.rotary}
    # SiLU and the product with the gate: two values in, one out.
    if not experts:
        return split | {"mlp.down_proj": 3 * model.ffn}, {**norms, "self_attn.o_proj": 3 * h, "mlp.down_proj": 3 * h}
    if model.shared_ffn:
        split["mlp.shared_expert.down_proj"] = 3 * model.shared_ffn
    return split, {**norms, "self_attn.o_proj": 3 * h, "mlp.gate": 3 * h}
