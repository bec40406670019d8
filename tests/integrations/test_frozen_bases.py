"""LoRA under Trainer, Lightning and accelerate: checkpoints carry the adapters, and rotation leaves the base alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks

import thinwire as tw
from thinwire.testing import run_ranks

pl = pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.support.frameworks.lightning import trainer  # noqa: E402
from tests.support.frameworks.stateful import weights  # noqa: E402

TOKENS = (torch.arange(16) + torch.arange(64)[:, None]) % 64


def build(seed: int) -> Any:
    """A small Llama with adapters, whose first base differs from seed to seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(LlamaForCausalLM(config), adapters)


def sums(model: torch.nn.Module) -> list[float]:
    """The sum of each parameter; of frozen shares and trained ones alike."""
    return [float(value.double().sum()) for value in tw.full_state_dict(model).values()]


def by_trainer(directory: Path, plan: str, seed: int, *, resumes: bool) -> list[float]:
    from tests.support.frameworks.transformers import arguments

    from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer

    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "max_steps": 6}
    settings = arguments(directory, ThinwireArguments, plan=plan, **options)
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    run = ThinwireTrainer(build(seed), settings, train_dataset=data)
    if resumes:
        run.train(resume_from_checkpoint=str(directory / "checkpoint-6"))
    else:
        run.train()
    return sums(run.model)


class Adapted(pl.LightningModule):
    """A model with adapters in a module of Lightning."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model, self.losses = build(seed), list[float]()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.05)


DATA = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(TOKENS), batch_size=4)


def by_lightning(directory: Path, plan: str, seed: int, *, resumes: bool) -> list[float]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from thinwire.integrations.lightning import ThinwireStrategy

    saving = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=2, save_top_k=1)
    model = Adapted(seed)
    fitting = trainer(2, ThinwireStrategy(plan), str(directory), max_steps=6, callbacks=[saving],
                      enable_checkpointing=True)  # fmt: skip
    fitting.fit(model, DATA, ckpt_path=str(directory / "step=6.ckpt") if resumes else None)
    return sums(model)


@pytest.mark.slow
@on_ranks(2)
def test_adapters_in_lightning_equal_ddp(tmp_path: Path) -> None:
    results = []
    for strategy in ("ddp", "thinwire"):
        model = Adapted(0)
        trainer(2, strategy, str(tmp_path), gradient_clip_val=1.0, accumulate_grad_batches=2).fit(model, DATA)
        results.append((model.losses, weights(model)))
    (reference, whole), (losses, sharded) = results
    assert losses == pytest.approx(reference, rel=1e-5)
    assert losses[-1] < losses[0]
    assert sum("lora_" in name for name in whole) == 8
    torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-5)


def by_accelerate(directory: Path, plan: str, seed: int, *, resumes: bool) -> list[float]:
    from accelerate.utils import ProjectConfiguration
    from tests.support.frameworks.accelerate import job

    from thinwire.integrations.accelerate import ThinwireAccelerator

    with job():
        project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=1)
        accelerator = ThinwireAccelerator(plan=plan, cpu=True, project_config=project)
        model = build(seed)
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        if resumes:
            accelerator.load_state(str(directory / "checkpoints" / "checkpoint_1"))
        for _ in range(0 if resumes else 2):
            accelerator.backward(model(input_ids=TOKENS[:4], labels=TOKENS[:4]).loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state()
        return sums(model)


@pytest.mark.slow
@pytest.mark.parametrize("course", [by_trainer, by_lightning, by_accelerate])
def test_a_checkpoint_has_the_adapters_and_rotation_keeps_the_base(
    tmp_path: Path, course: Callable[..., list[float]]
) -> None:
    trained, adapters, frozen = run_ranks(2, course_of, course, tmp_path, "zero3", 0, False, timeout=200)[0]
    (base,) = tmp_path.rglob("frozen-*")
    (state,) = (path.parent for path in tmp_path.rglob("thinwire-manifest.json") if path.parent != base)
    assert adapters < size(state) <= 1.05 * adapters + 100_000 < frozen < size(base)
    resumed = run_ranks(2, course_of, course, tmp_path, "zero1", 3, True, timeout=200)[0]
    assert resumed == (trained, adapters, frozen)  # the base is the checkpoint's, whatever the model began with


def course_of(
    course: Callable[..., list[float]], directory: Path, plan: str, seed: int, resumes: bool
) -> tuple[list[float], int, int]:
    """Sums of all weights at the end; bytes of what a checkpoint has of adapters, and of frozen parameters."""
    parameters = list(build(seed).parameters())
    adapters = 3 * 4 * sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = 4 * sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return course(directory, plan, seed, resumes=resumes), adapters, frozen


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
