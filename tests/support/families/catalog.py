"""Sixty-odd architectures of Hugging Face's ``transformers``, tiny and random: a class, a configuration, a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

VOCABULARY, ROWS, LENGTH, PIXELS = 67, 2, 8, 16

Batch = dict[str, torch.Tensor]


class Architecture(NamedTuple):
    """How a model of one architecture is made and what it trains on.

    Attributes:
        model_class: name in ``transformers`` of a class whose forward returns a loss.
        sizes: fields of its configuration.
        batch: makes a batch from a generator; ranks and steps get different ones.
    """

    model_class: str
    sizes: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]


# -- batches -------------------------------------------------------------------------------------------------------


def _ids(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (ROWS, length), generator=generator)  # the first few are special tokens


def text(generator: torch.Generator) -> Batch:
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": _ids(generator), "labels": _ids(generator, 5)}


def images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (ROWS,), generator=generator)}


def masked_images(generator: torch.Generator) -> Batch:
    # ViT-MAE draws its own mask: noise decides it here.
    pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": pixels, "noise": torch.rand(ROWS, 16, generator=generator)}


def large_images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 64, 64, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 2, (ROWS,), generator=generator)}


def waves(generator: torch.Generator) -> Batch:
    values = torch.randn(ROWS, 400, generator=generator)
    return {"input_values": values, "labels": torch.randint(4, 30, (ROWS, 4), generator=generator)}


def mel_bins(generator: torch.Generator) -> Batch:
    features = torch.randn(ROWS, 16, 40, generator=generator)
    return {"input_features": features, "labels": _ids(generator, 5)}


def mel_frames(generator: torch.Generator) -> Batch:
    features = torch.randn(ROWS, 40, 16, generator=generator)
    return {"input_features": features, "labels": _ids(generator, 5)}


def spectrograms(generator: torch.Generator) -> Batch:
    values = torch.randn(ROWS, 24, 16, generator=generator)
    return {"input_values": values, "labels": torch.randint(0, 2, (ROWS,), generator=generator)}


def captions(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return {"input_ids": _ids(generator), "pixel_values": pixels, "return_loss": torch.tensor(True)}


def image_tokens(generator: torch.Generator) -> Batch:
    """Text in which 16 tokens stand for the patches of an image."""
    patches = torch.full((ROWS, 16), IMAGE_TOKEN)
    ids = torch.cat([patches, _ids(generator).clamp(max=IMAGE_TOKEN - 1)], dim=1)
    pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return {"input_ids": ids, "pixel_values": pixels, "labels": ids.clone()}


# -- sizes ---------------------------------------------------------------------------------------------------------

IMAGE_TOKEN = VOCABULARY - 1

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_PAIR: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": PIXELS,
    "patch_size": 4,
}  # fmt: skip
_WAVE: dict[str, Any] = {
    **_VISION, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
_TOWER = {**_VISION, "projection_dim": 16}


def _towers(**text_sizes: Any) -> dict[str, Any]:
    return {"text_config": {**_TEXT, **text_sizes}, "vision_config": dict(_TOWER), "projection_dim": 16}


def _experts(**sizes: Any) -> dict[str, Any]:
    return {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **sizes}


ARCHITECTURES: dict[str, Architecture] = {
    # Decoders
    "llama": Architecture("LlamaForCausalLM", _GROUPED, text),
    "mistral": Architecture("MistralForCausalLM", {**_GROUPED, "sliding_window": 4}, text),
    "qwen2": Architecture("Qwen2ForCausalLM", _GROUPED, text),
    "qwen3": Architecture("Qwen3ForCausalLM", _GROUPED, text),
    "gemma": Architecture("GemmaForCausalLM", _GROUPED, text),
    "gemma2": Architecture("Gemma2ForCausalLM", {**_GROUPED, "sliding_window": 4}, text),
    "gemma3": Architecture("Gemma3ForCausalLM", {**_GROUPED, "sliding_window": 4}, text),
    "gemma3n": Architecture("Gemma3nForCausalLM", {
        **_GROUPED, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"], "altup_num_inputs": 2,
        "sliding_window": 4,
    }, text),
    "phi": Architecture("PhiForCausalLM", _TEXT, text),
    "phi3": Architecture("Phi3ForCausalLM", _TEXT, text),
    "gpt2": Architecture("GPT2LMHeadModel", _GPT, text),
    "gpt_bigcode": Architecture("GPTBigCodeForCausalLM", _GPT, text),
    "gpt_neo": Architecture("GPTNeoForCausalLM", {
        **_TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4,
    }, text),
    "gpt_neox": Architecture("GPTNeoXForCausalLM", _TEXT, text),
    "gptj": Architecture("GPTJForCausalLM", {**_GPT, "rotary_dim": 4}, text),
    "opt": Architecture("OPTForCausalLM", {**_TEXT, "ffn_dim": 48, "word_embed_proj_dim": 16}, text),
    "bloom": Architecture("BloomForCausalLM", {**_GPT, "hidden_size": 32}, text),
    "falcon": Architecture("FalconForCausalLM", _TEXT, text),
    "mpt": Architecture("MptForCausalLM", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
    }, text),
    "stablelm": Architecture("StableLmForCausalLM", _GROUPED, text),
    "starcoder2": Architecture("Starcoder2ForCausalLM", _GROUPED, text),
    "cohere": Architecture("CohereForCausalLM", _GROUPED, text),
    "olmo2": Architecture("Olmo2ForCausalLM", _GROUPED, text),
    "granite": Architecture("GraniteForCausalLM", _GROUPED, text),
    "glm4": Architecture("Glm4ForCausalLM", _GROUPED, text),
    "smollm3": Architecture("SmolLM3ForCausalLM", _GROUPED, text),
    "nemotron": Architecture("NemotronForCausalLM", _GROUPED, text),
    # Mixtures of experts
    "mixtral": Architecture("MixtralForCausalLM", {
        **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    }, text),
    "qwen2_moe": Architecture("Qwen2MoeForCausalLM", _experts(shared_expert_intermediate_size=16), text),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", _experts(), text),
    "olmoe": Architecture("OlmoeForCausalLM", _experts(), text),
    "granitemoe": Architecture("GraniteMoeForCausalLM", {**_GROUPED, "num_local_experts": 4}, text),
    "phimoe": Architecture("PhimoeForCausalLM", {**_GROUPED, "num_local_experts": 4}, text),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", {
        **_TEXT, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8,
    }, text),
    "gpt_oss": Architecture("GptOssForCausalLM", {**_GROUPED, "num_local_experts": 4, "sliding_window": 4}, text),
    "switch_transformers": Architecture("SwitchTransformersForConditionalGeneration", {
        **_T5, "num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
        "router_jitter_noise": 0,
    }, pairs),
    # State spaces and recurrences
    "mamba": Architecture("MambaForCausalLM", {**_TEXT, "state_size": 4, "time_step_rank": 4}, text),
    "mamba2": Architecture("Mamba2ForCausalLM", {
        **_TEXT, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4, "expand": 2,
    }, text),
    "falcon_mamba": Architecture("FalconMambaForCausalLM", {**_TEXT, "state_size": 4, "time_step_rank": 4}, text),
    "falcon_h1": Architecture("FalconH1ForCausalLM", {
        **_GROUPED, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_chunk_size": 4,
    }, text),
    "bamba": Architecture("BambaForCausalLM", {
        **_GROUPED, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "attn_layer_indices": [1], "mamba_chunk_size": 4,
    }, text),
    "granitemoehybrid": Architecture("GraniteMoeHybridForCausalLM", {
        **_GROUPED, "num_local_experts": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
        "mamba_d_state": 8, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
        "mamba_chunk_size": 4,
    }, text),
    "nemotron_h": Architecture("NemotronHForCausalLM", {
        **_GROUPED, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 4,
        "hybrid_override_pattern": "M*E-", "num_hidden_layers": 4, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "num_experts_per_tok": 2,
    }, text),
    "jamba": Architecture("JambaForCausalLM", {
        **_GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    }, text),
    "recurrent_gemma": Architecture("RecurrentGemmaForCausalLM", {
        **_GROUPED, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8,
    }, text),
    "rwkv": Architecture("RwkvForCausalLM", {**_TEXT, "attention_hidden_size": 32, "context_length": 64}, text),
    "lfm2": Architecture("Lfm2ForCausalLM", {
        **_GROUPED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8,
    }, text),
    # Encoders
    "bert": Architecture("BertForMaskedLM", _TEXT, text),
    "roberta": Architecture("RobertaForMaskedLM", _TEXT, text),
    "albert": Architecture("AlbertForMaskedLM", {**_TEXT, "embedding_size": 16}, text),
    "electra": Architecture("ElectraForMaskedLM", {**_TEXT, "embedding_size": 16}, text),
    "distilbert": Architecture("DistilBertForMaskedLM", {
        "vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4,
        "max_position_embeddings": 64,
    }, text),
    "deberta_v2": Architecture("DebertaV2ForMaskedLM", {
        **_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16,
    }, text),
    "mpnet": Architecture("MPNetForMaskedLM", _TEXT, text),
    "modernbert": Architecture("ModernBertForMaskedLM", {**_TEXT, "cls_token_id": 1, "sep_token_id": 2}, text),
    "xlnet": Architecture("XLNetLMHeadModel", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48,
    }, text),
    # Encoder-decoders
    "t5": Architecture("T5ForConditionalGeneration", _T5, pairs),
    "mt5": Architecture("MT5ForConditionalGeneration", _T5, pairs),
    "longt5": Architecture("LongT5ForConditionalGeneration", {**_T5, "local_radius": 4}, pairs),
    "bart": Architecture("BartForConditionalGeneration", _PAIR, pairs),
    "mbart": Architecture("MBartForConditionalGeneration", _PAIR, pairs),
    "pegasus": Architecture("PegasusForConditionalGeneration", _PAIR, pairs),
    "marian": Architecture("MarianMTModel", _PAIR, pairs),
    "m2m_100": Architecture("M2M100ForConditionalGeneration", _PAIR, pairs),
    "led": Architecture("LEDForConditionalGeneration", {
        **_PAIR, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }, pairs),
    # Vision
    "vit": Architecture("ViTForImageClassification", _VISION, images),
    "deit": Architecture("DeiTForImageClassification", _VISION, images),
    "beit": Architecture("BeitForImageClassification", _VISION, images),
    "dinov2": Architecture("Dinov2ForImageClassification", _VISION, images),
    "vit_mae": Architecture("ViTMAEForPreTraining", {
        **_VISION, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 24,
    }, masked_images),
    "swin": Architecture("SwinForImageClassification", {
        "image_size": PIXELS, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    }, images),
    "convnext": Architecture("ConvNextForImageClassification", {
        "hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1],
    }, large_images),
    "segformer": Architecture("SegformerForImageClassification", {
        "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16,
    }, large_images),
    # Audio
    "wav2vec2": Architecture("Wav2Vec2ForCTC", _WAVE, waves),
    "hubert": Architecture("HubertForCTC", _WAVE, waves),
    "wavlm": Architecture("WavLMForCTC", _WAVE, waves),
    "whisper": Architecture("WhisperForConditionalGeneration", {
        **_PAIR, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }, mel_bins),
    "speech_to_text": Architecture("Speech2TextForConditionalGeneration", {
        **_PAIR, "input_feat_per_channel": 16, "input_channels": 1, "num_conv_layers": 2, "conv_channels": 16,
        "max_source_positions": 40, "max_target_positions": 20,
    }, mel_frames),
    "audio_spectrogram_transformer": Architecture("ASTForAudioClassification", {
        **_VISION, "max_length": 24, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4,
    }, spectrograms),
    # Text and images
    "clip": Architecture("CLIPModel", _towers(), captions),
    "siglip": Architecture("SiglipModel", _towers(), captions),
    "blip": Architecture("BlipModel", _towers(), captions),
    "llava": Architecture("LlavaForConditionalGeneration", {
        "text_config": {**_GROUPED, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"}, "image_token_index": IMAGE_TOKEN,
        "image_seq_length": 16, "image_token_id": IMAGE_TOKEN, "vision_feature_select_strategy": "default",
        "vision_feature_layer": -1,
    }, image_tokens),
}  # fmt: skip
"""By name; every one trains deterministically: no dropout, no layer dropout, no jitter."""


def build(name: str, seed: int = 0) -> Any:
    """A model of an architecture in training mode, the same for the same seed.

    Args:
        name: of an entry of :data:`ARCHITECTURES`.
        seed: of its values.
    """
    import transformers

    architecture = ARCHITECTURES[name]
    model_class = getattr(transformers, architecture.model_class)
    config = model_class.config_class(**architecture.sizes)
    _silence(config)
    torch.default_generator.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at zero or one would hide a missing update
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model.train()


def _silence(config: Any) -> None:
    """Turn off random numbers during training, in a configuration and those inside it."""
    for key, value in vars(config).items():
        if isinstance(value, float) and ("drop" in key or "jitter" in key):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):
            _silence(value)


def batch(name: str, step: int, rank: int) -> Batch:
    """The batch of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return ARCHITECTURES[name].batch(generator)
