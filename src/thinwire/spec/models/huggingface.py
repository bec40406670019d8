"""Reads a model's shape from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import SpecError
from thinwire.spec.models.huggingface_experts import expert_problems, expert_shape

__all__ = ["huggingface_shape"]

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


def huggingface_shape(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a ``ModelSpec``.

    Args:
        source: A ``config.json``, the directory that holds one, or the configuration itself.

    Raises:
        SpecError: The file cannot be read, lacks a size, or describes an architecture that ``ModelSpec`` cannot
            (mixtures of experts of another family than those in ``thinwire.spec.models.huggingface_experts``).
    """
    if isinstance(source, Mapping):
        config, what, name = source, "model.config", "model"
    else:
        file = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
        config, what, name = _read(file), str(file), _name(file.resolve())
    config = config.get("text_config", config)  # a vision-language model nests its language model
    problems = [
        f"has none of the keys {', '.join(names)}, from which {key} is read"
        for key, names in _KEYS.items()
        if _first(config, names) is None
    ]
    problems += expert_problems(config)
    if problems:
        raise SpecError(what, problems)
    family = str(config.get("model_type", "llama"))
    shape = {key: _first(config, names) for key, names in (_KEYS | _OPTIONAL).items()}
    shape |= expert_shape(config)
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
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecError(str(file), [f"cannot be read as a Hugging Face configuration: {error}"]) from error
    if not isinstance(config, dict):
        raise SpecError(str(file), ["should be a JSON object, as Hugging Face's config.json is"])
    return config


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)
