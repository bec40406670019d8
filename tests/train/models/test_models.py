"""Models: the same numbers as transformers' own, a loss that matches torch's, initial weights that repeat."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.families.tiny import FAMILIES
from tests.support.training.drafted import build
from torch import nn

from thinwire.errors import DataError, SpecError
from thinwire.spec.models.model import ModelSpec
from thinwire.spec.recipe import ModelRecipe
from thinwire.train.models.common import IGNORED, cross_entropy
from thinwire.train.models.flops import attention_width, flops_per_token, matrix_elements
from thinwire.train.models.gpt import GPT, GPTConfig
from thinwire.train.models.huggingface import HuggingFaceCausal
from thinwire.train.models.llama import Llama, LlamaConfig
from thinwire.train.trainer import undecayed_names

LLAMA = LlamaConfig(vocab=97, hidden=48, layers=3, heads=4, kv_heads=2, ffn=80, seq=32)
NEOX = GPTConfig(vocab=97, hidden=48, layers=3, heads=4, ffn=192, seq=32, rotary_share=0.5)
IDS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
LABELS = IDS.roll(-1, 1)


def perturbed(model: nn.Module) -> nn.Module:
    """Give norms and biases values that are not 1 and 0, so that a missing one shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_llama_equals_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ours = perturbed(Llama(LlamaConfig(**{**LLAMA.__dict__, "tied": tied})))
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    theirs = transformers.LlamaForCausalLM(config)
    state = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parallel", [True, False])
def test_gpt_equals_transformers_neox(parallel: bool) -> None:
    transformers = pytest.importorskip("transformers")
    ours = perturbed(GPT(GPTConfig(**{**NEOX.__dict__, "parallel_residual": parallel})))
    config = transformers.GPTNeoXConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        use_parallel_residual=parallel,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    theirs = transformers.GPTNeoXForCausalLM(config).eval()
    state = {k if k.startswith("lm_head") else f"gpt_neox.{k}": v for k, v in ours.state_dict().items()}
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(IDS).logits, theirs(IDS).logits, rtol=1e-4, atol=1e-5)


def test_learned_positions_tell_places_apart() -> None:
    model = GPT(GPTConfig(**{**NEOX.__dict__, "positions": "learned"}))
    logits = model(torch.zeros(1, 8, dtype=torch.int64)).logits
    assert not torch.allclose(logits[0, 0], logits[0, 1])


