"""Reads a model's shape from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from thinwire.errors import SpecError
from thinwire.spec.models.families import EXPERT_FAMILIES, FAMILIES, FOUR_TIMES_HIDDEN, TWO_MATRICES

# Names that configurations use for each of our keys, the most common name first.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
_OPTIONAL = {
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "head_dim": ("head_dim",),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx"),
    "tied_embedding": ("tie_word_embeddings",),
}
_COMPUTED_WITH = (
    "first_k_dense_replace", "intermediate_size", "moe_intermediate_size", "n_shared_experts", "qk_nope_head_dim",
    "qk_rope_head_dim", "shared_expert_intermediate_size",
)  # fmt: skip
"""Keys whose values enter a calculation; ``ModelSpec`` checks all others."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts."""

FLOAT: Final = "__float__"
"""Key of the objects by which ``transformers`` writes numbers that JSON lacks."""

_TIE: Final = "tie_word_embeddings"

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


def read_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without infinities and NaN (:func:`tagged`).

    Args:
        source: A ``config.json``, the directory that holds one, or the configuration itself.

    Raises:
        SpecError: The file cannot be read.
    """
    config: dict[str, Any] = tagged(source if isinstance(source, Mapping) else _read(_file(source)))
    return config


def computed_with(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """What a model computes with, by key of its configuration; see :func:`read_config`."""
    return {key: value for key, value in read_config(source).items() if key not in _UNUSED}


def huggingface_shape(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a ``ModelSpec`` from a source of :func:`read_config`.

    Raises:
        SpecError: The file cannot be read, lacks a size, or describes an architecture that ``ModelSpec`` cannot
            (another family than those of :data:`~thinwire.spec.models.families.FAMILIES`).
    """
    if isinstance(source, Mapping):
        config, what, name = source, "model.config", "model"
    else:
        file = _file(source)
        config, what, name = _read(file), str(file), _name(file.resolve())
    name = str(config.get("_name_or_path") or name)
    texts_alone = not any(key in config for key in ("text_config", "vision_config", "audio_config"))
    config = _language_model(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise SpecError(
            what,
            f"model_type = {family!r} is no family whose shape the planner knows; known are "
            f"{', '.join(sorted(FAMILIES))}: describe the shape in a TOML file for `--model` of `thinwire plan`, or "
            "train under a preset plan",
        )
    config = {**FAMILIES[family], **config}
    problems = [
        f"{key} = {config[key]!r} should be a whole number"
        for key in _COMPUTED_WITH
        if not isinstance(config.get(key), int | None)
    ]
    needed = _KEYS if family in FOUR_TIMES_HIDDEN + EXPERT_FAMILIES else _KEYS | {"ffn": _OPTIONAL["ffn"]}
    problems += [
        f"has none of the keys {', '.join(names)}, from which {key} is read"
        for key, names in needed.items()
        if _first(config, names) is None
    ]
    problems += _expert_problems(config)
    if problems:
        raise SpecError(what, problems)
    shape = {key: _first(config, names) for key, names in (_KEYS | _OPTIONAL).items()}
    embedded = config.get("word_embed_proj_dim") or shape["hidden"]
    if embedded != shape["hidden"]:
        raise SpecError(
            what,
            f"word_embed_proj_dim = {embedded!r} is not hidden_size = {shape['hidden']}: embeddings of another width "
            "than the model's are not known; describe a model of nearly this shape in a TOML file",
        )
    shape |= _expert_shape(config)
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # Falcon and StarCoder
        shape["kv_heads"] = 1
    shape["kind"] = "gpt" if family in TWO_MATRICES else "llama"
    shape["name"] = name if texts_alone else f"{name} (text)"
    return {key: value for key, value in shape.items() if value is not None}


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model, which a model of images or sound nests."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    ties = [part[_TIE] for part in (config, nested) if _TIE in part]
    return {**nested, **({_TIE: any(ties)} if ties else {})}  # either ties the embedding, as in transformers


def _name(file: Path) -> str:
    """The name of a model: of its directory, or of a file that is not named as all are."""
    return file.parent.name if file.name == "config.json" else file.stem


def _file(source: str | Path) -> Path:
    place = Path(source).expanduser()
    return place / "config.json" if place.is_dir() else place


def _read(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        raise SpecError(
            str(file),
            "there is no such file; give a config.json, or a directory written by save_pretrained (nothing is "
            "downloaded)",
        )
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
    name, family = _number_of_experts(config), str(config.get("model_type"))
    if name is None:
        stated = family not in EXPERT_FAMILIES or any(key in config for key in _EXPERTS)
        return [] if stated else [f"has none of the keys {', '.join(_EXPERTS)}, from which experts is read"]
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
