"""Caches of keys and values while a model trains, and generation of encoder-decoders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.families import catalog
from tests.support.families.training import ADAMW, differences, losses_alone, losses_sharded, plan, quiet
from tests.support.ranks import on_ranks
from torch import nn

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


def deep_llama() -> Any:
    import transformers

    sizes = {**catalog.ARCHITECTURES["llama"].sizes, "num_hidden_layers": 8}
    torch.default_generator.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()


def most_gathered(model: nn.Module, **options: Any) -> int:
    """The largest number of units that are whole when a gradient of the backward exists."""
    units, most = runtime(model).units, 0

    def count(_grad: torch.Tensor) -> None:
        nonlocal most
        most = max(most, sum(unit.buffers[0].full.untyped_storage().nbytes() > 0 for unit in units))

    def watch(_module: nn.Module, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(count)

    handles = [unit.module.register_forward_hook(watch) for unit in units]
    ids = torch.arange(4, 12).view(1, -1)
    model(input_ids=ids, labels=ids, **options).loss.backward()
    for handle in handles:
        handle.remove()
    return most


@pytest.mark.slow
@on_ranks(2)
def test_units_are_freed_behind_a_backward_that_a_cache_holds_keys_of() -> None:
    with quiet():
        model = tw.shard(deep_llama(), plan("zero3", prefetch=1))
        optim = tw.optimizer(model, torch.optim.AdamW, **ADAMW)
        for use_cache in (False, True, False, True):  # the first follows no trace yet
            most = most_gathered(model, use_cache=use_cache)
            assert most <= 4, f"use_cache = {use_cache}: {most} of {len(runtime(model).units)} units are whole at once"
            optim.step()
            optim.zero_grad()


def check_generation(names: list[str], plan_name: str) -> None:
    with quiet():
        for name in names:
            reference = catalog.build(name).eval()
            model = tw.shard(catalog.build(name), plan(plan_name)).eval()
            inputs = {key: value for key, value in catalog.batch(name, 0, 0).items() if key != "labels"}
            options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "bad_words_ids": [[0]]}
            wanted = reference.generate(**inputs, **options)
            assert wanted[:, 1:].count_nonzero() > 0, f"{name} generates padding alone, as NaN would"
            assert torch.equal(model.generate(**inputs, **options), wanted), name
            with tw.full_parameters(model):
                assert torch.equal(model.generate(**inputs, **options), wanted), name


@pytest.mark.slow
def test_an_encoder_decoder_generates() -> None:
    run_ranks(2, check_generation, ["t5", "bart"], "zero3")


@pytest.mark.slow
def test_a_decoder_generates() -> None:
    run_ranks(2, check_generation, ["llama", "mamba2"], "zero3")


DECODERS = [
    "llama",
    "gemma3",
    "gpt2",
    "mixtral",
    "mamba",
    "jamba",
    "recurrent_gemma",
    "lfm2",
    "opt",
    "bloom",
    "gpt_oss",
]

ENCODER_DECODERS = [
    *["t5", "mt5", "longt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "led", "whisper"],
    "speech_to_text",
]
"""Their ``generate()`` calls only the encoder, which reads parameters that the root unit owns."""


@pytest.mark.slow
def test_every_kind_of_model_generates() -> None:
    run_ranks(2, check_generation, DECODERS, "zero3")
    run_ranks(2, check_generation, DECODERS, "hpz")
    run_ranks(2, check_generation, ENCODER_DECODERS, "zero3")
    run_ranks(2, check_generation, ENCODER_DECODERS, "hpz")


def check_recomputation(names: list[str], plan_name: str) -> None:
    with quiet():
        for name in names:
            reference = catalog.build(name)
            expected = losses_alone(name, reference, 2)
            model = tw.shard(catalog.build(name), plan(plan_name, recompute=True))
            losses = losses_sharded(name, model, 2)
            assert losses == pytest.approx(expected, rel=2e-6), name
            assert not differences(model, reference), name


@pytest.mark.slow
def test_recomputation_by_the_plan_leaves_the_cache_out() -> None:
    run_ranks(2, check_recomputation, ["llama", "gemma2", "bart"], "zero3")


@on_ranks(2)
def test_a_cache_that_recomputation_would_append_to_twice_is_refused() -> None:
    import transformers

    with quiet():
        model = tw.shard(catalog.build("llama"), plan("zero3", recompute=True))
        ids = catalog.batch("llama", 0, dist.get_rank())["input_ids"]
        with pytest.raises(UsageError, match=r"got past_key_values = DynamicCache and use_cache = True in a forward"):
            model(input_ids=ids, past_key_values=transformers.DynamicCache(), use_cache=True)
        with torch.no_grad():
            assert model(input_ids=ids, use_cache=True).past_key_values.get_seq_length() == ids.shape[1]


RECOMPUTED = [
    *["llama", "gemma2", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "gpt_oss"],
    *["mixtral", "deepseek_v3", "t5", "mbart", "pegasus", "led", "whisper", "mamba2", "jamba", "lfm2", "bert", "clip"],
]


@pytest.mark.slow
def test_recomputation_of_many_architectures() -> None:
    run_ranks(2, check_recomputation, RECOMPUTED, "zero3")


@on_ranks(2)
def test_a_module_without_parameters_that_models_share_gets_no_hooks() -> None:
    from transformers.activations import gelu

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.activation = nn.Linear(4, 4), gelu

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(self.linear(x))

    other = nn.Sequential(nn.Linear(4, 4), gelu)
    model = tw.shard(nn.Sequential(Block(), Block()), plan("zero3"))
    assert model[0].activation is gelu
    names = list(other.state_dict())
    assert names == ["0.weight", "0.bias"]
    other.load_state_dict(other.state_dict())
    assert not gelu._state_dict_pre_hooks
    assert not gelu._forward_pre_hooks
