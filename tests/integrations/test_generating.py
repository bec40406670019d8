"""Trainers that generate between their steps, beside their own DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.frameworks.transformers import arguments, logged, over, reader, tokenizer_of, transformers
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks

import thinwire as tw
from thinwire.sharding.runtime import generating
from thinwire.testing import run_ranks

trl = pytest.importorskip("trl")

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("default")]

STEPS = 4


def generate_unevenly(path: str) -> None:
    """Each rank generates another number of tokens, in every way to keep parameters."""
    model = transformers.LlamaForCausalLM.from_pretrained(path)
    prompt, rank = torch.arange(4)[None] + dist.get_rank(), dist.get_rank()
    options = {"max_new_tokens": 4 + 3 * rank, "do_sample": False, "num_beams": 1 + rank % 2}
    wanted = model.generate(prompt, **options)
    tw.shard(model, tw.Plan.preset("zero3", nodes=2, local=2, compute_dtype="float32"))
    for keep in (None, "whole", "secondary", "nothing"):
        with tw.generating(model, keep=keep):
            assert torch.equal(model.generate(prompt, **options), wanted), keep
            assert torch.equal(model.generate(prompt, **options, synced_gpus=False), wanted), keep
    assert "generate" not in model.__dict__


@pytest.mark.slow
def test_ranks_may_generate_different_numbers_of_tokens(tmp_path: Path) -> None:
    reader(len(parts()[1])).save_pretrained(tmp_path / "model")
    run_ranks(4, generate_unevenly, str(tmp_path / "model"))


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward that random texts differ in."""
    return [sum(symbol in "aeiou" for symbol in text) / 12 for text in completions]


def parts() -> tuple[Any, Any]:
    """Prompts of a real text, and a tokenizer of its characters."""
    import datasets

    text = (ROOT / "README.md").read_text()
    prompts = [text[i : i + 12] for i in range(0, 1200, 12)]
    tokenizer = tokenizer_of(text)
    tokenizer.padding_side = "left"
    return datasets.Dataset.from_dict({"prompt": prompts}), tokenizer


def relative(directory: Path, plan: str | None, **options: Any) -> Any:
    """Policy gradients relative to a group."""
    settings = arguments(
        directory, trl.GRPOConfig, max_steps=STEPS, bf16=False, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=12, beta=0.04, num_iterations=2, **options,
    )  # fmt: skip
    return trained(trl.GRPOTrainer, plan, settings, reward_funcs=vowels)


def leave_one_out(directory: Path, plan: str | None, **options: Any) -> Any:
    settings = arguments(
        directory, trl.RLOOConfig, max_steps=STEPS, bf16=False, per_device_train_batch_size=4, num_generations=4,
        max_completion_length=12, **options,
    )  # fmt: skip
    return trained(trl.RLOOTrainer, plan, settings, reward_funcs=vowels)


def online(directory: Path, plan: str | None, **options: Any) -> Any:
    """Preferences between completions that the model makes on the way."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    settings = arguments(
        directory, OnlineDPOConfig, max_steps=STEPS, bf16=False, per_device_train_batch_size=4, max_new_tokens=12,
        max_length=64, **options,
    )  # fmt: skip
    return trained(OnlineDPOTrainer, plan, settings, reward_funcs=vowels)


def trained(kind: type, plan: str | None, settings: Any, **options: Any) -> Any:
    """A trainer at the end of its training."""
    data, tokenizer = parts()
    model = transformers.LlamaForCausalLM.from_pretrained(Path(settings.output_dir, "model"))
    trainer = over(plan, kind)(model=model, args=settings, train_dataset=data, processing_class=tokenizer, **options)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize("course", [relative, leave_one_out, online])
@on_ranks(2, timeout=280)
def test_trainers_that_generate(tmp_path: Path, course: Callable[..., Any]) -> None:
    if dist.get_rank() == 0:
        reader(len(parts()[1])).save_pretrained(tmp_path / "model")  # from which trainers also make their references
    dist.barrier()
    torch.manual_seed(0)
    results = []
    for plan in (None, "zero3"):
        trainer = course(tmp_path, plan)
        results.append(logged(trainer, "loss", "grad_norm"))
        if plan is not None:
            tw.traffic(trainer.model)
            prompt = torch.arange(4)[None]
            trainer.model.generate(prompt, max_new_tokens=6, do_sample=False)
            sent = tw.traffic(trainer.model)["gather"]["inside"]
            with torch.no_grad():
                trainer.model(prompt)
            assert sent == tw.traffic(trainer.model)["gather"]["inside"] > 0
    want, got = results
    assert len(got) == STEPS
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, rel=5e-4, abs=1e-6)


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sources and targets."""

    def __init__(self) -> None:
        self.tokens = torch.randint(20, 64, (8, 2, 6), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        source, target = self.tokens[index]
        return {"input_ids": source, "labels": target}


def translated(directory: Path, plan: str | None) -> Any:
    """Tokens that an evaluation generates, of sequences of different lengths, after one step."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = list(range(1, 20))
    settings = arguments(
        directory, transformers.Seq2SeqTrainingArguments, max_steps=1, predict_with_generate=True,
        generation_max_length=24, per_device_eval_batch_size=1,
    )  # fmt: skip
    trainer = over(plan, transformers.Seq2SeqTrainer)(model, settings, train_dataset=Pairs())
    trainer.train()
    return trainer.predict(Pairs()).predictions


@pytest.mark.slow
@on_ranks(2, timeout=100)
def test_evaluations_generate_with_little_memory_as_under_ddp(tmp_path: Path) -> None:
    wanted = translated(tmp_path, None)
    generating._free_memory = lambda device: ("all of it", 0)
    assert (translated(tmp_path, "zero3") == wanted).all()
