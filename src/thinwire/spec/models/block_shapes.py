"""Matrices and vectors of a transformer block by shape."""

from __future__ import annotations

from typing import ClassVar, Protocol

from pydantic import Field

from thinwire.spec.base import Count, Spec

__all__ = [
    "Latent", "Matrices", "active_matrices", "attention_width", "block_matrices", "block_parameters",
    "expert_layers", "expert_parameters", "latent_norms",
]  # fmt: skip

Matrices = dict[str, tuple[int, int]]
"""Rows (width of the output) and columns (width of the input) of matrices, by name below the block."""


class Latent(Spec):
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    toml_inline: ClassVar[bool] = True

    query_rank: Count | None = Field(default=None, description="width of compressed queries; unset: not compressed")
    kv_rank: Count = Field(description="width of compressed keys and values")
    rotary: Count = Field(description="part of head_dim with positions, whose keys all heads share")
    value_dim: Count = Field(description="width of a head's values")


class _Shape(Protocol):
    """The sizes of a block, from a model."""

    @property
    def kind(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def experts(self) -> int | None: ...
    @property
    def active_experts(self) -> int: ...
    @property
    def expert_ffn(self) -> int: ...
    @property
    def shared_ffn(self) -> int: ...
    @property
    def dense_layers(self) -> int: ...
    @property
    def latent(self) -> Latent | None: ...
    @property
    def biases(self) -> bool: ...


def attention(model: _Shape) -> Matrices:
    """The matrices of a block's attention."""
    h, queries, kv = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim
    if model.kind == "gpt":
        return {"attention.query_key_value": (queries + 2 * kv, h), "attention.dense": (h, queries)}
    if model.latent is None:
        return {
            "self_attn.q_proj": (queries, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, queries),
        }  # fmt: skip
    latent, plain = model.latent, model.head_dim - model.latent.rotary
    rank = latent.query_rank
    made = {"self_attn.q_proj": (queries, h)} if rank is None else {
        "self_attn.q_a_proj": (rank, h), "self_attn.q_b_proj": (queries, rank),
    }  # fmt: skip
    return made | {
        "self_attn.kv_a_proj_with_mqa": (latent.kv_rank + latent.rotary, h),
        "self_attn.kv_b_proj": (model.heads * (plain + latent.value_dim), latent.kv_rank),
        "self_attn.o_proj": (h, model.heads * latent.value_dim),
    }


def attention_width(model: _Shape) -> int:
    """Half the width of all heads' queries and values: scores and their products with the values take four FLOPs for
    each unit of it, for each token and each token that it attends to."""
    value_dim = model.head_dim if model.latent is None else model.latent.value_dim
    return model.heads * (model.head_dim + value_dim) // 2


def feed_forward(kind: str, hidden: int, width: int, name: str = "mlp") -> Matrices:
    """The matrices of a feed-forward network of this width, or of an expert; none if it has no width."""
    if not width:
        return {}
    if kind == "gpt":
        return {f"{name}.dense_h_to_4h": (width, hidden), f"{name}.dense_4h_to_h": (hidden, width)}
    return {
        f"{name}.gate_proj": (width, hidden), f"{name}.up_proj": (width, hidden), f"{name}.down_proj": (hidden, width),
    }  # fmt: skip


def attention_vectors(model: _Shape) -> int:
    """Elements of a block's norms, and of the biases of its attention."""
    norms = 2 * model.hidden * (2 if model.kind == "gpt" else 1)
    biases = model.kind == "gpt" or model.biases
    rows = sum(rows for rows, _ in attention(model).values()) if biases else 0
    return norms + rows + sum(width for _, width in latent_norms(model).values())


def latent_norms(model: _Shape) -> dict[str, tuple[str, int]]:
    """Name and width of the norms of compressed vectors, by the matrix that makes the vector."""
    latent = model.latent
    if latent is None:
        return {}
    norms = {"self_attn.kv_a_proj_with_mqa": ("self_attn.kv_a_layernorm", latent.kv_rank)}
    if latent.query_rank is not None:
        norms["self_attn.q_a_proj"] = ("self_attn.q_a_layernorm", latent.query_rank)
    return norms


def feed_forward_vectors(model: _Shape, *, experts: bool) -> int:
    """Elements of the biases of a block's feed-forward, or of its router."""
    if experts:
        return (model.experts or 0) if model.biases else 0
    return model.ffn + model.hidden if model.kind == "gpt" else 0


def expert_layers(model: _Shape) -> int:
    """Number of blocks with experts."""
    return 0 if model.experts is None else model.layers - model.dense_layers


def expert_parameters(model: _Shape) -> int:
    """Parameters of all experts of one block, without the router and the expert that every token visits."""
    return (model.experts or 0) * _expert(model)


def block_matrices(model: _Shape, *, experts: bool) -> Matrices:
    """The matrices of a block outside of its routed experts, by name.

    Args:
        model: The model.
        experts: Whether the block has experts; then a router and what every token visits take the place of the
            feed-forward.
    """
    made = attention(model)
    if not experts:
        return made | feed_forward(model.kind, model.hidden, model.ffn)
    assert model.experts is not None
    made["mlp.gate"] = (model.experts, model.hidden)
    return made | feed_forward(model.kind, model.hidden, model.shared_ffn, "mlp.shared_expert")


def block_parameters(model: _Shape, routed: int) -> int:
    """Parameters of all blocks, of whose experts ``routed`` count."""
    total = 0
    for count, experts in _kinds(model):
        vectors = attention_vectors(model) + feed_forward_vectors(model, experts=experts)
        of_experts = routed * _expert(model) if experts else 0
        total += count * (numel(block_matrices(model, experts=experts)) + vectors + of_experts)
    return total


def active_matrices(model: _Shape) -> int:
    """Elements of all matrices of all blocks with which one token is multiplied."""
    routed = model.active_experts * numel(feed_forward(model.kind, model.hidden, model.expert_ffn))
    return sum(
        count * (numel(block_matrices(model, experts=experts)) + (routed if experts else 0))
        for count, experts in _kinds(model)
    )


def _kinds(model: _Shape) -> list[tuple[int, bool]]:
    """Numbers of blocks without and with experts."""
    with_experts = expert_layers(model)
    kinds = [(model.layers - with_experts, False), (with_experts, True)]
    return [(count, experts) for count, experts in kinds if count]


def _expert(model: _Shape) -> int:
    """Parameters of one expert."""
    matrices = feed_forward(model.kind, model.hidden, model.expert_ffn)
    return numel(matrices) + (sum(rows for rows, _ in matrices.values()) if model.biases else 0)


def numel(matrices: Matrices) -> int:
    """Elements of all matrices."""
    return sum(rows * columns for rows, columns in matrices.values())
