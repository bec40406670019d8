"""A run under any plan exports a model that computes the same results in transformers."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tests.support.families.tiny import FAMILIES, LENGTH, VOCABULARY, random_model, token_ids
from typer.testing import CliRunner

import thinwire as tw
from thinwire.cli.main import app
from thinwire.errors import CheckpointError, DataError, UsageError
from thinwire.spec.recipe import Recipe
from thinwire.spec.template import PlanTemplate
from thinwire.testing import run_ranks
from thinwire.train.data.packing import prepare
from thinwire.train.data.tokens import TokenWriter
from thinwire.train.directory import RunDirectory
from thinwire.train.export.files import _publish, export, keep_sources
from thinwire.train.launching.resolved import ResolvedRun
from thinwire.train.trainer import Trainer

pytestmark = pytest.mark.ranks

OURS: dict[str, dict[str, Any]] = {
    "our-llama": {"kind": "llama", "kv_heads": 2},
    "our-tied-llama": {"kind": "llama", "tied_embedding": True, "rope_theta": 5000.0, "norm_eps": 1e-6},
    "our-neox": {"kind": "gpt", "rotary_share": 0.4},
    "our-sequential-neox": {"kind": "gpt", "parallel_residual": False, "rotary_share": 1.0, "tied_embedding": True},
    "our-gpt2": {"kind": "gpt", "positions": "learned", "parallel_residual": False},
    "our-tied-gpt2": {"kind": "gpt", "positions": "learned", "parallel_residual": False, "tied_embedding": True},
}
SHAPE = {"layers": 4, "hidden": 48, "heads": 4, "ffn": 80, "vocab": VOCABULARY}
DIVIDED: dict[str, Any] = {
    "vocab_size": VOCABULARY + 1, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 12,
    "num_key_value_heads": 2, "intermediate_size": 80, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
"""A model of transformers of even sizes, which two tensor-parallel ranks can divide."""


def write_tokens(directory: Path) -> str:
    with TokenWriter(directory / "tokens.bin", VOCABULARY) as writer:
        writer.append(np.random.default_rng(0).integers(0, VOCABULARY, 4000).tolist())
    return str(directory / "tokens.bin")


def recipe_of(model: dict[str, Any], data: dict[str, Any], plan: dict[str, Any]) -> Recipe:
    return Recipe.parse(
        {
            "model": model,
            "data": data,
            "plan": {"compute_dtype": "float32", **plan},
            "train": {"steps": 2, "seq": LENGTH, "micro_batch": 1, "micro_batches": 4},
            "optimizer": {"lr": 1e-2},
        },
        "recipe",
    )


def train(directories: list[str]) -> list[torch.Tensor | None]:
    """Train prepared runs on the ranks of this job; logits of the last stage."""
    last_logits = []
    for name in directories:
        run = RunDirectory(Path(name))
        recipe, plan = Recipe.load(run.recipe), tw.Plan.load(run.plan)
        dataset = prepare(recipe.data)
        trainer = Trainer(ResolvedRun(recipe, plan, run, node_ranks=2), dataset, torch.device("cpu"))
        for _ in range(2):
            trainer.step(False)
        trainer.save()
        if trainer.ranks.rank == 0:
            keep_sources(run, recipe, dataset, trainer.config)
        logits = None
        if plan.ranks == plan.world:
            chunk = trainer.model.chunks[0].eval()
            with torch.no_grad(), tw.full_parameters(chunk):
                logits = chunk(token_ids()).logits
        last_logits.append(logits)
        trainer.ranks.barrier()
    return last_logits


def prepared(parent: Path, name: str, recipe: Recipe, *, nodes: int = 1, local: int = 2) -> str:
    run = RunDirectory(parent / name)
    run.open(recipe, PlanTemplate.read(recipe).resolve(tw.Factor(local=local, nodes=nodes)), {})
    return str(run.path)


def loaded(directory: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


FIRST = ("gpt2", "mixtral", "our-llama", "our-sequential-neox", "our-tied-gpt2")
"""One of each way of storing parameters."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FIRST, id="some"),
        pytest.param([name for name in (*FAMILIES, *OURS) if name not in FIRST], id="others", marks=pytest.mark.slow),
    ],
)
def test_round_trips(names: Sequence[str], tmp_path: Path) -> None:
    """transformers, training under a sharded plan, transformers."""
    data = {"source": "tokens", "paths": [write_tokens(tmp_path)]}
    runs = {}
    for number, family in enumerate(name for name in FAMILIES if name in names):
        random_model(family).save_pretrained(tmp_path / f"{family}-start")
        model = {"kind": "huggingface", "path": str(tmp_path / f"{family}-start")}
        plan = {"preset": ("zero3", "zero1-node", "zero2")[number % 3]}
        runs[family] = prepared(tmp_path, family, recipe_of(model, data, plan))
    for name in (name for name in OURS if name in names):
        runs[name] = prepared(tmp_path, name, recipe_of({**SHAPE, **OURS[name]}, data, {"preset": "zero3"}))
    results = run_ranks(2, train, list(runs.values()))[0]
    for (name, run), logits in zip(runs.items(), results, strict=True):
        to = tmp_path / f"{name}-end"
        done = export(RunDirectory(Path(run)), to, max_shard_bytes=60_000)
        assert done.step == 2
        assert len(done.files) > 1, name
        assert not done.tokenizer
        theirs = loaded(to)
        assert type(theirs).__name__ == done.architecture
        # Of each the sum is over other orders in other kernels; a wrong tensor is off by far more.
        torch.testing.assert_close(theirs(token_ids()).logits, logits, rtol=1e-5, atol=2e-6, msg=name)
        if name in FAMILIES:
            start = random_model(name)
            assert not torch.allclose(start(token_ids()).logits, logits, atol=1e-2), "training changed nothing"
            wanted = set(stored_names(tmp_path / f"{name}-start"))
            assert set(stored_names(to)) == wanted, "as transformers names them itself"