@pytest.mark.parametrize("make", [lambda: Llama(LLAMA), lambda: GPT(NEOX)], ids=["llama", "gpt"])
def test_models_do_not_see_the_future(make: object) -> None:
    model = make()  # type: ignore[operator]
    changed = IDS.clone()
    changed[:, 12:] = 0
    torch.testing.assert_close(model(IDS).logits[:, :12], model(changed).logits[:, :12])


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = Llama(LLAMA, seed=5)
    torch.manual_seed(2)
    same, other = Llama(LLAMA, seed=5), Llama(LLAMA, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    std = float(first.layers[0].mlp.down_proj.weight.detach().std())
    assert std == pytest.approx(0.02 / 6**0.5, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_cross_entropy_equals_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.train.models.common.HOST_LOSS_CHUNK", 150)  # several chunks, one of them short
    generator = torch.Generator().manual_seed(0)
    ours = (5 * torch.randn(3, 7, 50, generator=generator)).to(dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.randint(0, 50, (3, 7), generator=generator)
    labels[0, :3] = IGNORED
    loss = cross_entropy(ours, labels)
    expected = F.cross_entropy(theirs.float().reshape(-1, 50), labels.reshape(-1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_cross_entropy_of_no_labels_is_nan() -> None:
    assert cross_entropy(torch.zeros(2, 5), torch.full((2,), IGNORED)).isnan()


@pytest.mark.parametrize("kind", ["llama", "gpt"])
@pytest.mark.parametrize("tied", [False, True])
def test_counts_agree_with_the_planners(kind: str, tied: bool) -> None:
    recipe = ModelRecipe(kind=kind, layers=3, hidden=48, heads=4, ffn=100, tied_embedding=tied)
    model = build(recipe, vocab=97, seq=32, seed=0)
    shape = ModelSpec(kind=kind, layers=3, hidden=48, heads=4, ffn=100, vocab=97, seq=32, tied_embedding=tied)
    assert flops_per_token(model, 32) == shape.flops_per_token(32)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters


CONFIGS = {name: FAMILIES[name] for name in ("llama", "gpt2")} | {
    "mixtral": FAMILIES["mixtral"] | {"output_router_logits": True}
}


@pytest.mark.parametrize("name", CONFIGS)
def test_huggingface_models_from_a_config(name: str) -> None:
    pytest.importorskip("transformers")
    recipe = ModelRecipe(kind="huggingface", config=CONFIGS[name])
    model = build(recipe, vocab=97, seq=24, seed=0)
    assert isinstance(model, HuggingFaceCausal)
    output = model(IDS, LABELS)
    expected = F.cross_entropy(output.logits.float().flatten(0, 1), LABELS.flatten())
    if name == "mixtral":
        assert output.loss > expected
        torch.testing.assert_close(model.eval()(IDS, LABELS).loss, expected)
    else:
        torch.testing.assert_close(output.loss, expected)
    output.loss.backward()


def test_huggingface_shapes_are_known_to_the_planner() -> None:
    shape = ModelRecipe(kind="huggingface", config=CONFIGS["llama"]).shape(vocab=97, seq=24)
    assert (shape.kind, shape.layers, shape.hidden, shape.heads, shape.kv_heads) == ("llama", 2, 32, 4, 2)
    assert (shape.ffn, shape.vocab, shape.seq) == (56, 97, 24)
    mixture = ModelRecipe(kind="huggingface", config=CONFIGS["mixtral"]).shape(vocab=97, seq=24)
    assert (mixture.experts, mixture.active_experts, mixture.expert_ffn) == (4, 2, 56)


def test_huggingface_flops_count_matrices() -> None:
    pytest.importorskip("transformers")
    models = {
        name: build(ModelRecipe(kind="huggingface", config=config), vocab=97, seq=24, seed=0)
        for name, config in CONFIGS.items()
    }
    attention = 2 * 32 * 32 + 2 * 32 * 16
    head = 32 * 97
    assert matrix_elements(models["llama"]) == 2 * (attention + 3 * 32 * 56) + head
    assert matrix_elements(models["gpt2"]) == 2 * (4 * 32 * 32 + 2 * 32 * 128) + head
    assert matrix_elements(models["mixtral"]) == 2 * (attention + 2 * 3 * 32 * 56 + 4 * 32) + head


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"path": "/nowhere"}, r"no such file; .* \(nothing is downloaded\)"),
        ({"config": "/nowhere.json"}, r"/nowhere\.json: .*\n.* no such file"),
        ({"config": {"hidden_size": 3}}, "no model_type"),
        ({"config": {"model_type": "no-such-model"}}, "gives no model"),
        ({"config": {"model_type": "t5"}}, "'t5' describes an encoder-decoder, which needs pairs of texts"),
        ({"config": {"model_type": "albert"}}, "'albert' describes an encoder, which fills in masked tokens"),
        ({"config": {"model_type": "xlnet"}}, "'xlnet' describes an encoder, which fills in masked tokens"),
        ({"config": {"model_type": "vit"}}, "'vit' describes no language model"),
        ({"config": {"model_type": "blip"}}, "'blip' takes pixel_values in every batch"),
        (
            {"config": {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
            "is an encoder, whose tokens see those that they should predict",
        ),
    ],
)
def test_huggingface_errors(recipe: dict[str, object], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises((DataError, SpecError), match=message):
        build(ModelRecipe(kind="huggingface", **recipe), vocab=97, seq=24, seed=0)


def test_a_huggingface_configuration_of_many_brackets(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("[" * 10_000)
    with pytest.raises(SpecError, match=r"config\.json: .*\n.*cannot be read as .*: maximum recursion"):
        build(ModelRecipe(kind="huggingface", path=str(tmp_path)), vocab=97, seq=24, seed=0)


def test_a_model_without_attention_has_no_attention_to_count() -> None:
    pytest.importorskip("transformers")
    config = {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 97, "state_size": 4}
    model = build(ModelRecipe(kind="huggingface", config=config), vocab=97, seq=24, seed=0)
    assert attention_width(model) == 0
    assert flops_per_token(model, 24) > 0


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1},
         3 * 4 * (16 + 8 + 12) // 2),
        ({"model_type": "lfm2", "full_attn_idxs": [1]}, 32),
        ({"model_type": "qwen3", "head_dim": 16}, 3 * 4 * 16),
    ],
)  # fmt: skip
def test_attention_is_as_wide_as_its_queries_and_values(config: dict[str, object], width: int) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = build(ModelRecipe(kind="huggingface", config=sizes | config), vocab=97, seq=24, seed=0)
    assert attention_width(model) == width


def test_models_too_small_for_the_data() -> None:
    recipe = ModelRecipe(layers=1, hidden=16, heads=2, vocab=50, max_seq=8)
    with pytest.raises(SpecError) as caught:
        build(recipe, vocab=97, seq=24, seed=0)
    assert len(caught.value.problems) == 2


def test_norms_and_vectors_are_not_decayed() -> None:
    names = undecayed_names(GPT(NEOX))
    assert all("norm" in name or name.endswith("bias") for name in names)
    assert "layers.0.attention.dense.weight" not in names
    assert "embed_in.weight" not in names
    assert set(undecayed_names(Llama(LLAMA))) == {
        "norm.weight",
        *(f"layers.{i}.{name}.weight" for i in range(3) for name in ("input_layernorm", "post_attention_layernorm")),
    }
