"""A run that publishes, and a follower whose directory transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.support.families.tiny import FAMILIES
from tests.support.small import thinwire, write_text

pytestmark = pytest.mark.ranks

RECIPE = """
plan = { preset = "zero1", compute_dtype = "float32" }
[model]
kind = "huggingface"
config = "config.json"
[data]
source = "text"
paths = ["text.txt"]
cache = "cache"
vocab = 300
validation_paths = ["text.txt"]
[train]
steps = 3
seq = 16
validation_samples = 2
[cluster]
device = "cpu"
nproc = 2
timeout = "60s"
[publish]
store = "published"
"""

CONFIG = FAMILIES["llama"] | {"vocab_size": 300}


@pytest.mark.slow
def test_what_a_run_publishes_is_what_it_exports(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_text(tmp_path / "text.txt", words=200)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    thinwire("train", "recipe.toml", "--out", "run", cwd=tmp_path)
    thinwire("export", "run", "--to", "exported", cwd=tmp_path)
    thinwire("follow", "published", "--out", "model", "--once", cwd=tmp_path)
    shutil.rmtree(tmp_path / "published")  # as if the last version had found the store full
    thinwire("train", "recipe.toml", "--out", "run", "--resume", cwd=tmp_path)
    thinwire("follow", "published", "--out", "again", "--once", cwd=tmp_path)
    exported, followed, again = (
        load_file(tmp_path / name / "model.safetensors") for name in ("exported", "model", "again")
    )
    assert followed.keys() == again.keys() == exported.keys()
    assert all(value.equal(exported[name]) and value.equal(again[name]) for name, value in followed.items())
    shutil.copy(tmp_path / "config.json", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight.equal(followed["model.embed_tokens.weight"])
