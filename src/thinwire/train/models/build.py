"""From a recipe's ``model`` table to a module."""

from __future__ import annotations

from torch import nn

from thinwire.errors import SpecError
from thinwire.spec.model import ModelSpec
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.huggingface import HuggingFaceCausal, from_config, load_pretrained
from thinwire.train.models.llama import Llama, LlamaConfig


def build(recipe: ModelRecipe, *, vocab: int, seq: int, seed: int, recompute: bool) -> nn.Module:
    """Build the model on CPU in float32.

    Args:
        recipe: which model.
        vocab: ids of the tokenizer.
        seq: tokens of a training sequence.
        seed: of fresh weights; equal seeds give equal weights on every rank and device.
        recompute: whether backward recomputes each block.

    Returns:
        The model, not yet sharded.

    Raises:
        SpecError: the model's vocabulary or longest sequence is too small for the data.
    """
    if recipe.kind == "huggingface":
        model = _huggingface(recipe, seed, recompute)
        config = model.model.config.get_text_config()  # type: ignore[union-attr, operator]
        _check_fits(int(config.vocab_size), getattr(config, "max_position_embeddings", None), vocab, seq)
        return model
    shape = recipe.shape(vocab=vocab, seq=seq)
    _check_fits(shape.vocab, shape.seq, vocab, seq)
    make = _llama if shape.kind == "llama" else _gpt
    return make(shape, recipe, seed, recompute)


def _llama(shape: ModelSpec, recipe: ModelRecipe, seed: int, recompute: bool) -> nn.Module:
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
    )
    return Llama(config, seed)


def _gpt(shape: ModelSpec, recipe: ModelRecipe, seed: int, recompute: bool) -> nn.Module:
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
    return GPT(config, seed)


def _huggingface(recipe: ModelRecipe, seed: int, recompute: bool) -> HuggingFaceCausal:
    if recipe.path is not None:
        return load_pretrained(recipe.path, recompute=recompute)
    assert recipe.config is not None, "the recipe's own rule demands path or config"
    return from_config(recipe.config, seed=seed, recompute=recompute)


def _check_fits(rows: int, longest: int | None, vocab: int, seq: int) -> None:
    problems = []
    if rows < vocab:
        problems.append(f"vocab = {rows} is smaller than the {vocab} ids of the data; unset it or enlarge it")
    if longest is not None and longest < seq:
        problems.append(f"train.seq = {seq} is longer than the model's longest sequence, {longest}")
    if problems:
        raise SpecError("model", problems)