def stored_names(directory: Path) -> list[str]:
    names: list[str] = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            names += handle.keys()
    return names


@pytest.mark.slow
def test_checkpoints_of_grids_are_put_together(tmp_path: Path) -> None:
    """The same training on a grid of tensor-parallel ranks and stages, and on data-parallel ranks."""
    data = {"source": "tokens", "paths": [write_tokens(tmp_path)]}
    models = {name: {**SHAPE, **OURS[name], "vocab": 98} for name in ("our-llama", "our-neox", "our-gpt2")}
    models["qwen3"] = {"kind": "huggingface", "config": {**DIVIDED, "model_type": "qwen3"}, "weights": "random"}
    for name, model in models.items():
        grid = prepared(
            tmp_path, f"{name}-grid", recipe_of(model, data, {"preset": "zero1", "tp": 2, "pp": 2}), local=1
        )
        flat = prepared(tmp_path, f"{name}-flat", recipe_of(model, data, {"preset": "zero1"}), local=1)
        run_ranks(4, train, [grid])
        ((expected,),) = run_ranks(1, train, [flat])
        export(RunDirectory(Path(grid)), tmp_path / name)
        # Adam's first steps turn rounding of small gradients into steps of full size; a wrong slice is off by 0.1.
        torch.testing.assert_close(loaded(tmp_path / name)(token_ids()).logits, expected, rtol=1e-3, atol=3e-4)


WORDS = [f"word{number}" for number in range(50)]


