"""The shape of a transformer, dense or a mixture of experts, its number of parameters and its FLOPs per token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.spec.base import Count, Depth, Flag, Modules, Problem, Spec, rule
from thinwire.spec.models.huggingface import huggingface_shape

Matrices = dict[str, tuple[int, int]]
"""Rows (width of the output) and columns (width of the input) of matrices, by name below the block."""

_FILLED_IN: Any = None  # placeholder default: prepare() replaces it with a number before validation


class Latent(Spec):
    """Widths of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    toml_inline: ClassVar[bool] = True

    query_rank: Count | None = Field(default=None, description="width of compressed queries; unset: not compressed")
    kv_rank: Count = Field(description="width of compressed keys and values")
    rotary: Count = Field(description="part of head_dim with positions, whose keys all heads share")
    value_dim: Count = Field(description="width of a head's values")


class Dimensions(Spec):
    """The dimensions that a model file must state, and that a recipe may state over a preset's."""

    kind: Literal["llama", "gpt", "huggingface"] | None = Field(
        default=None, description="model family; default: that of the preset, or llama"
    )
    layers: Modules | None = Field(default=None, description="transformer blocks")
    hidden: Count | None = Field(default=None, description="width of the residual stream")
    heads: Count | None = Field(default=None, description="attention heads; must divide hidden")
    kv_heads: Count | None = Field(default=None, description="key and value heads (llama); default: heads")
    ffn: Count | None = Field(default=None, description="width of the feed-forward network; default: depends on kind")
    experts: Modules | None = Field(default=None, description="experts of a block (llama); unset: one feed-forward")
    active_experts: Count | None = Field(default=None, description="experts that each token visits; default: 1 (llama)")
    expert_ffn: Count | None = Field(default=None, description="width of an expert (llama); default: ffn")
    vocab: Count | None = Field(default=None, description="rows of the embedding; default: the tokenizer's vocabulary")
    tied_embedding: Flag | None = Field(
        default=None, description="whether embedding and head share one weight; default: as in the preset, or false"
    )


