"""``ThinwireTrainer`` beside transformers' own ``Trainer`` with DDP: losses, norms, weights, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.frameworks.transformers import (
    LENGTH,
    STEPS,
    Results,
    Text,
    arguments,
    assert_alike,
    build,
    logged,
    over,
    reader,
    tokenizer_of,
    transformers,
)
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks


def train(directory: Path, plan: str | None, resume: Path | None = None, model: Any = None, **options: Any) -> Results:
    """Train under a plan, or with the trainer's own DDP; adapters are saved."""
    kind, trainer_class = transformers.TrainingArguments, transformers.Trainer
    if plan is not None:
        kind, trainer_class, options = ThinwireArguments, ThinwireTrainer, {"plan": plan, **options}
    settings = arguments(directory, kind, **options)
    trainer = trainer_class(model or build(), settings, train_dataset=Text(400), eval_dataset=Text(16))
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if model is not None:
        trainer.save_model()
    return Results.of(trainer)


@pytest.mark.parametrize(
    ("world", "settings", "plans"),
    [
        (2, [(4, 0.1)], ["zero3"]),
        pytest.param(4, [(4, 0.1)], ["zero3"], marks=pytest.mark.slow),
        pytest.param(4, [(1, 0.1), (4, 1e9), (4, 0.1)], ["zero3", "zero1"], marks=pytest.mark.slow),
    ],
)
@on_ranks("world", timeout=300)
def test_it_trains_as_ddp_does(
    tmp_path: Path, world: int, settings: Sequence[tuple[int, float]], plans: Sequence[str]
) -> None:
    for accumulation, clip in settings:
        options = {"gradient_accumulation_steps": accumulation, "max_grad_norm": clip, "eval_strategy": "steps",
                   "eval_steps": 7, "gradient_checkpointing": accumulation == 1}  # fmt: skip
        want = train(tmp_path, None, **options)
        assert len(want.logs) > STEPS
        for plan in plans:
            assert_alike(train(tmp_path, plan, **options), want)


# ------------------------------------------------------------------------------------------------------ checkpoints


def save_and_expect(directory: Path, plan: str) -> Results:
    return train(directory, plan, per_device_train_batch_size=2, max_steps=12, save_strategy="steps", save_steps=6)


def resume_elsewhere(directory: Path, plan: str) -> Results:
    checkpoint = directory / "checkpoint-6"
    return train(directory, plan, checkpoint, per_device_train_batch_size=4, max_steps=12, save_strategy="no")


@pytest.mark.slow
def test_four_ranks_save_and_two_resume(tmp_path: Path) -> None:
    expected = run_ranks(4, save_and_expect, tmp_path, "zero3", timeout=200)[0]
    got = run_ranks(2, resume_elsewhere, tmp_path, "zero1", timeout=200)[0]
    tail = [entry for entry in expected.logs if "loss" in entry]
    for one, other in zip([entry for entry in got.logs if "loss" in entry][6:], tail[6:], strict=True):
        assert one["step"] == other["step"]
        assert math.isclose(one["loss"], other["loss"], rel_tol=1e-4)
        assert math.isclose(one["grad_norm"], other["grad_norm"], rel_tol=1e-3)
    torch.testing.assert_close(got.weights, expected.weights, rtol=1e-4, atol=1e-5)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    for name, value in again.state_dict().items():
        assert torch.equal(value, expected.weights[name]), name
    files = {path.name for path in (tmp_path / "checkpoint-12").iterdir()}
    assert {"config.json", "model.safetensors", "trainer_state.json", "thinwire"} <= files


