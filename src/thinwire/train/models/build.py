"""Builds a module from a recipe's ``model`` table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.errors import SpecError
from thinwire.sharding.memory.initial import InitialValues, parameters_on_meta, place_model
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.cutting import Decoder
from thinwire.train.models.fresh import DrawnValues
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.huggingface import draft_huggingface, read_config
from thinwire.train.models.llama import Llama, LlamaConfig


@dataclass(frozen=True)
class DraftedModel:
    """A model on the meta device, which uses no memory for parameters.

    Attributes:
        model: The module; its parameters are on the meta device.
        values: Source of the parameters' initial values.
        config: Content of a Hugging Face model's ``config.json``; ``None`` for thinwire's own models.
    """

    model: nn.Module
    values: InitialValues
    config: Mapping[str, Any] | None = None

    def materialize(self) -> nn.Module:
        """Read all initial values in this process.

        Returns:
            The same object, on CPU in float32.
        """
        self.values.open()
        place_model(self.model, torch.device("cpu"))
        for name, parameter in self.model.named_parameters():
            region = tuple(slice(0, size) for size in parameter.shape)
            parameter.data = torch.empty(parameter.shape).copy_(self.values.read(name, region))
        return self.model


def build(recipe: ModelRecipe, *, vocab: int, seq: int, seed: int, recompute: bool) -> nn.Module:
    """Build a whole model on the CPU in float32. Training uses :func:`draft` instead."""
    return draft(recipe, vocab=vocab, seq=seq, seed=seed, recompute=recompute).materialize()


def draft(recipe: ModelRecipe, *, vocab: int, seq: int, seed: int, recompute: bool) -> DraftedModel:
    """Build a model on the meta device.

    Args:
        recipe: Model table of the recipe.
        vocab: Number of token ids.
        seq: Tokens per training sequence.
        seed: Seed of random weights; equal seeds give equal weights on every rank and device and under every plan.
        recompute: Whether the backward recomputes each block.

    Returns:
        The model, ready to be sharded, and its initial values.

    Raises:
        SpecError: The model's vocabulary or longest sequence is too small for the data.
    """
    if recipe.kind == "huggingface":
        table = read_config(recipe)
        wrapped, values = draft_huggingface(recipe, table, seed=seed, recompute=recompute)
        config = wrapped.model.config.get_text_config()  # type: ignore[union-attr, operator]
        _check_fits(int(config.vocab_size), getattr(config, "max_position_embeddings", None), vocab, seq)
        return DraftedModel(wrapped, values, table)
    shape = recipe.shape(vocab=vocab, seq=seq)
    _check_fits(shape.vocab, shape.seq, vocab, seq)
    with parameters_on_meta():
        model = (_llama if shape.kind == "llama" else _gpt)(shape, recipe, recompute)
    return DraftedModel(model, DrawnValues(model, seed))


def _llama(shape: ModelSpec, recipe: ModelRecipe, recompute: bool) -> Decoder:
    config = LlamaConfig(
        vocab=shape.vocab,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        seq=shape.seq,
        tied=shape.tied_embedding,
        rope_theta=recipe.rope_theta,
        norm_eps=recipe.norm_eps,
        recompute=recompute,
        experts=shape.experts,
        active_experts=shape.active_experts,
        expert_ffn=shape.expert_ffn,
    )
    return Llama(config)


def _gpt(shape: ModelSpec, recipe: ModelRecipe, recompute: bool) -> Decoder:
    config = GPTConfig(
        vocab=shape.vocab,
        hidden=shape.hidden,
        layers=shape.layers,
        heads=shape.heads,
        ffn=shape.ffn,
        seq=shape.seq,
        tied=shape.tied_embedding,
        positions=recipe.positions,
        rotary_share=recipe.rotary_share,
        rope_theta=recipe.rope_theta,
        parallel_residual=recipe.parallel_residual,
        norm_eps=recipe.norm_eps,
        recompute=recompute,
    )
    return GPT(config)


def _check_fits(rows: int, longest: int | None, vocab: int, seq: int) -> None:
    problems = []
    if rows < vocab:
        problems.append(f"vocab = {rows} is smaller than the {vocab} ids of the data; unset it or enlarge it")
    if longest is not None and 0 < longest < seq:  # some models write -1 for "any"
        problems.append(f"train.seq = {seq} is longer than the model's longest sequence, {longest}")
    if problems:
        raise SpecError("model", problems)
