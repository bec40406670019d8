"""Whole models of recipes, which training only has in pieces."""

from __future__ import annotations

import torch
from torch import nn

from thinwire.sharding.memory.initial import place_model
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.build import DraftedModel, draft


def materialize(drafted: DraftedModel) -> nn.Module:
    """Read all initial values in this process, into the same object on CPU in float32."""
    drafted.values.open()
    place_model(drafted.model, torch.device("cpu"))
    for name, parameter in drafted.model.named_parameters():
        parameter.data = drafted.values.read(name, tuple(slice(0, size) for size in parameter.shape)).float().clone()
    return drafted.model


def build(recipe: ModelRecipe, *, vocab: int, seq: int, seed: int) -> nn.Module:
    """Build a whole model on the CPU in float32."""
    return materialize(draft(recipe, vocab=vocab, seq=seq, seed=seed))