# ------------------------------------------------------------------------------------------------------ other loops


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world", timeout=120)
def test_bytes_are_the_programs_and_train_can_be_called_again(tmp_path: Path, world: int) -> None:
    settings = arguments(tmp_path, ThinwireArguments, plan="zero3", max_steps=3, gradient_accumulation_steps=2)
    trainer = ThinwireTrainer(build(), settings, train_dataset=Text(400))
    trainer.train()
    tw.traffic(trainer.model)
    trainer.args.max_steps = 4
    trainer.train()
    sent = sum(sum(by_scope.values()) for by_scope in tw.traffic(trainer.model).values())
    programs = runtime(trainer.model).schedule.programs
    by_lane = programs.program(2, clip=True).traffic()
    assert sent == 4 * sum(sum(by_scope.values()) for by_scope in by_lane.values())
    assert trainer.state.global_step == 4


# ------------------------------------------------------------------------------------------------------ refusals


def test_a_plan_for_sequences_of_unknown_length_is_refused(tmp_path: Path) -> None:
    settings = arguments(tmp_path, ThinwireArguments, plan="auto", max_steps=1)
    with pytest.raises(UsageError, match='plan="auto": the length of sequences is unknown'):
        ThinwireTrainer(build(), settings).create_optimizer()


@on_ranks(2)
def test_evaluation_in_another_dtype_is_refused(tmp_path: Path) -> None:
    options = {"plan": "zero3", "max_steps": 1, "bf16_full_eval": True}
    settings = arguments(tmp_path, ThinwireArguments, **options)
    trainer = ThinwireTrainer(build(), settings, train_dataset=Text(400), eval_dataset=Text(16))
    trainer.train()
    with pytest.raises(UsageError, match=r"^bf16_full_eval=True: the trainer would convert the weights for good"):
        trainer.evaluate()


# ------------------------------------------------------------------------------------------------------ other settings


def in_half_precision(directory: Path, scale: float, resume: Path | None = None) -> Results:
    settings = arguments(
        directory, ThinwireArguments, plan="zero3", max_steps=12, fp16=True, save_strategy="steps", save_steps=8,
        warmup_steps=0,
    )  # fmt: skip
    trainer = ThinwireTrainer(build(), settings, train_dataset=Text(400))
    trainer.create_optimizer()
    assert trainer.loss_scale is not None
    trainer.loss_scale.restore({"value": scale, "finite_steps": 0, "skipped_steps": 0})
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return Results.of(trainer)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_float16_scales_losses_and_reports_skipped_steps(tmp_path: Path) -> None:
    """Beside float32; with steps that overflow, and resumed after eight steps."""
    whole = train(tmp_path / "whole", "zero3", max_steps=12, warmup_steps=0)
    half = in_half_precision(tmp_path / "half", 2.0**16)
    overflow = in_half_precision(tmp_path / "overflow", 2.0**20)
    resumed = in_half_precision(tmp_path / "resumed", 2.0**16, tmp_path / "overflow/checkpoint-8")
    for one, other in zip(half.logs[:12], whole.logs[:12], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)
        assert one["skipped_steps"] == 0
    skipped = int(overflow.logs[11]["skipped_steps"])
    assert 1 <= skipped < 8
    assert overflow.logs[11]["loss_scale"] == 2.0 ** (20 - skipped)
    rates = [entry["learning_rate"] for entry in overflow.logs[:12]]
    assert rates[skipped:] == [entry["learning_rate"] for entry in whole.logs[: 12 - skipped]], "schedules wait"
    for one, other in zip(resumed.logs[8:12], overflow.logs[8:12], strict=True):
        assert one["loss_scale"] == other["loss_scale"]
        assert one["skipped_steps"] == skipped
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


class Clipping(transformers.TrainerCallback):  # type: ignore[misc]
    """Clips by the accelerator, which divides by the loss scale before."""

    trainer: Any

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        self.trainer.accelerator.clip_grad_norm_(kwargs["model"].parameters(), 1e9)


