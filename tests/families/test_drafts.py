"""`thinwire train --model`: configurations become models on the meta device, with initial values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.families.catalog import ARCHITECTURES, LENGTH, VOCABULARY
from tests.support.families.training import quiet
from tests.support.training.drafted import materialize

from thinwire.spec.models.huggingface import read_config
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.build import draft

pytestmark = pytest.mark.ranks

NOT_FINITE = ("mamba2", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid")
"""Architectures whose configurations hold an infinity."""

CAUSAL = (*NOT_FINITE, "llama", "gemma3", "gemma3n", "mamba", "jamba", "recurrent_gemma", "rwkv", "gpt_oss", "whisper")
MULTIMODAL = ("llava",)


def recipe(name: str, directory: Path) -> ModelRecipe:
    """Of random values, for a configuration that ``transformers`` wrote."""
    import transformers

    architecture = ARCHITECTURES[name]
    config: Any = getattr(transformers, architecture.model_class).config_class(**architecture.sizes)
    config.save_pretrained(directory)
    return ModelRecipe(kind="huggingface", config=str(directory / "config.json"))


@pytest.mark.parametrize("name", [*CAUSAL, *MULTIMODAL])
def test_random_values_train(name: str, tmp_path: Path) -> None:
    with quiet():
        drafted = draft(recipe(name, tmp_path), vocab=VOCABULARY - 1, seq=LENGTH, seed=0)
        model = materialize(drafted)
        ids = torch.randint(4, VOCABULARY - 1, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
    assert 0 < loss.item() < 10
    assert json.loads(json.dumps(drafted.config, allow_nan=False)) == drafted.config


@pytest.mark.parametrize("name", NOT_FINITE)
def test_an_infinity_arrives_in_the_model(name: str, tmp_path: Path) -> None:
    written = recipe(name, tmp_path)
    tagged = read_config(str(written.config))
    assert tagged["time_step_limit"][1] == {"__float__": "Infinity"}
    with quiet():
        drafted = draft(written, vocab=VOCABULARY - 1, seq=LENGTH, seed=0)
        as_table = ModelRecipe(kind="huggingface", config={**tagged, "time_step_limit": [0.0, float("inf")]})
        assert read_config(as_table.config or {}) == tagged
    assert drafted.model.model.config.time_step_limit[1] == float("inf")


def test_random_values_are_those_of_transformers_rules_for_each_part(tmp_path: Path) -> None:
    """The image tower of LLaVA is CLIP's, whose class embedding has a separate rule."""
    with quiet():
        drafted = draft(recipe("llava", tmp_path), vocab=VOCABULARY - 1, seq=LENGTH, seed=0)
        model = materialize(drafted)
    embedding = dict(model.named_parameters())["model.model.vision_tower.embeddings.class_embedding"]
    assert 0.02 < embedding.std().item() < 2.0  # hidden_size ** -0.5 = 0.18 by CLIP's rule
