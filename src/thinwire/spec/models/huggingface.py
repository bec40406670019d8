"""Reads a model's shape from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from thinwire.errors import SpecError

# Names that configurations use for each of our keys, the most common name first.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
_OPTIONAL = {
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "head_dim": ("head_dim",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx"),
    "tied_embedding": ("tie_word_embeddings",),
}
_TWO_MATRICES = ("gpt2", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "phi", "roberta", "bert")
"""Families whose feed-forward is two matrices with biases; all others have SwiGLU's three."""

_TIED_BY_DEFAULT = ("gpt2", "gpt_bigcode", "opt", "bloom", "roberta", "bert", "gemma", "gemma2")

_COMPUTED_WITH = (
    "first_k_dense_replace", "intermediate_size", "moe_intermediate_size", "n_shared_experts", "qk_nope_head_dim",
    "qk_rope_head_dim", "shared_expert_intermediate_size",
)  # fmt: skip
"""Keys whose values enter a calculation; ``ModelSpec`` checks all others."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts."""

EXPERT_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""``model_type`` of the mixtures of experts whose shape is known."""

FLOAT: Final = "__float__"
"""Key of the objects by which ``transformers`` writes numbers that JSON lacks."""

_UNUSED: Final = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "torch_dtype", "transformers_version",
    "use_cache",
)  # fmt: skip
"""Keys of a configuration with which training computes nothing."""


def tagged(value: Any) -> Any:
    """A configuration without infinities and NaN, which JSON lacks: ``transformers`` writes objects of one key."""
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: tagged(item) for key, item in value.items()}
    return [tagged(item) for item in value] if isinstance(value, list | tuple) else value


def computed_with(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """What a model computes with, by key of its configuration.

    Raises:
        SpecError: The file cannot be read.
    """
    if not isinstance(source, Mapping):
        file = Path(source).expanduser()
        source = _read(file / "config.json" if file.is_dir() else file)
    return {key: value for key, value in tagged(source).items() if key not in _UNUSED}


def huggingface_shape(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a ``ModelSpec``.

    Args:
        source: A ``config.json``, the directory that holds one, or the configuration itself.

    Raises:
        SpecError: The file cannot be read, lacks a size, or describes an architecture that ``ModelSpec`` cannot
            (mixtures of experts of another family than :data:`EXPERT_FAMILIES`).
    """
    if isinstance(source, Mapping):
        config, what, name = source, "model.config", "model"
    else:
        file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        config, what, name = _read(file), str(file), _name(file.resolve())
    nested = config.get("text_config")  # a vision-language model nests its language model
    config = nested if isinstance(nested, Mapping) else config
    problems = [
        f"{key} = {config[key]!r} should be a whole number"
        for key in _COMPUTED_WITH
        if not isinstance(config.get(key), int | None)
    ]
    problems += [
        f"has none of the keys {', '.join(names)}, from which {key} is read"
        for key, names in _KEYS.items()
        if _first(config, names) is None
    ]
    problems += _expert_problems(config)
    if problems:
        raise SpecError(what, problems)
    family = str(config.get("model_type", "llama"))
    shape = {key: _first(config, names) for key, names in (_KEYS | _OPTIONAL).items()}
    shape |= _expert_shape(config)
    if shape["tied_embedding"] is None:
        shape["tied_embedding"] = family in _TIED_BY_DEFAULT
    shape["kind"] = "gpt" if family in _TWO_MATRICES else "llama"
    shape["name"] = str(config.get("_name_or_path") or name)
    return {key: value for key, value in shape.items() if value is not None}


def _name(file: Path) -> str:
    """The name of a model: of its directory, or of a file that is not named as all are."""
    return file.parent.name if file.name == "config.json" else file.stem


def _read(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(str(file), f"cannot be read as a Hugging Face configuration: {error}") from error
    if not isinstance(config, dict):
        raise SpecError(str(file), "should be a JSON object, as Hugging Face's config.json is")
    return config


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _expert_problems(config: Mapping[str, Any]) -> list[str]:
    """Why a mixture of experts cannot be described; empty for dense models and for those of :data:`EXPERT_FAMILIES`."""
    name = _number_of_experts(config)
    if name is None:
        return []
    family = str(config.get("model_type"))
    if family not in EXPERT_FAMILIES:
        known = ", ".join(EXPERT_FAMILIES)
        return [
            f"{name} = {config[name]} with model_type = {family!r}: mixtures of experts of {known} are known; describe "
            "the shape in a TOML file with the keys experts, active_experts and expert_ffn"
        ]
    problems = [
        f"{key} = {value}: blocks with experts should follow one another after the dense ones, so it should be 1"
        for key in ("decoder_sparse_step", "moe_layer_freq")
        if (value := config.get(key, 1)) != 1
    ]
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        problems.append(f"mlp_only_layers = {dense}: only the first blocks may be dense")
    if config.get("num_experts_per_tok", config.get("experts_per_token")) is None:
        problems.append(
            "has none of the keys num_experts_per_tok, experts_per_token, from which active_experts is read"
        )
    if _expert_width(config) is None:
        problems.append("has no moe_intermediate_size, or intermediate_size without it, from which expert_ffn is read")
    return problems


def _expert_shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ``ModelSpec`` that describe experts and latent attention; empty for other models."""
    family, shape = str(config.get("model_type")), dict[str, Any]()
    if family in ("deepseek_v2", "deepseek_v3"):
        shape |= _latent(config)
    name = _number_of_experts(config)
    if name is None:
        return shape
    width = _expert_width(config)
    shape |= {
        "experts": config[name],
        "active_experts": config.get("num_experts_per_tok", config.get("experts_per_token")),
        "expert_ffn": width,
        "shared_ffn": config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width,
        "dense_layers": config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ()),
        "biases": family == "gpt_oss",
    }
    return shape


def _expert_width(config: Mapping[str, Any]) -> Any:
    """``null`` is no width: it does not stand for that of the dense blocks."""
    return config.get("moe_intermediate_size", config.get("intermediate_size"))


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