@on_ranks(2)
def test_float16_scales_losses_of_each_training_once(tmp_path: Path) -> None:
    settings = arguments(tmp_path, ThinwireArguments, max_steps=2, fp16=True, max_grad_norm=0.0)
    clipping = Clipping()
    trainer = ThinwireTrainer(model_init=build, args=settings, train_dataset=Text(8), callbacks=[clipping])
    clipping.trainer = trainer
    norms = []
    for _ in range(2):
        trainer.train()
        norms.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
    assert norms[1] == pytest.approx(norms[0])


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_compiled_models_train_as_under_ddp(tmp_path: Path) -> None:
    options = {"max_steps": 4, "torch_compile": True, "torch_compile_backend": "aot_eager"}
    want = train(tmp_path / "ddp", None, max_steps=4)
    assert_alike(train(tmp_path / "compiled", "zero3", **options), want)


def automatic(directory: Path) -> tuple[str, list[float]]:
    """The plan that ``auto`` chooses, and losses under it."""
    settings = arguments(directory, ThinwireArguments, plan="auto", sequence_length=LENGTH, max_steps=8)
    trainer = ThinwireTrainer(build(), settings, train_dataset=Text(400))
    trainer.train()
    plan = runtime(trainer.model).plan
    assert (plan.name, plan.compute_dtype, plan.micro_batch, plan.world) == ("auto", "float32", 2, 4)
    return plan.to_toml(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_a_plan_is_chosen_for_the_cluster(tmp_path: Path) -> None:
    (plan, losses), *others = run_ranks(4, automatic, tmp_path, timeout=250)
    assert all(other == (plan, losses) for other in others)
    assert len(losses) == 8
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------------------ adapters, TRL


def adapters(directory: Path, plan: str | None) -> Results:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    return train(directory, plan, model=model, max_steps=5)


def compare_adapters(directory: Path) -> None:
    want = adapters(directory / "ddp", None)
    for plan in ("zero3", "zero1"):
        assert_alike(adapters(directory / plan, plan), want)


@pytest.mark.slow
def test_adapters_train_as_under_ddp(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_ranks(4, compare_adapters, tmp_path, timeout=200)
    want = load_file(tmp_path / "ddp" / "adapter_model.safetensors")
    for plan in ("zero3", "zero1"):
        got = load_file(tmp_path / plan / "adapter_model.safetensors")
        assert got.keys() == want.keys()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


TEXT = ROOT / "README.md"


def supervised(directory: Path, plan: str | None) -> list[dict[str, float]]:
    """Losses and norms of TRL's SFTTrainer on sentences of a real text."""
    import trl

    text = TEXT.read_text()
    data = {"text": [text[i : i + 60] for i in range(0, 6000, 60)]}
    return logged(by_trl(trl.SFTTrainer, trl.SFTConfig, directory, plan, data, models=1), "loss", "grad_norm")


def preferences(directory: Path, plan: str | None) -> list[dict[str, float]]:
    """Losses, norms and margins of TRL's DPOTrainer, with a reference model that stays whole."""
    import trl

    text = TEXT.read_text()
    parts = [text[i : i + 20] for i in range(0, 2400, 20)]
    data = {"prompt": parts[0::3], "chosen": parts[1::3], "rejected": parts[2::3]}
    trainer = by_trl(trl.DPOTrainer, trl.DPOConfig, directory, plan, data, models=2)
    return logged(trainer, "loss", "grad_norm", "rewards/margins")


def by_trl(
    kind: type, settings: type, directory: Path, plan: str | None, data: dict[str, list[str]], *, models: int
) -> Any:
    """One of TRL's trainers after five steps, with a tokenizer of characters."""
    import datasets

    tokenizer = tokenizer_of(TEXT.read_text())
    trainer = over(plan, kind)(
        *(reader(len(tokenizer)) for _ in range(models)),
        arguments(directory, settings, max_steps=5, max_length=64, bf16=False),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
@pytest.mark.parametrize("course", [supervised, preferences])
@on_ranks(2, timeout=250)
def test_trainers_of_trl(tmp_path: Path, course: Callable[[Path, str | None], list[dict[str, float]]]) -> None:
    want, got = course(tmp_path, None), course(tmp_path, "zero3")
    assert len(got) == 5
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=1e-6)
