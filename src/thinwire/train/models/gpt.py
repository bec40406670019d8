"""GPT in the style of NeoX: LayerNorm, GELU, rotary or learned positions, parallel or sequential residuals.

Parameter names and layouts are those of Hugging Face's ``GPTNeoXForCausalLM`` without its ``gpt_neox.``
prefix.
Shapes: B sequences, T tokens, D hidden, H heads, C channels per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.train.models.common import RotaryTable, rotate
from thinwire.train.models.decoder import Decoder, DecoderConfig, Half, ModuleNames


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """Shape of a GPT.

    Attributes:
        positions: rotary, or a learned vector per position.
        rotary_share: share of each head's channels that is rotated.
        parallel_residual: whether attention and feed-forward both read the block's input (NeoX) or in turn
            (GPT-2).
    """

    positions: Literal["rotary", "learned"] = "rotary"
    rotary_share: float = 0.25
    parallel_residual: bool = True

    @property
    def rotary_channels(self) -> int:
        """Rotated channels per head, even; 0 with learned positions."""
        return int(self.hidden // self.heads * self.rotary_share) // 2 * 2 if self.positions == "rotary" else 0


class GPTAttention(nn.Module):
    """Causal multi-head attention with one matrix for queries, keys and values, interleaved by head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.channels = config.hidden // config.heads
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden)
        self.dense = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Attend: ``(B, T, D)`` to ``(B, T, D)``."""
        joint = self.query_key_value(x).unflatten(-1, (-1, 3 * self.channels)).transpose(1, 2)
        queries, keys, values = joint.chunk(3, dim=-1)
        if cos is not None and sin is not None:
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.dense(mixed.transpose(1, 2).flatten(-2))
        return output


class GPTMLP(nn.Module):
    """GELU feed-forward network."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden, config.ffn)
        self.dense_4h_to_h = nn.Linear(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Transform: ``(B, T, D)`` to ``(B, T, D)``."""
        output: Tensor = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))
        return output


class GPTBlock(nn.Module):
    """One transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = GPTAttention(config)
        self.mlp = GPTMLP(config)

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Transform: ``(B, T, D)`` to ``(B, T, D)``."""
        attended = x + self.attention(self.input_layernorm(x), cos, sin)
        source = x if self.parallel_residual else attended
        output: Tensor = attended + self.mlp(self.post_attention_layernorm(source))
        return output


class GPT(Decoder):
    """A GPT with its language-model head."""

    module_names = ModuleNames(
        embedding="embed_in",
        norm="final_layer_norm",
        head="lm_head",
        block_norms=("input_layernorm", "post_attention_layernorm"),
        halves={
            "attention": Half(columns=("query_key_value",), rows="dense", inputs=3),
            "mlp": Half(columns=("dense_h_to_4h",), rows="dense_4h_to_h", inputs=1),
        },
        positions="embed_positions",
    )

    config: GPTConfig
    embed_in: nn.Embedding | None
    embed_positions: nn.Embedding | None
    final_layer_norm: nn.LayerNorm | None
    lm_head: nn.Linear | None

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_in = nn.Embedding(config.vocab, config.hidden)
        self.embed_positions = nn.Embedding(config.seq, config.hidden) if config.positions == "learned" else None
        self.layers = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        channels = config.rotary_channels
        self.rotary = RotaryTable(channels, config.seq, config.rope_theta) if channels else None
        self.init_weights(seed)
        self.tie()

    def embedded(self, embedding: nn.Module, input_ids: Tensor) -> Tensor:
        """What the first block gets of tokens: ``(B, T)`` to ``(B, T, D)``."""
        vectors = super().embedded(embedding, input_ids)
        if self.embed_positions is not None:
            vectors = vectors + self.embed_positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        return vectors

    @property
    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """What tensor-parallel ranks must divide."""
        config = self.config
        sizes = {"heads": config.heads, "ffn": config.ffn, "vocab": config.vocab}
        return sizes | ({"seq": config.seq} if self.embed_positions is not None else {})
