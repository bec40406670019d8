"""A trained model in Hugging Face's terms: a configuration, and the tensors of its files.

thinwire's own models are exported as the architecture that computes the same: Llama as ``LlamaForCausalLM``, GPT with
rotary positions as ``GPTNeoXForCausalLM``, and GPT with learned positions and sequential residuals as
``GPT2LMHeadModel``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.models.configured import causal_on_meta
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.huggingface import PREFIX
from thinwire.train.models.llama import Llama, LlamaConfig
from thinwire.train.models.stored import file_tensors


@final
@dataclass(frozen=True)
class OutTensor:
    """A tensor of an exported file, and how it is made from a parameter or buffer, on any device."""

    name: str
    source: str
    make: Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class Layout:
    """An exported model: its ``config.json`` without dtype and token ids, its tensors, of which those of one source are
    neighbours, and the shapes of all sources."""

    config: Mapping[str, Any]
    tensors: list[OutTensor]
    shapes: Mapping[str, list[int]]


def layout_of_huggingface(config: Mapping[str, Any], what: str) -> Layout:
    """The layout that ``save_pretrained`` would give a model.

    Raises:
        DataError: The configuration does not describe a causal language model.
        UsageError: The files of this architecture are not a partition of its parameters.
    """
    model = causal_on_meta(config, what)
    found = file_tensors(model)
    shapes = {f"{PREFIX}{name}": list(value.shape) for name, value in model.state_dict().items()}
    sources = {name: place for place, name in enumerate(shapes)}

    def cut(region: tuple[slice, ...], shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        return lambda whole: whole[region].reshape(shape)

    tensors = [OutTensor(part.name, f"{PREFIX}{part.source}", cut(part.region, part.shape)) for part in found]
    tensors.sort(key=lambda tensor: sources[tensor.source])
    used = {tensor.source for tensor in tensors}  # tied parameters occur once
    return Layout(
        {**config, "architectures": [type(model).__name__]},
        tensors,
        {name: shape for name, shape in shapes.items() if name in used},
    )


def layout_of_ours(model: Llama | GPT) -> Layout:
    """The layout of one of thinwire's own models.

    Raises:
        UsageError: No architecture of ``transformers`` computes the same.
    """
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    if isinstance(model, Llama) and model.config.experts is not None:
        raise UsageError(
            f"a Llama with experts = {model.config.experts} is not exported yet; train a Mixtral of transformers, with "
            'model.kind = "huggingface", to export one'
        )
    if isinstance(model, Llama):
        return Layout(_llama_config(model.config), _renamed(shapes, "model.", "lm_head"), shapes)
    config = model.config
    if config.positions == "rotary" and config.rotary_channels:
        return Layout(_neox_config(config), _renamed(shapes, "gpt_neox.", "embed_out"), shapes)
    if config.positions == "learned" and not config.parallel_residual:
        return Layout(_gpt2_config(config), _gpt2_tensors(model, config), shapes)
    which = "no rotated channels" if config.positions == "rotary" else "learned positions and parallel residuals"
    raise UsageError(
        f"this GPT has {which}, and no architecture of transformers computes the same; with "
        'model.positions = "rotary" (GPT-NeoX), or "learned" and model.parallel_residual = false (GPT-2), it could be '
        "exported"
    )


def _renamed(shapes: Mapping[str, object], prefix: str, head: str) -> list[OutTensor]:
    return [
        OutTensor(name.replace("lm_head", head) if name.startswith("lm_head") else prefix + name, name, _same)
        for name in shapes
    ]


def _same(whole: Tensor) -> Tensor:
    return whole


def _llama_config(config: LlamaConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "max_position_embeddings": config.seq,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
    }


def _neox_config(config: GPTConfig) -> dict[str, Any]:
    channels = config.hidden // config.heads
    share = config.rotary_channels / channels
    if int(channels * share) != config.rotary_channels:  # transformers rounds down, as we do
        share = (config.rotary_channels + 0.5) / channels
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.seq,
        "hidden_act": "gelu",
        "layer_norm_eps": config.norm_eps,
        "rotary_pct": share,
        "rotary_emb_base": config.rope_theta,
        "use_parallel_residual": config.parallel_residual,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": config.tied,
    }


def _gpt2_config(config: GPTConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab,
        "n_embd": config.hidden,
        "n_inner": config.ffn,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_positions": config.seq,
        "activation_function": "gelu",
        "layer_norm_epsilon": config.norm_eps,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": config.tied,
    }


_GPT2_NAMES: Final = {
    "embed_in": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "final_layer_norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}


def _gpt2_tensors(model: nn.Module, config: GPTConfig) -> list[OutTensor]:
    """GPT-2 keeps matrices transposed, and queries, keys and values apart where we have them by head."""

    def stored(value: Tensor, *, by_head: bool, transposed: bool) -> Tensor:
        if by_head:
            value = value.unflatten(0, (config.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return value.t() if transposed else value

    tensors = []
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        parts = module.split(".")
        in_block = parts[0] == "layers"
        renamed = f"transformer.h.{parts[1]}.{_GPT2_NAMES['.'.join(parts[2:])]}" if in_block else _GPT2_NAMES[module]
        by_head, transposed = parts[-1] == "query_key_value", in_block and parameter.ndim == 2
        make = functools.partial(stored, by_head=by_head, transposed=transposed)
        tensors.append(OutTensor(f"{renamed}.{kind}", name, make))
    return tensors
