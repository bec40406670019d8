"""Reads experts and latent attention from a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FAMILIES", "expert_problems", "expert_shape"]

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts."""

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""``model_type`` of the mixtures of experts whose shape is known."""


def expert_problems(config: Mapping[str, Any]) -> list[str]:
    """Why a mixture of experts cannot be described; empty for dense models and for those of :data:`FAMILIES`.

    Args:
        config: Content of a ``config.json``.
    """
    name = _number_of_experts(config)
    if name is None:
        return []
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        return [
            f"{name} = {config[name]} with model_type = {family!r}: mixtures of experts of {', '.join(FAMILIES)} are "
            "known; describe the shape in a TOML file with the keys experts, active_experts and expert_ffn"
        ]
    problems = [
        f"{key} = {value}: blocks with experts should follow one another after the dense ones, so it should be 1"
        for key in ("decoder_sparse_step", "moe_layer_freq")
        if (value := config.get(key, 1)) != 1
    ]
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        problems.append(f"mlp_only_layers = {dense}: only the first blocks may be dense")
    if config.get("num_experts_per_tok", config.get("experts_per_token")) is None:
        problems.append(
            "has none of the keys num_experts_per_tok, experts_per_token, from which active_experts is read"
        )
    return problems


def expert_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelSpec`` that describe experts and latent attention; empty for other models.

    Args:
        config: Content of a ``config.json`` without :func:`expert_problems`.
    """
    family, shape = str(config.get("model_type")), dict[str, Any]()
    if family in ("deepseek_v2", "deepseek_v3"):
        shape |= _latent(config)
    name = _number_of_experts(config)
    if name is None:
        return shape
    width = config["moe_intermediate_size"] if "moe_intermediate_size" in config else config.get("intermediate_size", 0)
    shape |= {
        "experts": config[name],
        "active_experts": config.get("num_experts_per_tok", config.get("experts_per_token")),
        "expert_ffn": width,
        "shared_ffn": config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width,
        "dense_layers": config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ()),
        "biases": family == "gpt_oss",
    }
    return shape


def _latent(config: Mapping[str, Any]) -> dict[str, Any]:
    latent = {
        "query_rank": config.get("q_lora_rank"),
        "kv_rank": config.get("kv_lora_rank"),
        "rotary": config.get("qk_rope_head_dim"),
        "value_dim": config.get("v_head_dim"),
    }
    head_dim = (config.get("qk_nope_head_dim") or 0) + (config.get("qk_rope_head_dim") or 0)
    return {"latent": {key: value for key, value in latent.items() if value is not None}, "head_dim": head_dim}


def _number_of_experts(config: Mapping[str, Any]) -> str | None:
    """The key with the number of experts, if there are several."""
    return next((name for name in _EXPERTS if isinstance(config.get(name), int) and config[name] > 1), None)
