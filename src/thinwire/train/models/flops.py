"""How many floating-point operations a token takes, from the model's real matrices.

As AMSP and Megatron-LM (2021) count: forward and backward are three times the forward, a matrix of n elements
is 2 n operations per token, attention over T tokens is 4 T times its width per block and not halved for
causality, recomputation does not count, an embedding look-up is free.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def matrix_elements(model: nn.Module) -> float:
    """Elements of all matrices one token is multiplied with.

    Linear layers count in full (also a head that shares the embedding's weight), and of stacked experts only
    the share that a token visits.

    Args:
        model: not yet sharded.

    Returns:
        The number; a fraction only where experts do not divide evenly.
    """
    linear = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            weight: Any = module.weight
            linear += weight.numel()
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
    """Sum over blocks of the width of their attention (heads times channels per head).

    Args:
        model: one of ours or a wrapped Hugging Face model.

    Returns:
        The sum.
    """
    config: Any = getattr(model, "config", None)
    if config is not None:
        return int(config.layers * config.hidden)
    config = model.model.config  # type: ignore[union-attr]
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    if heads is None:
        return 0  # a model without attention, such as Mamba: what its blocks do besides products of matrices is small
    channels = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(text.num_hidden_layers * heads * channels)


def flops_per_token(model: nn.Module, seq: int) -> float:
    """Forward and backward operations per token.

    Args:
        model: not yet sharded.
        seq: T.

    Returns:
        FLOP per token.
    """
    return 3 * (2 * matrix_elements(model) + 4 * seq * attention_width(model))
