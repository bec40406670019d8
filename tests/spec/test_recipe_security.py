"""A run treats its input as data: any content is a plain value or is refused."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.alone import Alone
from tests.support.training.drafted import build

from thinwire.checkpoint.manifest import MANIFEST_NAME
from thinwire.checkpoint.storage import Chunk, ShardedVector
from thinwire.checkpoint.store import verify, write
from thinwire.errors import CheckpointError, DataError, SpecError, ThinwireError
from thinwire.spec.io import apply_settings
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.tokens import TokenBin

RECIPE: dict[str, Any] = {"model": {"layers": 1, "hidden": 16, "heads": 2}, "train": {"steps": 5}}

OWN_TOKENIZER: dict[str, Any] = {"data": {"tokenizer": "byte"}}
"""For models that come with weights, which no new tokenizer would suit."""


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """A file that exists once code has run; a trial of the trap creates it."""
    path = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(path)))
    path.unlink()
    return path


@pytest.mark.parametrize("key", ["data.paths", "data.tokenizer", "data.source", "model.kind", "plan", "train.steps"])
def test_text_that_looks_like_code_stays_text(sprung: Path, key: str) -> None:
    section, _, name = key.partition(".")
    for code in (
        f"__import__('pathlib').Path({str(sprung)!r}).touch()",
        f"!!python/object/apply:os.system ['touch {sprung}']",
        f"$(touch {sprung})",
        f"{{{{ open({str(sprung)!r}, 'w') }}}}",
    ):
        value = [code] if key == "data.paths" else code
        changed = {**RECIPE.get(section, {}), name: value} if name else value
        with contextlib.suppress(ThinwireError):
            _ = PlanTemplate.read(Recipe.parse({**RECIPE, section: changed})).mesh
    assert not sprung.exists()


@given(st.text(max_size=60), st.text(max_size=60))
def test_settings_are_values_or_refused(key: str, value: str) -> None:
    with contextlib.suppress(SpecError):
        json.dumps(apply_settings(RECIPE, [f"{key}={value}"]), default=str)


@pytest.mark.parametrize("key", ["config", "path"])
def test_a_models_own_code_is_not_run(tmp_path: Path, sprung: Path, key: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    code = f"import pathlib\npathlib.Path({str(sprung)!r}).touch()\nclass Trap: pass\n"
    (model / "modeling_trap.py").write_text(code)
    own = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_trap.Trap")
    (model / "config.json").write_text(json.dumps({"model_type": "trap", "auto_map": own}))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    recipe = Recipe.parse({**RECIPE, **OWN_TOKENIZER, "model": {"kind": "huggingface", key: str(model)}})
    with pytest.raises(DataError):
        build(recipe.model, vocab=300, seq=8, seed=0)
    assert not sprung.exists()


def test_weights_in_a_pickle_are_refused(tmp_path: Path, sprung: Path) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **shape}))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    recipe = Recipe.parse({**RECIPE, **OWN_TOKENIZER, "model": {"kind": "huggingface", "path": str(tmp_path)}})
    with pytest.raises(DataError):
        build(recipe.model, vocab=300, seq=8, seed=0)
    assert not sprung.exists()


def test_files_of_a_run_are_never_unpickled(tmp_path: Path, sprung: Path) -> None:
    trap = pickle.dumps(Trap(sprung))
    path = tmp_path / "step-1"
    write(path, {"w": ShardedVector(3, (Chunk(0, torch.ones(3)),))}, {}, control=Alone())
    for file in (next(path.glob("*.safetensors")), path / MANIFEST_NAME):
        file.write_bytes(trap)
        with pytest.raises(CheckpointError):
            verify(path)
    for name, read in (("tokenizer.json", Tokenizer.load), ("tokens.bin", TokenBin.open)):
        (tmp_path / name).write_bytes(trap)
        with pytest.raises(DataError):
            read(tmp_path / name)
    assert not sprung.exists()
