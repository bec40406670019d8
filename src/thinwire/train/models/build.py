"""Builds a module from a recipe's ``model`` table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from torch import nn

from thinwire.errors import SpecError
from thinwire.sharding.memory.initial import InitialValues, parameters_on_meta
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.configured import draft_huggingface
from thinwire.train.models.fresh import DrawnValues
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.llama import Llama, LlamaConfig

_DETAILS: Final = {
    "llama": ("norm_eps", "rope_theta"),
    "gpt": ("norm_eps", "rope_theta", "positions", "rotary_share", "parallel_residual"),
}
"""Keys of a recipe that a kind of model has beside its dimensions."""


@dataclass(frozen=True)
class DraftedModel:
    """A model on the meta device, which uses no memory for parameters, where their values come from, and the
    ``config.json`` of a Hugging Face model."""

    model: nn.Module
    values: InitialValues
    config: Mapping[str, Any] | None = None


def draft(recipe: ModelRecipe, *, vocab: int, seq: int, seed: int) -> DraftedModel:
    """Build a model on the meta device, ready to be sharded, and its initial values: equal seeds give equal weights on
    every rank and device and under every plan.

    Raises:
        SpecError: The model's vocabulary or longest sequence is too small for the data.
    """
    if recipe.kind == "huggingface":
        table = recipe.configuration
        assert table is not None, "a rule of the recipe"
        wrapped, values = draft_huggingface(recipe, table, seed=seed)
        config = wrapped.model.config.get_text_config()
        _check_fits(int(config.vocab_size), getattr(config, "max_position_embeddings", None), vocab, seq)
        return DraftedModel(wrapped, values, table)
    shape = recipe.shape(vocab=vocab, seq=seq)
    _check_fits(shape.vocab, shape.seq, vocab, seq)
    with parameters_on_meta():
        model = own_model(shape, **{name: getattr(recipe, name) for name in _DETAILS[shape.kind]})
    return DraftedModel(model, DrawnValues(model, seed))


def own_model(shape: ModelSpec, **details: Any) -> Llama | GPT:
    """A model of thinwire's own with random initial values."""
    kind = LlamaConfig if shape.kind == "llama" else GPTConfig
    same = {field.name: getattr(shape, field.name) for field in fields(kind) if hasattr(shape, field.name)}
    config = kind(**{**same, "tied": shape.tied_embedding, **details})
    return Llama(config) if isinstance(config, LlamaConfig) else GPT(config)


def _check_fits(rows: int, longest: int | None, vocab: int, seq: int) -> None:
    problems = []
    if rows < vocab:
        problems.append(f"vocab = {rows} is smaller than the {vocab} ids of the data; unset it or enlarge it")
    if longest is not None and 0 < longest < seq:  # some models write -1 for "any"
        problems.append(f"train.seq = {seq} is longer than the model's longest sequence, {longest}")
    if problems:
        raise SpecError("model", problems)
