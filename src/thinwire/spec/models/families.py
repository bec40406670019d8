"""Which families of Hugging Face models have shapes that ``ModelSpec`` describes, by their ``model_type``."""

from __future__ import annotations

from typing import Any, Final

TWO_MATRICES: Final = (
    "apertus", "arcee", "bert", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "jais2",
    "nanochat", "nemotron", "opt", "persimmon", "phi", "roberta", "starcoder2",
)  # fmt: skip
"""Families whose feed-forward is two matrices; all others have SwiGLU's three."""

FOUR_TIMES_HIDDEN: Final = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gptj")
"""Families whose feed-forward is four times as wide as the model unless a configuration says otherwise."""

EXPERT_FAMILIES: Final = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
"""The mixtures of experts whose shape is known."""

_PLAIN: Final[dict[str, Any]] = {}
_TIED: Final = {"tie_word_embeddings": True}


def _widths(kv_heads: int, head_dim: int | None = None) -> dict[str, Any]:
    return {"num_key_value_heads": kv_heads, **({} if head_dim is None else {"head_dim": head_dim})}


FAMILIES: Final[dict[str, dict[str, Any]]] = {
    **dict.fromkeys(
        (
            "apertus", "arcee", "baichuan", "codegen", "diffllama", "gpt_neox", "gptj", "granite",
            "hunyuan_v1_dense", "hyperclovax", "internlm", "internlm2", "jais2", "llama", "nanochat", "nemotron",
            "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(("bert", "bloom", "cohere", "cohere2", "exaone", "gpt2", "opt", "roberta"), _TIED),
    "falcon": _TIED | {"multi_query": True},
    "gpt_bigcode": _TIED | {"multi_query": True},
    "bitnet": _widths(5),
    "cwm": _widths(8, 128),
    "ernie4_5": _TIED | _widths(2, 128),
    "exaone4": _widths(32),
    "gemma": _TIED | _widths(16, 256),
    **dict.fromkeys(("gemma2", "vaultgemma"), _TIED | _widths(4, 256)),
    # The published configurations of those with images leave out more than others do.
    "gemma3_text": _TIED | _widths(4, 256) | {"num_attention_heads": 8, "vocab_size": 262_208},
    **dict.fromkeys(("glm", "glm4"), _widths(2, 128)),
    "glm4v_text": _widths(2),
    "granite_swa": _TIED | _widths(4),
    "helium": _widths(20, 128),
    "internlm3": _widths(2, 128),
    "iquestcoder": _widths(8, 128),
    **dict.fromkeys(
        (
            "ministral", "mistral", "mllama_text_model", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text",
        ),
        _widths(8),
    ),
    "ministral3": _widths(8, 128),
    **dict.fromkeys(("qwen2", "stablelm"), _widths(32)),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _widths(32, 128)),
    "seed_oss": _widths(8, 128),
    "smollm3": _TIED | _widths(4),
    "starcoder2": _TIED | _widths(2),
    "deepseek_v2": {"n_shared_experts": 2},
    "deepseek_v3": {"first_k_dense_replace": 3, "n_shared_experts": 1},
    "gpt_oss": _widths(8, 64),
    "mixtral": _widths(8),
    "qwen2_moe": _widths(16) | {"shared_expert_intermediate_size": 5632},
    "qwen3_moe": _widths(4),
}  # fmt: skip
"""Known families, and what a configuration means that leaves keys out: transformers 4 writes no
``tie_word_embeddings = true``, and a class of transformers has its own default for others. A test counts parameters of
``transformers``' models."""