@pytest.fixture(scope="module")
def run_with_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of our Llama on text, with a tokenizer of its own."""
    parent = tmp_path_factory.mktemp("text")
    chance = random.Random(0)
    (parent / "text.txt").write_text("\n".join(" ".join(chance.choices(WORDS, k=9)) for _ in range(2000)))
    data = {"source": "text", "paths": [str(parent / "text.txt")], "vocab": 300, "cache": str(parent / "cache")}
    model = {**SHAPE, "kind": "llama", "vocab": 320}
    run = prepared(parent, "run", recipe_of(model, data, {"preset": "zero1"}), local=1)
    run_ranks(1, train, [run])
    return Path(run)


@pytest.mark.slow
def test_an_export_generates_text(run_with_text: Path, tmp_path: Path) -> None:
    import transformers

    result = CliRunner().invoke(app, ["export", str(run_with_text), "--to", str(tmp_path / "out"), "--json"])
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert about["architecture"] == "LlamaForCausalLM"
    assert about["files"] == ["model.safetensors"]
    assert about["step"] == 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert about["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert tokenizer.decode(tokenizer("word7 word13")["input_ids"]) == "word7 word13"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    ids = tokenizer("word7", return_tensors="pt")["input_ids"]
    made = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert made.shape[1] > ids.shape[1]
    assert tokenizer.decode(made[0]).startswith("word7")


@pytest.mark.slow
def test_bfloat16_and_another_step(run_with_text: Path, tmp_path: Path) -> None:
    run = RunDirectory(run_with_text)
    full = export(run, tmp_path / "full", step=2)
    half = export(run, tmp_path / "half", dtype="bfloat16")
    assert half.num_bytes * 2 == full.num_bytes
    wide, narrow = loaded(tmp_path / "full"), loaded(tmp_path / "half")
    for a, b in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16().float(), b)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match=r"--step 7: .* has checkpoints of steps 2"):
        export(run, tmp_path / "other", step=7)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_directory_that_is_not_empty_is_left_alone(run_with_text: Path, tmp_path: Path) -> None:
    run, to = RunDirectory(run_with_text), tmp_path / "out"
    export(run, to, max_shard_bytes=30_000)
    (to / "notes.txt").write_text("mine")
    before = sorted(path.name for path in to.iterdir())
    assert "model.safetensors.index.json" in before
    with pytest.raises(UsageError, match="is not empty; choose another directory, or add --force"):
        export(run, to)
    assert sorted(path.name for path in to.iterdir()) == before
    export(run, to, force=True)
    assert {"model.safetensors", "notes.txt"} <= {path.name for path in to.iterdir()}
    assert not list(to.glob("model-*"))
    assert not (to / "model.safetensors.index.json").exists()
    assert not list(tmp_path.glob(".out*")), "nothing half-written stays"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        export(run, tmp_path / "file")


def test_an_interrupted_replacement_leaves_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"config.json", "generation_config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "notes.txt"}
    new = {"config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    move = Path.replace
    for number in range(len(new) + 1):
        to, staging = tmp_path / f"to-{number}", tmp_path / f"staging-{number}"
        for directory, names in ((to, old), (staging, new)):
            directory.mkdir()
            for name in names:
                (directory / name).write_text(directory.name)
        moves = iter([True] * number)

        def interrupted(file: Path, target: Path, moves: Iterator[bool] = moves) -> Path:
            if next(moves, False):
                return move(file, target)
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt) if number < len(new) else contextlib.nullcontext():
            _publish(staging, to)
        assert (to / "config.json").exists() == (number == len(new))
    assert {path.name: path.read_text() for path in to.iterdir()} == {
        **dict.fromkeys(new, staging.name), "notes.txt": to.name,
    }  # fmt: skip


@pytest.mark.slow
def test_runs_that_cannot_be_exported_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        export(RunDirectory(tmp_path), tmp_path / "out")
    data = {"source": "tokens", "paths": [write_tokens(tmp_path)]}
    odd = {**SHAPE, "kind": "gpt", "positions": "learned"}
    run = RunDirectory(Path(prepared(tmp_path, "odd", recipe_of(odd, data, {"preset": "zero1"}), local=1)))
    with pytest.raises(CheckpointError, match="has no checkpoint to export"):
        export(run, tmp_path / "out")
    run_ranks(1, train, [str(run.path)])
    with pytest.raises(UsageError, match="learned positions and parallel residuals, and no architecture"):
        export(run, tmp_path / "out")
    model = {"kind": "huggingface", "config": FAMILIES["llama"]}
    run = RunDirectory(Path(prepared(tmp_path, "lost", recipe_of(model, data, {"preset": "zero1"}), local=1)))
    run_ranks(1, train, [str(run.path)])
    kept = run.model / "config.json"
    kept.write_text(kept.read_text().replace('"intermediate_size": 56', '"intermediate_size": 40'))
    with pytest.raises(CheckpointError, match=r"of another model than the run's: .*56.* in the checkpoint"):
        export(run, tmp_path / "out")
    kept.write_text("[" * 10_000)
    with pytest.raises(DataError, match="the configuration that the run kept, cannot be read"):
        export(run, tmp_path / "out")
    kept.unlink()
    with pytest.raises(DataError, match="the configuration that the run kept, cannot be read"):
        export(run, tmp_path / "out")
    file = next((run.checkpoints / "step-00000002").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="corrupt: the CRC-32"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
