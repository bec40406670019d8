"""Hugging Face weights in files: found, checked and read piece by piece; random ones that no plan changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.families.tiny import FAMILIES, LENGTH, VOCABULARY, random_model, token_ids
from tests.support.training.drafted import build, materialize

from thinwire.errors import DataError, SpecError
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.build import DraftedModel, draft
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.llama import Llama, LlamaConfig


def drafted(recipe: dict[str, Any], seed: int = 0) -> DraftedModel:
    return draft(ModelRecipe(**recipe), vocab=VOCABULARY, seq=LENGTH, seed=seed)


def read(draft: DraftedModel, name: str, *bounds: tuple[int, int]) -> torch.Tensor:
    return draft.values.read(name, tuple(slice(*pair) for pair in bounds))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    saved = random_model(family)
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    draft = drafted({"kind": "huggingface", "path": str(tmp_path)})
    assert all(parameter.is_meta for parameter in draft.model.parameters())
    model = materialize(draft).eval()
    ids = token_ids()
    torch.testing.assert_close(model(ids).logits, saved(ids).logits, rtol=0, atol=0)


def test_any_part_of_experts_is_put_together_from_files(tmp_path: Path) -> None:
    saved = random_model("mixtral")
    saved.save_pretrained(tmp_path)
    draft = drafted({"kind": "huggingface", "path": str(tmp_path)})
    draft.values.open()
    experts = saved.model.layers[1].mlp.experts.gate_up_proj.detach()
    name = "model.model.layers.1.mlp.experts.gate_up_proj"
    for bounds in [((0, 4), (0, 112), (0, 32)), ((1, 3), (50, 60), (3, 9)), ((2, 3), (57, 58), (0, 32))]:
        expected = experts[tuple(slice(*pair) for pair in bounds)]
        torch.testing.assert_close(read(draft, name, *bounds), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_start_as_what_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = random_model("qwen3").to(dtype)
    saved.save_pretrained(tmp_path)
    model = materialize(drafted({"kind": "huggingface", "path": str(tmp_path)}))
    for (name, mine), (_, theirs) in zip(model.named_parameters(), saved.named_parameters(), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs.float()), name


def test_files_of_a_model_without_its_head_and_with_old_extras(tmp_path: Path) -> None:
    """Like the first GPT-2 files: no prefix, no separate head, and the causal mask as a buffer."""
    saved = random_model("gpt2")
    saved.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(tmp_path / "model.safetensors").items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, LENGTH, LENGTH)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    model = materialize(drafted({"kind": "huggingface", "path": str(tmp_path)})).eval()
    torch.testing.assert_close(model(token_ids()).logits, saved(token_ids()).logits, rtol=0, atol=0)


def change(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, torch.Tensor | None] = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, directory / "model.safetensors")


NORM, KEYS = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, f"does not fit LlamaForCausalLM: 1 missing: {NORM}$"),
        ({KEYS: torch.zeros(8, 32)}, rf"{KEYS} is \[8, 32\] in the files, \[16, 32\] in the model"),
        ({"model.norm.bias": torch.zeros(32)}, r"1 unexpected: model\.norm\.bias"),
        ({NORM: torch.zeros(32, dtype=torch.int8)}, f"{NORM} is I8 in the files; valid are F64, F32, F16, BF16"),
        (
            {f"model.layers.{i}.mlp.{name}_proj.weight": None for i in range(2) for name in ("up", "down")},
            "4 missing: .*, and 1 more$",
        ),
    ],
)
def test_mismatched_weights_are_refused_before_anything_is_read(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    random_model("llama").save_pretrained(tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        drafted({"kind": "huggingface", "path": str(tmp_path)}).values.open()


def test_broken_files_are_named(tmp_path: Path) -> None:
    recipe = {"kind": "huggingface", "path": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(DataError, match="is a pickle, which is never loaded"):
        drafted(recipe).values.open()
    random_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"model\.safetensors is no complete safetensors file"):
        drafted(recipe).values.open()
    file.write_bytes((10**12).to_bytes(8, "little") + whole[8:])
    with pytest.raises(DataError, match=r"model\.safetensors is no complete safetensors file"):
        drafted(recipe).values.open()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("no json", "is no readable index"),
        ("[" * 10_000, "is no readable index"),
        ('{"weight_map": []}', "weight_map should be an object"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "not the plain name of a .safetensors file"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the plain name of a .safetensors file"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors is no complete safetensors file"),
        ('{"weight_map": {"a": "model.safetensors"}}', "model.safetensors should hold a and does not"),
    ],
)
def test_indices_may_only_name_files_in_their_directory(index: str, message: str, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DataError, match=message):
        drafted({"kind": "huggingface", "path": str(tmp_path)}).values.open()


def test_quantised_models_are_refused(tmp_path: Path) -> None:
    table = {**FAMILIES["llama"], "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(DataError, match="quantised weights cannot be trained"):
        drafted({"kind": "huggingface", "config": table})


def test_a_directory_of_weights_may_start_at_random(tmp_path: Path) -> None:
    saved = random_model("llama")
    saved.save_pretrained(tmp_path)
    recipe = {"kind": "huggingface", "path": str(tmp_path), "weights": "random"}
    one, other = (materialize(drafted(recipe, seed)) for seed in (0, 1))
    fresh = materialize(drafted({"kind": "huggingface", "config": FAMILIES["llama"]}))
    for (name, a), b, c in zip(one.named_parameters(), other.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, c), name
        assert ("norm" in name) == torch.equal(a, b)
    with pytest.raises(SpecError, match='"file" needs path'):
        ModelRecipe(kind="huggingface", config={}, weights="file")
    with pytest.raises(SpecError, match="weights is for kind"):
        ModelRecipe(layers=1, hidden=8, heads=2, weights="random")


@pytest.mark.parametrize("family", FAMILIES)
def test_random_values_are_distributed_as_those_of_transformers(family: str) -> None:
    import transformers

    table = dict(FAMILIES[family])
    config = transformers.AutoConfig.for_model(table.pop("model_type"), **table)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mine = build(ModelRecipe(kind="huggingface", config=FAMILIES[family]), vocab=VOCABULARY, seq=LENGTH, seed=0)
    for (name, a), b in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        a, b = a.detach(), b.detach()
        spread = float(b.std())
        if spread == 0:
            assert torch.equal(a, b), name
        else:
            assert float(a.std()) == pytest.approx(spread, rel=0.25), name
            assert abs(float(a.mean())) < 5 * spread / a.numel() ** 0.5, name


SHAPE: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "ffn": 48}


@pytest.mark.parametrize("kind", ["llama", "tied", "gpt", "learned"])
def test_our_models_start_as_when_they_are_built_outright(kind: str) -> None:
    """In any order in which parameters are asked for, whole or in parts."""
    shape = {**SHAPE, "vocab": VOCABULARY, "seq": LENGTH}
    recipe: dict[str, Any] = {**SHAPE, "kind": "gpt" if kind in ("gpt", "learned") else "llama"}
    if kind in ("llama", "tied"):
        expected: torch.nn.Module = Llama(LlamaConfig(kv_heads=4, tied=kind == "tied", **shape), seed=5)
        recipe["tied_embedding"] = kind == "tied"
    else:
        recipe["positions"] = "learned" if kind == "learned" else "rotary"
        expected = GPT(GPTConfig(positions=recipe["positions"], **shape), seed=5)
    wanted = dict(expected.named_parameters())
    for name, value in materialize(drafted(recipe, 5)).named_parameters():
        assert torch.equal(value, wanted[name]), name
    draft = drafted(recipe, 5)
    order = [*list(wanted)[::-1], *list(wanted)[::2]]
    for name in order:
        rows = wanted[name].shape[0]
        bounds = [(rows // 2, rows), *((0, size) for size in wanted[name].shape[1:])]
        assert torch.equal(read(draft, name, *bounds), wanted[name][rows // 2 :]), name