class ModelSpec(Dimensions):
    """The dimensions of a decoder-only transformer. ``kv_heads``, ``head_dim`` and ``ffn`` have defaults that depend on
    the rest. With ``experts``, a router sends every token to ``active_experts`` of the experts of a block."""

    name: str | None = Field(default=None, description="label, for example the preset's name")
    kind: Literal["llama", "gpt"] = Field(
        default="llama", description="llama: RMSNorm, SwiGLU, no biases; gpt: LayerNorm, GELU, biases (GPT-NeoX style)"
    )
    layers: Modules = Field(description="transformer blocks (L)")
    hidden: Count = Field(description="width of the residual stream (h)")
    heads: Count = Field(description="attention heads")
    kv_heads: Count = Field(default=_FILLED_IN, description="key and value heads; must divide heads; default: heads")
    head_dim: Count = Field(
        default=_FILLED_IN, description="width of a head's queries and keys; default: hidden / heads, a whole number"
    )
    ffn: Count = Field(
        default=_FILLED_IN, description="width of the feed-forward network; default: 8/3 hidden (llama), 4 hidden (gpt)"
    )
    active_experts: Count = Field(default=1, description="experts that each token visits")
    expert_ffn: Count = Field(default=_FILLED_IN, description="width of an expert; default: ffn")
    shared_ffn: Depth = Field(default=0, description="width of the expert that every token visits besides; 0: none")
    dense_layers: Depth = Field(default=0, description="first blocks that have a feed-forward of ffn, without experts")
    latent: Latent | None = Field(
        default=None, description="compressed queries, keys and values, as in DeepSeek-V3 (MLA); unset: none"
    )
    biases: Flag = Field(
        default=False, description="whether a llama's attention, routers and experts have biases, as in gpt-oss"
    )
    vocab: Count = Field(description="tokens in the vocabulary (V)")
    tied_embedding: Flag = Field(default=False, description="whether embedding and head share one weight")
    seq: Count = Field(default=4096, description="tokens per sequence (s)")

    @classmethod
    def prepare(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fill in ``kv_heads``, ``head_dim``, ``ffn`` and ``expert_ffn`` where they are unset."""
        filled = dict(data)
        heads, hidden = filled.get("heads"), filled.get("hidden")
        if filled.get("kv_heads") is None and isinstance(heads, int):
            filled["kv_heads"] = heads
        if filled.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            filled["head_dim"] = max(1, hidden // heads)
        if filled.get("ffn") is None and isinstance(hidden, int):
            filled["ffn"] = 4 * hidden if filled.get("kind") == "gpt" else max(1, round(8 * hidden / 3))
        if filled.get("expert_ffn") is None and isinstance(filled.get("ffn"), int):
            filled["expert_ffn"] = filled["ffn"]
        return filled

    @property
    def kv_hidden(self) -> int:
        """Total width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters in the embedding."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters in the output head; 0 if it shares the embedding's weight."""
        return 0 if self.tied_embedding else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters in the whole model."""
        return _outside_blocks(self) + block_parameters(self, self.experts or 0)

    @property
    def active_parameters(self) -> int:
        """Parameters with which one token is computed, the embedding included."""
        return _outside_blocks(self) + block_parameters(self, self.active_experts)

    def flops_per_token(self, seq: int | None = None, *, causal: bool = False) -> int:
        """FLOPs of forward and backward for one token, without recomputation. Of the experts, those that a token
        visits count.

        ``3 * (L * (2 * matrix parameters per block + 4 s h) + 2 h V)``. With a SwiGLU of width 8h/3 this is
        ``3 L (24 h^2 + 4 s h) + 6 h V``, the count of AMSP and Megatron-LM (2021).

        Args:
            seq: Tokens per sequence; default: the model's ``seq``.
            causal: Whether to halve the attention term because half of it is masked, as current Megatron-LM does.
        """
        scores = 4 * (seq or self.seq) * attention_width(self)
        if causal:
            scores //= 2
        forward = self.layers * scores + 2 * self.hidden * self.vocab + 2 * active_matrices(self)
        return 3 * forward

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelSpec:
        """A published model's shape.

        Args:
            name: One of :meth:`preset_names`.
            **overrides: Fields to change, for example ``seq``.

        Raises:
            SpecError: The name is unknown or an override is invalid.
        """
        if name not in _PRESETS:
            valid = ", ".join(_PRESETS)
            raise SpecError(
                f"model {name!r}",
                f"there is no model preset {name!r}; valid are {valid}, a TOML file or a Hugging Face config.json",
            )
        return cls.parse({"name": name, **_PRESETS[name], **overrides}, f"model {name!r}")

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        """The names that :meth:`preset` accepts."""
        return tuple(_PRESETS)

    @classmethod
    def named(cls, text: str, **overrides: Any) -> ModelSpec:
        """The model that a ``--model`` option names.

        Args:
            text: A preset, a TOML file, a Hugging Face ``config.json``, or the directory that holds one.
            **overrides: Fields to change, for example ``seq``.

        Raises:
            SpecError: ``text`` is none of these, or a field is invalid.
        """
        path = Path(text)
        if text in _PRESETS or not (path.exists() or path.suffix in {".toml", ".json"}):
            return cls.preset(text, **overrides)
        if path.suffix == ".toml":
            return cls.load(path).with_(**overrides)
        return cls.parse({**huggingface_shape(path), **overrides}, text)

    @rule("hidden", "heads", "head_dim")
    def _heads_divide_hidden(self) -> Iterator[Problem]:
        """``heads`` divides ``hidden``, unless ``head_dim`` is set."""
        if self.hidden % self.heads and self.head_dim == max(1, self.hidden // self.heads):
            yield Problem("heads", f"= {self.heads} should divide hidden = {self.hidden}, or set head_dim")

    @rule("heads", "kv_heads")
    def _kv_heads_divide_heads(self) -> Iterator[Problem]:
        """``kv_heads`` divides ``heads``."""
        if self.heads % self.kv_heads:
            yield Problem("kv_heads", f"= {self.kv_heads} should divide heads = {self.heads}")

    @rule("kind", "experts", "active_experts")
    def _experts_suffice(self) -> Iterator[Problem]:
        """``experts`` needs ``kind = "llama"`` and is at least 2; ``active_experts`` is at most ``experts``."""
        if self.experts is None:
            if self.active_experts > 1:
                yield Problem("active_experts", f"= {self.active_experts} needs experts, the number to choose from")
            return
        if self.kind != "llama":
            yield Problem("experts", f'= {self.experts} with kind = "{self.kind}": only kind = "llama" has experts')
        if self.experts < 2:
            yield Problem("experts", f"= {self.experts}: a mixture needs at least 2; leave it unset for a dense model")
        elif self.active_experts > self.experts:
            yield Problem(
                "active_experts",
                f"= {self.active_experts} is more than experts = {self.experts}: a token visits each at most once",
            )

    @rule("layers", "experts", "shared_ffn", "dense_layers")
    def _blocks_have_experts(self) -> Iterator[Problem]:
        """``shared_ffn`` and ``dense_layers`` need ``experts``; ``dense_layers`` is less than ``layers``."""
        for key in ("shared_ffn", "dense_layers"):
            if self.experts is None and getattr(self, key):
                yield Problem(key, f"= {getattr(self, key)} needs experts; leave it unset for a dense model")
        if self.experts is not None and self.dense_layers >= self.layers:
            yield Problem(
                "dense_layers",
                f"= {self.dense_layers} leaves no block of layers = {self.layers} with experts; use fewer",
            )

    @rule("kind", "hidden", "heads", "head_dim", "latent", "biases")
    def _latent_is_of_llama(self) -> Iterator[Problem]:
        """``latent`` and ``biases`` need ``kind = "llama"``; ``latent.rotary`` is at most ``head_dim``."""
        for key in ("latent", "biases"):
            if getattr(self, key) and self.kind != "llama":
                yield Problem(key, f'is for kind = "llama" only; kind = "{self.kind}"')
        if self.latent is not None and self.latent.rotary >= self.head_dim:
            yield Problem("latent.rotary", f"= {self.latent.rotary} should be less than head_dim = {self.head_dim}")


# -- matrices and vectors by shape -------------------------------------------------------------------------------------


def attention(model: ModelSpec) -> Matrices:
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


def attention_width(model: ModelSpec) -> int:
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


def attention_vectors(model: ModelSpec) -> int:
    """Elements of a block's norms, and of the biases of its attention."""
    norms = 2 * model.hidden * (2 if model.kind == "gpt" else 1)
    biases = model.kind == "gpt" or model.biases
    rows = sum(rows for rows, _ in attention(model).values()) if biases else 0
    return norms + rows + sum(width for _, width in latent_norms(model).values())


def latent_norms(model: ModelSpec) -> dict[str, tuple[str, int]]:
    """Name and width of the norms of compressed vectors, by the matrix that makes the vector."""
    latent = model.latent
    if latent is None:
        return {}
    norms = {"self_attn.kv_a_proj_with_mqa": ("self_attn.kv_a_layernorm", latent.kv_rank)}
    if latent.query_rank is not None:
        norms["self_attn.q_a_proj"] = ("self_attn.q_a_layernorm", latent.query_rank)
    return norms


def feed_forward_vectors(model: ModelSpec, *, experts: bool) -> int:
    """Elements of the biases of a block's feed-forward, or of its router."""
    if experts:
        return (model.experts or 0) if model.biases else 0
    return model.ffn + model.hidden if model.kind == "gpt" else 0


def expert_layers(model: ModelSpec) -> int:
    """Number of blocks with experts."""
    return 0 if model.experts is None else model.layers - model.dense_layers


def expert_parameters(model: ModelSpec) -> int:
    """Parameters of all experts of one block, without the router and the expert that every token visits."""
    return (model.experts or 0) * _expert(model)


def block_matrices(model: ModelSpec, *, experts: bool) -> Matrices:
    """The matrices of a block outside of its routed experts, by name; with experts, a router and what every token
    visits take the place of the feed-forward."""
    made = attention(model)
    if not experts:
        return made | feed_forward(model.kind, model.hidden, model.ffn)
    assert model.experts is not None
    made["mlp.gate"] = (model.experts, model.hidden)
    return made | feed_forward(model.kind, model.hidden, model.shared_ffn, "mlp.shared_expert")


def block_parameters(model: ModelSpec, routed: int) -> int:
    """Parameters of all blocks, of whose experts ``routed`` count."""
    total = 0
    for count, experts in _kinds(model):
        vectors = attention_vectors(model) + feed_forward_vectors(model, experts=experts)
        of_experts = routed * _expert(model) if experts else 0
        total += count * (numel(block_matrices(model, experts=experts)) + vectors + of_experts)
    return total


def active_matrices(model: ModelSpec) -> int:
    """Elements of all matrices of all blocks with which one token is multiplied."""
    routed = model.active_experts * numel(feed_forward(model.kind, model.hidden, model.expert_ffn))
    return sum(
        count * (numel(block_matrices(model, experts=experts)) + (routed if experts else 0))
        for count, experts in _kinds(model)
    )


def _kinds(model: ModelSpec) -> list[tuple[int, bool]]:
    """Numbers of blocks without and with experts."""
    with_experts = expert_layers(model)
    kinds = [(model.layers - with_experts, False), (with_experts, True)]
    return [(count, experts) for count, experts in kinds if count]


def _expert(model: ModelSpec) -> int:
    matrices = feed_forward(model.kind, model.hidden, model.expert_ffn)
    return numel(matrices) + (sum(rows for rows, _ in matrices.values()) if model.biases else 0)


def numel(matrices: Matrices) -> int:
    return sum(rows * columns for rows, columns in matrices.values())


def _outside_blocks(model: ModelSpec) -> int:
    """Parameters of embedding, head and final norm."""
    return model.embedding_parameters + model.head_parameters + model.hidden * (2 if model.kind == "gpt" else 1)


def _llama(layers: int, hidden: int, heads: int, ffn: int, vocab: int = 32000, **rest: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab, **rest}


def _gpt(layers: int, hidden: int, heads: int, vocab: int, **rest: Any) -> dict[str, Any]:
    return {"kind": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, **rest}


_PRESETS: dict[str, dict[str, Any]] = {
    "llama-7b": _llama(32, 4096, 32, 11008, seq=2048),
    "llama-13b": _llama(40, 5120, 40, 13824, seq=2048),
    "llama-30b": _llama(60, 6656, 52, 17920, seq=2048),
    "llama-65b": _llama(80, 8192, 64, 22016, seq=2048),
    # AMSP's "30B" is narrower than LLaMA's 6656/52: its Table V implies 1.8e11 FLOP per token.
    "llama-30b-amsp": _llama(60, 6144, 48, 16384),
    "llama-2-7b": _llama(32, 4096, 32, 11008),
    "llama-2-13b": _llama(40, 5120, 40, 13824),
    "llama-2-70b": _llama(80, 8192, 64, 28672, kv_heads=8),
    "llama-3-8b": _llama(32, 4096, 32, 14336, 128256, kv_heads=8, seq=8192),
    "llama-3-70b": _llama(80, 8192, 64, 28672, 128256, kv_heads=8, seq=8192),
    "llama-3-405b": _llama(126, 16384, 128, 53248, 128256, kv_heads=8, seq=8192),
    "mixtral-8x7b": _llama(32, 4096, 32, 14336, kv_heads=8, experts=8, active_experts=2, seq=4096),
    "internlm-7b": _llama(32, 4096, 32, 11008, 103168, seq=2048),
    "gpt-18b": _gpt(40, 6144, 32, 50257, seq=2048),
    "gpt-neox-20b": _gpt(44, 6144, 64, 50432, seq=2048),
    # ZeRO++ publishes only the sizes of these. The shapes are our choice: common widths that yield the size.
    "gpt-49b": _gpt(60, 8192, 64, 50257, seq=2048),
    "gpt-91b": _gpt(50, 12288, 96, 50257, seq=2048),
    "gpt-138b": _gpt(76, 12288, 96, 50257, seq=2048),
    # The largest of Megatron-LM's weak scaling (Narayanan et al. 2021, table 1).
    "gpt-1t": _gpt(128, 25600, 160, 51200, seq=2048),
    # The shapes of the EFA models are our choice, too; vocabulary and sequence are published (DeepSpeed PR 1453).
    "roberta-10b": _gpt(48, 4096, 32, 53000, seq=512, tied_embedding=True),
    "roberta-50b": _gpt(64, 8192, 64, 53000, seq=512, tied_embedding=True),
}
