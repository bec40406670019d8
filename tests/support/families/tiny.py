"""Tiny random models of Hugging Face's families, for tests."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY, LENGTH = 97, 32

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
}
_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_LLAMA, "head_dim": 8, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **_LLAMA},
    "qwen3": {"model_type": "qwen3", **_LLAMA, "head_dim": 16, "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": LENGTH,
        **_QUIET,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    },
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Configurations; no token ids beyond the vocabulary."""

for _table in FAMILIES.values():
    _table |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def random_model(family: str, seed: int = 0) -> Any:
    """A ``transformers`` model as it makes it itself, with every parameter random: biases and norms, too."""
    import transformers

    table = dict(FAMILIES[family])
    config = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
    torch.default_generator.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.eval()


def token_ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))
