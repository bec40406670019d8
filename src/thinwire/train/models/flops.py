"""Counts floating-point operations per token from the model's actual matrices.

The count follows AMSP and Megatron-LM (2021). Forward and backward together take three times the forward. A matrix of n
elements takes 2 n operations per token. Attention over T tokens takes 4 T times its width per block and is not halved
for causality. Recomputation does not count, and an embedding look-up is free.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from thinwire.train.models.common import STACKED

_WITHOUT_SCORES: Final = ("conv", "linear_attention", "mamba", "moe", "recurrent")
"""Types of layers in the configurations of ``transformers`` in which no token is compared with every other."""


def matrix_elements(model: nn.Module) -> float:
    """Number of elements in all matrices that one token is multiplied with.

    Linear layers count in full, including a head that shares the embedding's weight. Stacked experts count by the share
    that a token visits.
    """
    linear = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            weight: Any = module.weight
            linear += weight.numel()
    own: Any = getattr(model, "config", None)
    if getattr(own, "experts", None):
        stacked = sum(p.numel() for p in model.parameters() if p.ndim == STACKED)
        return linear + stacked * float(own.active_experts) / int(own.experts)
    config: Any = getattr(getattr(model, "model", None), "config", None)
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    if num_experts and chosen:
        stacked = sum(p.numel() for p in model.parameters() if p.ndim == 3 and p.shape[0] == num_experts)
        routers = sum(
            p.numel()
            for name, p in model.named_parameters()
            if p.ndim == 2
            and p.shape[0] == num_experts
            and name.endswith(("gate.weight", "router.weight"))
            and not isinstance(model.get_submodule(name.rsplit(".", 1)[0]), nn.Linear)
        )
        linear += stacked * chosen / num_experts + routers
    return linear


def attention_width(model: nn.Module) -> int:
    """Width of attention (heads times channels per head, the mean of queries and values), summed over all blocks that
    compute with the square of the sequence."""
    config: Any = getattr(model, "config", None)
    if config is not None:
        return int(config.layers * config.hidden)
    config = model.model.config  # type: ignore[union-attr]
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        return 0  # a model without attention, such as Mamba; its blocks compute little apart from matrix products
    channels = getattr(text, "head_dim", None) or text.hidden_size // heads
    if nope := getattr(text, "qk_nope_head_dim", None):  # latent attention, whose head_dim is of another part
        channels = (nope + text.qk_rope_head_dim + text.v_head_dim) / 2
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return int(sum(kind not in _WITHOUT_SCORES for kind in kinds) * heads * channels)


def flops_per_token(model: nn.Module, seq: int) -> float:
    """FLOP per token of ``seq`` in forward and backward, of a model that is not sharded yet."""
    return 3 * (2 * matrix_elements(model) + 4 * seq * attention_width(model))
