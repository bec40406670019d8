"""Shapes of mixtures of experts, from the configurations of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.paths import GOLDEN
from typer.testing import CliRunner

from thinwire.cli.main import app
from thinwire.cost import parts
from thinwire.cost.kernels import Kernels
from thinwire.errors import SpecError
from thinwire.spec import ModelSpec

CONFIGS = GOLDEN / "configs"

PUBLISHED = {
    # Model: billions of parameters in all, and of those that compute a token, as its makers state them.
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "gpt-oss-120b": (116.83, 5.13),
    "gpt-oss-20b": (20.91, 3.61),
}


def published(name: str) -> ModelSpec:
    return ModelSpec.named(str(CONFIGS / f"{name}.json"))


@pytest.mark.parametrize(("name", "total", "active"), [(name, *counts) for name, counts in PUBLISHED.items()])
def test_parameter_counts_are_the_published_ones(name: str, total: float, active: float) -> None:
    model = published(name)
    assert model.name == name
    assert model.parameters / 1e9 == pytest.approx(total, rel=2e-3)
    # gpt-oss's card leaves the embedding out, because it computes nothing.
    counted = model.active_parameters - (model.embedding_parameters if name.startswith("gpt") else 0)
    assert counted / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("granularity", ["block", "module"])
def test_parts_have_the_parameters_and_the_flops_of_the_model(name: str, granularity: str) -> None:
    model = published(name)
    cut = parts(model, granularity)
    assert sum(part.numel for part in cut) == model.parameters
    assert 3 * sum(part.forward_flops(1, 4096) for part in cut) == model.flops_per_token(4096)
    assert ModelSpec.from_toml(model.to_toml()) == model


@pytest.mark.slow
def test_parameters_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for name in ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"):
        table = json.loads((CONFIGS / f"{name}.json").read_text())
        table |= {"num_hidden_layers": 4, "layer_types": None, "num_nextn_predict_layers": 0}
        config = transformers.AutoConfig.for_model(**table)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
        counted = sum(parameter.numel() for parameter in made.parameters())
        # What ModelSpec leaves out: norms of queries and keys (Qwen3) and attention sinks (gpt-oss).
        small = sum(p.numel() for n, p in made.named_parameters() if "_norm.weight" in n or n.endswith("sinks"))
        assert published(name).with_(layers=4).parameters == counted - small


def test_only_the_experts_that_a_token_visits_compute() -> None:
    dense = ModelSpec(layers=2, hidden=64, heads=4, ffn=96, vocab=100, seq=32)
    mixture = dense.with_(experts=8, active_experts=2)
    of_expert = 3 * 64 * 96
    assert mixture.parameters == dense.parameters + 2 * (7 * of_expert + 8 * 64)
    assert mixture.flops_per_token() == dense.flops_per_token() + 3 * 2 * 2 * (of_expert + 8 * 64)


def test_many_experts_of_few_tokens_take_longer_than_the_same_work_at_once() -> None:
    kernels = Kernels(1e15, 0.8, 2e12, 0.35)
    model = published("mixtral-8x7b")
    (few,) = [part for part in parts(model, "module") if part.name == "layers.0.mlp.experts"]
    (many,) = [part for part in parts(model.with_(experts=64), "module") if part.name == "layers.0.mlp.experts"]
    assert few.matrix_flops == many.matrix_flops
    assert kernels.computing(many, 1, 4096)[0] > 1.5 * kernels.computing(few, 1, 4096)[0]
    assert kernels.computing(few, 1, 4096)[1] > 1.9 * kernels.computing(few, 1, 4096)[0]


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "active_experts = 9 is more than experts = 8"),
        ("mixtral-8x7b", {"num_attention_heads": None}, "none of the keys num_attention_heads, n_head"),
        ("mixtral-8x7b", {"num_attention_heads": 0}, "heads = 0: it should be greater than or equal to 1"),
        ("mixtral-8x7b", {"num_experts_per_tok": None}, "none of the keys num_experts_per_tok, experts_per_token"),
        ("mixtral-8x7b", {"model_type": "jamba"}, "model_type = 'jamba' is no family"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [5]}, r"mlp_only_layers = \[5\]: only the first blocks"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": 0, "intermediate_size": 0}, "expert_ffn = 0"),
        ("qwen3-30b-a3b", {"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ("deepseek-v3", {"moe_intermediate_size": None}, "has no moe_intermediate_size"),
        ("mixtral-8x7b", {"intermediate_size": None}, "has no moe_intermediate_size, or intermediate_size without it"),
        ("deepseek-v3", {"first_k_dense_replace": 61}, "dense_layers = 61 leaves no block"),
        ("deepseek-v3", {"kv_lora_rank": None}, "latent.kv_rank is missing"),
        ("deepseek-v3", {"v_head_dim": -1}, "latent.value_dim = -1"),
    ],
)
def test_a_bad_configuration_is_one_sentence(tmp_path: Path, name: str, changes: dict[str, Any], sentence: str) -> None:
    table = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(table))
    with pytest.raises(SpecError, match=sentence):
        ModelSpec.named(str(file))


@pytest.mark.slow
def test_the_planner_answers_for_a_mixture_of_experts() -> None:
    command = ["plan", "--model", str(CONFIGS / "mixtral-8x7b.json"), "--cluster", "h100-80g:16x8", "--seq", "4096"]
    result = CliRunner().invoke(app, [*command, "--tokens-per-step", "2M"])
    assert result.exit_code == 0, result.output
    assert "mixtral-8x7b: 46.70 billion parameters" in result.output
    assert "12.88 billion of them active" in result.output
