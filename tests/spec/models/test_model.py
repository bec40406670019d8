"""Model shapes against published parameter counts, FLOPs against the formula, clusters from TOML."""

from __future__ import annotations

from typing import Any

import pytest

from thinwire.errors import SpecError
from thinwire.spec import ClusterSpec, ModelSpec


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-7b", 6_738_415_616),
        ("llama-13b", 13_015_864_320),
        ("llama-30b", 32_528_943_616),
        ("llama-65b", 65_285_660_672),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("gpt-neox-20b", 20_554_567_680),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    assert ModelSpec.preset(name).parameters == parameters


def test_amsps_30b_is_narrower_than_llamas() -> None:
    model = ModelSpec.preset("llama-30b-amsp")
    assert model.parameters == pytest.approx(27.6e9, rel=2e-3)
    assert model.flops_per_token() == pytest.approx(1.8e11, rel=0.02)


@pytest.mark.parametrize("name", ModelSpec.preset_names())
def test_every_preset_reads_back(name: str) -> None:
    model = ModelSpec.preset(name)
    assert model.name == name
    assert ModelSpec.from_toml(model.to_toml()) == model


def test_flops_are_the_formula_of_amsp_for_swiglu_of_8_thirds() -> None:
    layers, hidden, seq, vocab = 3, 96, 128, 1000
    model = ModelSpec(layers=layers, hidden=hidden, heads=4, vocab=vocab, seq=seq)
    assert model.ffn == 8 * hidden // 3
    expected = 3 * layers * (24 * hidden**2 + 4 * seq * hidden) + 6 * hidden * vocab
    assert model.flops_per_token() == expected
    assert model.flops_per_token(seq=64) == expected - 3 * layers * 4 * 64 * hidden
    assert model.flops_per_token(causal=True) == expected - 3 * layers * 2 * seq * hidden


def test_flops_of_gpt_and_of_grouped_queries_come_from_the_real_shapes() -> None:
    gpt = ModelSpec(kind="gpt", layers=2, hidden=64, heads=4, vocab=100, seq=32)
    assert gpt.ffn == 256
    assert gpt.flops_per_token() == 3 * 2 * (24 * 64**2 + 4 * 32 * 64) + 6 * 64 * 100
    grouped = ModelSpec(layers=1, hidden=64, heads=8, kv_heads=2, ffn=128, vocab=100, seq=32)
    matrices = 64 * 64 * 2 + 2 * 64 * 16 + 3 * 64 * 128
    assert grouped.kv_hidden == 16
    assert grouped.flops_per_token() == 3 * (2 * matrices + 4 * 32 * 64) + 6 * 64 * 100


def test_a_tied_embedding_counts_once() -> None:
    shape: dict[str, Any] = {"layers": 1, "hidden": 64, "heads": 4, "vocab": 100}
    assert ModelSpec(**shape).parameters - ModelSpec(**shape, tied_embedding=True).parameters == 6400
    assert ModelSpec(**shape).flops_per_token() == ModelSpec(**shape, tied_embedding=True).flops_per_token()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"heads": 3}, "heads = 3 should divide hidden = 64, or set head_dim"),
        ({"kv_heads": 3}, "kv_heads = 3 should divide heads = 4"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads = 2 should divide heads = 3"),
        ({"layers": 0}, "layers = 0"),
        ({"heads": "4"}, "heads = '4'"),
        ({"kind": "bert"}, "kind = 'bert': it should be 'llama' or 'gpt'"),
        ({"hiden": 3}, "did you mean hidden?"),
        ({"experts": 1}, "a mixture needs at least 2"),
        ({"active_experts": 2}, "active_experts = 2 needs experts"),
        ({"kind": "gpt", "experts": 4}, 'experts = 4 with kind = "gpt"'),
        ({"shared_ffn": 8}, "shared_ffn = 8 needs experts"),
        ({"experts": 4, "dense_layers": 2}, "dense_layers = 2 leaves no block"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        ModelSpec.parse({"layers": 1, "hidden": 64, "heads": 4, "vocab": 100} | change)
    assert problem in str(caught.value)


def test_an_unknown_preset_lists_the_valid_ones() -> None:
    with pytest.raises(SpecError, match="there is no model preset 'llama-8b'; valid are llama-7b, "):
        ModelSpec.preset("llama-8b")


CLUSTER = """
name = "lab"
nodes = 2
gpus_per_node = 8
memory = "80GiB"
peak_flops = { bfloat16 = 312e12, float32 = 19.5e12 }
price_per_gpu_hour = 2.5
nodes_per_leaf = 16
[links]
inside = { bandwidth = "200GB/s", latency = "5us" }
nic = { bandwidth = "800gbit" }
spine = { bandwidth = "400gbit" }
"""


def test_a_cluster_reads_quantities_as_text_and_back() -> None:
    cluster = ClusterSpec.from_toml(CLUSTER)
    assert cluster.gpus == 16
    assert cluster.memory == 80 * 2**30
    assert cluster.links.inside.bandwidth == 1.6e12
    assert cluster.links.inside.latency == pytest.approx(5e-6)
    assert cluster.links.nic.latency == 0.0
    assert cluster.peak_flops["bfloat16"] == 312e12
    assert ClusterSpec.from_toml(cluster.to_toml()) == cluster


def test_all_problems_of_a_cluster_are_reported() -> None:
    text = CLUSTER.replace('"80GiB"', '"lots"').replace("nodes_per_leaf = 16", "").replace("19.5e12", "-1.0")
    with pytest.raises(SpecError) as caught:
        ClusterSpec.from_toml(text.replace('"800gbit"', "0"))
    keys = [problem.split(" ")[0] for problem in caught.value.problems]
    assert keys == ["memory", "peak_flops.float32", "links.nic.bandwidth"]
    with pytest.raises(SpecError, match=r"peak_flops\.float32 = 1e-300: it should be greater than or equal to 1"):
        ClusterSpec.from_toml(CLUSTER.replace("19.5e12", "1e-300"))
    message = "leaves is missing: a spine link has no meaning without the size of a leaf"
    with pytest.raises(SpecError, match=message):
        ClusterSpec.from_toml(CLUSTER.replace("nodes_per_leaf = 16", ""))
