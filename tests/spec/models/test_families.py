"""Families of Hugging Face models: their numbers of parameters are those of ``transformers``' own models."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.spec import ModelSpec
from thinwire.spec.models.families import EXPERT_FAMILIES, FAMILIES
from thinwire.spec.models.huggingface import huggingface_shape

REMOTE = ("baichuan", "exaone", "internlm", "internlm2")
"""Families whose code is with their weights."""

STATED = {
    "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8,
    "n_shared_experts": 2, "first_k_dense_replace": 2, "shared_expert_intermediate_size": 640, "multi_query": False,
    "new_decoder_architecture": True, "num_kv_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
"""Keys that a published configuration states."""

NEEDED = {
    "num_experts_per_tok": 2, "moe_intermediate_size": 512, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "max_position_embeddings": 128,
    "intermediate_size": 3072, "n_inner": 3072, "ffn_dim": 3072, "ffn_hidden_size": 3072,
}  # fmt: skip
"""Keys without which the planner does not know a shape."""

PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    # Model: billions of parameters, and the keys of its config.json that say so.
    "falcon-7b": (6.92, {
        "model_type": "falcon", "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024,
    }),
    "falcon-40b": (41.3, {
        "model_type": "falcon", "hidden_size": 8192, "multi_query": True, "new_decoder_architecture": True,
        "num_attention_heads": 128, "num_kv_heads": 8, "num_hidden_layers": 60, "vocab_size": 65024,
    }),
    "starcoder": (15.5, {
        "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_inner": 24576, "n_layer": 40,
        "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
    }),
    "bloom-560m": (0.559, {
        "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880,
    }),
    "gemma-3-4b-it (text)": (3.88, {
        "model_type": "gemma3", "vision_config": {}, "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        },
    }),
    "Qwen2.5-VL-3B (text)": (3.09, {
        "model_type": "qwen2_5_vl", "vision_config": {}, "hidden_size": 2048, "intermediate_size": 11008,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "vocab_size": 151936,
        "tie_word_embeddings": True,
    }),
    "internlm2-7b": (7.74, {
        "model_type": "internlm2", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 92544, "tie_word_embeddings": False,
    }),
    "Baichuan2-7B": (7.51, {
        "model_type": "baichuan", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
        "num_hidden_layers": 32, "vocab_size": 125696, "tie_word_embeddings": False,
    }),
    "EXAONE-3.5-2.4B": (2.40, {
        "model_type": "exaone", "hidden_size": 2560, "intermediate_size": 7168, "num_attention_heads": 32,
        "num_layers": 30, "num_key_value_heads": 8, "head_dim": 80, "vocab_size": 102400,
    }),
}  # fmt: skip


def parameters(config: dict[str, Any]) -> int:
    return ModelSpec.parse(huggingface_shape(config), "model").parameters


def parameters_in_transformers(transformers: Any, config: dict[str, Any]) -> int:
    """Parameters of the model without towers for images."""
    import torch

    table = dict(config)
    made = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
    names = transformers.models.auto.modeling_auto
    with torch.device("meta"):
        if config["model_type"] in names.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            model = transformers.AutoModelForImageTextToText.from_config(made)
        elif config["model_type"] in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            model = transformers.AutoModelForCausalLM.from_config(made)
        elif config["model_type"] == "mllama_text_model":
            model = transformers.MllamaForCausalLM(made)
        else:
            model = transformers.AutoModel.from_config(made)
            model.lm_head = torch.nn.Linear(made.hidden_size, made.vocab_size, bias=False)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "visual" not in name)


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in REMOTE])
def test_parameters_are_those_of_transformers(family: str, stated: bool) -> None:
    """With the keys that a published configuration states, and with its class's defaults for most of them."""
    transformers = pytest.importorskip("transformers")
    # Configurations of Qwen-VL pass what they do not know to that of their text.
    kind = transformers.AutoConfig.for_model(f"{family}_text" if family.endswith("_vl") else family)
    read = {*kind.to_dict(), *kind.attribute_map}
    read -= {"num_key_value_heads"} if "multi_query" in read else set()
    heads = 16 if stated else 2 * FAMILIES[family].get("num_key_value_heads", 8)
    sizes = {"hidden_size": 64 * heads, "num_hidden_layers": 6, "num_attention_heads": heads, "vocab_size": 32000}
    keys = {key: value for key, value in (NEEDED | (STATED if stated else {})).items() if key in read}
    config = {"model_type": family, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **sizes, **keys}
    # ModelSpec leaves out positions, and vectors such as the norms of queries.
    assert parameters(config) == pytest.approx(parameters_in_transformers(transformers, config), rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    billions, config = PUBLISHED[name]
    shape = huggingface_shape(config | {"_name_or_path": name.removesuffix(" (text)")})
    assert ModelSpec.parse(shape, "model").parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert shape["name"] == name


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "zamba2"}, "model_type = 'zamba2' is no family whose shape the planner knows"),
        ({"model_type": None}, "model_type = None is no family"),
        ({"text_config": {"model_type": "t5"}}, "model_type = 't5' is no family"),
        ({"model_type": "qwen3"}, "has none of the keys intermediate_size"),
        ({"model_type": "opt", "ffn_dim": 256, "word_embed_proj_dim": 32}, "word_embed_proj_dim = 32 is not hidden"),
        ({"model_type": "mixtral", "intermediate_size": 96}, "none of the keys num_local_experts"),
        ({"model_type": "llama", "intermediate_size": 96, "num_experts": 4}, "num_experts = 4 with model_type"),
    ],
)
def test_a_shape_that_is_not_known_is_refused(config: dict[str, Any], sentence: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    with pytest.raises(SpecError, match=sentence):
        huggingface_shape(sizes | config)


def test_mixtures_of_experts_are_known_families() -> None:
    assert set(EXPERT_FAMILIES) < set(FAMILIES)
