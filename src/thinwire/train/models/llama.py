"""Llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases; with experts, a Mixtral.

Parameter names and layouts are those of Hugging Face's ``LlamaForCausalLM`` and ``MixtralForCausalLM`` without their
``model.`` prefix, so weights move between the two by renaming. Shapes: B sequences, T tokens, D hidden, H heads, K
key-value heads, C channels per head; N tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.parallel.context import Context
from thinwire.train.models.common import RotaryTable, rotate
from thinwire.train.models.decoder import Decoder, DecoderConfig, Half, ModuleNames


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Shape of a Llama.

    Attributes:
        kv_heads: K; divides `heads`.
        experts: E, experts of a block; ``None`` for a dense model.
        active_experts: experts that each token visits.
        expert_ffn: width of an expert; default: ``ffn``.
    """

    kv_heads: int
    experts: int | None = None
    active_experts: int = 1
    expert_ffn: int | None = None


class LlamaAttention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.channels = config.hidden // config.heads
        self.grouped = config.kv_heads != config.heads
        self.q_proj = nn.Linear(config.hidden, config.heads * self.channels, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.channels, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.channels, bias=False)
        self.o_proj = nn.Linear(config.heads * self.channels, config.hidden, bias=False)
        self.context: Context | None = None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend: ``(B, T, D)`` to ``(B, T, D)``."""
        queries, keys, values = (
            projection(x).unflatten(-1, (-1, self.channels)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys, mask = rotate(queries, cos, sin), rotate(keys, cos, sin), None
        if self.context is not None:
            keys, values = self.context.gather(keys), self.context.gather(values)
            mask = self.context.mask(x.shape[1], x.device)
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=self.grouped
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return output


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform: ``(B, T, D)`` to ``(B, T, D)``."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class LlamaExperts(nn.Module):
    """The SwiGLU networks of a block's experts, stacked: all of them, or with expert parallelism this rank's part."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.experts is not None
        width = config.expert_ffn or config.ffn
        self.num_experts = config.experts
        self.gate_up_proj = nn.Parameter(torch.zeros(config.experts, 2 * width, config.hidden))
        self.down_proj = nn.Parameter(torch.zeros(config.experts, config.hidden, width))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Weighted sums of what its experts make of each token: ``(N, D)`` to ``(N, D)``; the numbers of a token's
        experts, int64, and their weights are ``(N, K)``."""
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        tokens = order // chosen.shape[1]
        counts = torch.bincount(experts, minlength=self.num_experts).tolist()
        # Split, because the gradient of a single expert taken out of the stack would have the size of the stack; and
        # unsafely, because gathering parameters anew writes to the memory of views that autograd guards.
        matrices = zip(self.gate_up_proj.unsafe_split(1), self.down_proj.unsafe_split(1), strict=True)
        made = []
        for rows, (gate_up, down) in zip(x[tokens].split(counts), matrices, strict=True):
            gate, up = F.linear(rows, gate_up[0]).chunk(2, dim=-1)
            made.append(F.linear(F.silu(gate) * up, down[0]))
        weighted = torch.cat(made) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens, weighted.to(x.dtype))


class LlamaMixture(nn.Module):
    """Experts, of which a router chooses a few for each token, as in Mixtral (arXiv 2401.04088, section 2.1)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.active = config.active_experts
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = LlamaExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Transform: ``(B, T, D)`` to ``(B, T, D)``."""
        tokens = x.flatten(0, -2)
        chances = self.gate(tokens).float().softmax(dim=-1)
        weights, chosen = chances.topk(self.active, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        output: Tensor = self.experts(tokens, chosen, weights.to(x.dtype))
        return output.view_as(x)


class LlamaBlock(nn.Module):
    """One transformer block, normalised before each half."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = LlamaMLP(config) if config.experts is None else LlamaMixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Transform: ``(B, T, D)`` to ``(B, T, D)``."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Llama(Decoder):
    """A Llama with its language-model head."""

    module_names = ModuleNames(
        embedding="embed_tokens",
        norm="norm",
        head="lm_head",
        block_norms=("input_layernorm", "post_attention_layernorm"),
        halves={
            "self_attn": Half(columns=("q_proj", "k_proj", "v_proj"), rows="o_proj", inputs=3),
            "mlp": Half(columns=("gate_proj", "up_proj"), rows="down_proj", inputs=1),
        },
    )

    config: LlamaConfig
    embed_tokens: nn.Embedding | None
    norm: nn.RMSNorm | None
    lm_head: nn.Linear | None
    rotary: RotaryTable

    def __init__(self, config: LlamaConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.rotary = RotaryTable(config.hidden // config.heads, config.seq, config.rope_theta)
        self.init_weights(seed)
        self.context: Context | None = None
        self.tie()

    def share_context(self, context: Context) -> None:
        """Take a part of every sequence from now on, and gather keys and values of the others."""
        self.context = context
        for layer in self.layers:
            assert isinstance(layer, LlamaBlock)
            layer.self_attn.context = context

    def angles(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens that this rank has."""
        ways = 1 if self.context is None else self.context.ways
        cos, sin = self.rotary(length * ways, dtype)
        if self.context is None:
            return cos, sin
        own = self.context.positions(length)
        return cos[own], sin[own]

    def check_divisible(self, *, tp: int, pp: int) -> None:
        """Raise for a mixture of experts, which is not divided so."""
        if self.config.experts is not None:
            raise UsageError(
                f"tp = {tp} and pp = {pp} do not divide a Llama with experts = {self.config.experts}; use ep, with "
                "tp = 1 and pp = 1"
            )

    @property
    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """What tensor-parallel ranks must divide."""
        config = self.config
        return {"heads": config.heads, "kv_heads": config.kv_heads, "ffn": config.ffn, "vocab": config.vocab}
