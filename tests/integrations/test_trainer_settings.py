"""What people set in ``TrainingArguments`` every day, beside transformers' own DDP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.frameworks.transformers import (
    VOCABULARY,
    Results,
    Text,
    arguments,
    assert_alike,
    build,
    over,
)
from tests.support.ranks import on_ranks
from torch.optim import lr_scheduler as schedulers

import thinwire as tw
from thinwire.errors import UsageError

transformers = pytest.importorskip("transformers")

from thinwire.integrations.transformers import ThinwireArguments, ThinwireTrainer  # noqa: E402

Row = dict[str, torch.Tensor]


class Sentences(torch.utils.data.Dataset[Row]):
    """Random tokens, in rows of 3 to 11. Their number divides by nothing."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(0, VOCABULARY, (3 + i % 9,), generator=generator) for i in range(number)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.rows[index], "labels": self.rows[index].clone()}


def padded(rows: Sequence[Row]) -> Row:
    """A batch of rows of unequal length."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


def shares(predicted: Any) -> dict[str, float]:
    """Metrics that depend on how many predictions of all ranks arrive, and on their values."""
    logits = predicted.predictions
    return {"rows": len(logits), "mean": float(abs(logits[logits != -100]).mean())}


Settings = Mapping[str, Any]

EVERY_TWO: Settings = {"eval_strategy": "steps", "eval_steps": 2}
WHOLE_EPOCHS: Settings = {"max_steps": -1, "num_train_epochs": 2}

SETTINGS: dict[str, Settings] = {
    "rows grouped by length": {"train_sampling_strategy": "group_by_length"},
    "smoothed labels": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 3},
    "uneven last batches": {**WHOLE_EPOCHS, "gradient_accumulation_steps": 4},
    "last batches dropped": {**WHOLE_EPOCHS, "dataloader_drop_last": True, "gradient_accumulation_steps": 2},
    "means of each rank": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    "predictions gathered step by step": {**EVERY_TWO, "eval_accumulation_steps": 1},
    "rates that wait for a plateau": {
        **EVERY_TWO, "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
    },
    "noise on embeddings": {"neftune_noise_alpha": 5.0},
    "another optimizer": {"optim": "rmsprop"},
}  # fmt: skip


def train(directory: Path, plan: str | None, settings: Settings) -> Results:
    """Train on sentences under a plan, or with the trainer's own DDP."""
    trainer = over(plan)(
        build(),
        arguments(directory, transformers.TrainingArguments, **{"max_steps": 6, **settings}),
        data_collator=padded,
        train_dataset=Sentences(45),
        eval_dataset=Sentences(13),
        compute_metrics=shares,
    )
    trainer.train()
    return Results.of(trainer)


@pytest.mark.slow
@on_ranks(2, timeout=600)
def test_everyday_settings_train_as_under_ddp(tmp_path: Path) -> None:
    for name, settings in SETTINGS.items():
        want, got = (train(tmp_path / str(plan), plan, settings) for plan in (None, "zero3"))
        assert want.logs, name
        assert_alike(got, want)
        for one, other in zip(got.logs, want.logs, strict=True):
            for key in one.keys() & {"eval_rows", "eval_mean"}:
                assert one[key] == pytest.approx(other[key], rel=1e-4), (name, key)


# ------------------------------------------------------------------------------------------------------ optimizers


class OwnOptimizer(transformers.Trainer):
    """Makes an optimizer of its own."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer


def with_optimizers(directory: Path, plan: str | None, kind: str) -> list[torch.Tensor]:
    """Train with an optimizer and a schedule that are made before the trainer, or by a subclass of it."""

    def trainer_of(plan: str | None, rate: float) -> Any:
        model, optimizers = build(), (None, None)
        if kind != "of a subclass":
            part = model.parameters() if kind == "whole" else model.model.layers.parameters()
            optimizer = torch.optim.AdamW(part, lr=rate, eps=1e-2)
            optimizers = optimizer, schedulers.StepLR(optimizer, 2, 0.5)
        options = {"max_steps": 6, "max_grad_norm": 0.0, "save_steps": 3, "save_strategy": "steps"}
        return over(plan, OwnOptimizer if kind == "of a subclass" else transformers.Trainer)(
            model, arguments(directory, transformers.TrainingArguments, **options), data_collator=padded,
            train_dataset=Sentences(45), optimizers=optimizers,
        )  # fmt: skip

    trainer = trainer_of(plan, 1e-2)
    trainer.train()
    whole = list(Results.of(trainer).weights.values())
    if plan is not None:  # once more from the middle
        again = trainer_of("zero1", 3.0)
        again.train(resume_from_checkpoint=str(directory / "checkpoint-3"))
        assert all(map(torch.equal, Results.of(again).weights.values(), whole)), kind
    return [*whole, torch.tensor([entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry])]


@pytest.mark.slow
@on_ranks(2)
def test_optimizers_of_ones_own_train_as_under_ddp_and_resume(tmp_path: Path) -> None:
    for kind in ("whole", "a part", "of a subclass"):
        want, got = (with_optimizers(tmp_path / kind / str(plan), plan, kind) for plan in (None, "zero3"))
        assert all(map(torch.equal, got, want)), kind


def out_of_memory(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Fails as a GPU does that has room for three rows."""
    rows = (args[0] if args else kwargs["hidden_states"]).shape[0]
    if rows > 3:
        raise RuntimeError("CUDA out of memory.")


def with_little_memory(directory: Path, plan: str | None) -> tuple[list[torch.Tensor], int]:
    model = build()
    model.model.layers[1].register_forward_pre_hook(out_of_memory, with_kwargs=True)
    options = {"max_steps": 3, "max_grad_norm": 0.0, "auto_find_batch_size": True, "per_device_train_batch_size": 5}
    made = arguments(directory, transformers.TrainingArguments, **options)
    trainer = over(plan)(model, made, data_collator=padded, train_dataset=Sentences(45))
    trainer.train()
    return list(Results.of(trainer).weights.values()), trainer.state.train_batch_size


@on_ranks(2)
def test_a_batch_size_is_found_as_under_ddp(tmp_path: Path) -> None:
    want, size = with_little_memory(tmp_path / "ddp", None)
    for plan in ("zero3", "zero1"):
        got, found = with_little_memory(tmp_path / plan, plan)
        assert found == size <= 3
        assert all(map(torch.equal, got, want)), plan


# ------------------------------------------------------------------------------------------------------ checkpoints


def trained(directory: Path, plan: str | None, resume: Any = None, **options: Any) -> Any:
    callbacks = options.pop("callbacks", [])
    settings = arguments(directory, transformers.TrainingArguments, **options)
    trainer = over(plan)(build(), settings, train_dataset=Text(400), eval_dataset=Text(16), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    dist.barrier()
    return trainer


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint-*"))


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_weights_alone_resume_as_under_ddp_and_states_of_ddp_are_refused(tmp_path: Path) -> None:
    """After a checkpoint of ``save_only_model``; and after a checkpoint of DDP."""
    losses = []
    for plan in (None, "zero3"):
        place = tmp_path / str(plan)
        trained(place, plan, max_steps=4, save_strategy="steps", save_steps=2, save_only_model=True)
        again = trained(place, plan, str(place / "checkpoint-2"), max_steps=4)
        losses.append([entry["loss"] for entry in again.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    trained(tmp_path / "whole", None, max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(UsageError, match=r"optimizer\.pt was saved without thinwire"):
        trained(tmp_path / "whole", "zero3", str(tmp_path / "whole/checkpoint-2"), max_steps=4)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_the_latest_of_the_kept_checkpoints_resumes(tmp_path: Path) -> None:
    """Where the last of them is gone."""
    whole = trained(tmp_path, "zero3", max_steps=7, save_strategy="steps", save_steps=2, save_total_limit=2)
    assert checkpoints(tmp_path) == ["checkpoint-6", "checkpoint-7"]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path / "checkpoint-7")
    dist.barrier()
    again = trained(tmp_path, "zero3", True, max_steps=7)
    want, got = ([entry["loss"] for entry in run.state.log_history if "loss" in entry][-1] for run in (whole, again))
    assert got == pytest.approx(want, rel=1e-4)


class Decay:
    """A schedule with a state of its own."""

    def __init__(self, factor: float) -> None:
        self.factors = (factor,)

    def __call__(self, step: int) -> float:
        return self.factors[0] ** step


def scheduled(directory: Path, kind: Callable[..., Any], option: Any) -> Any:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = arguments(directory, ThinwireArguments, plan="zero1")
    trainer = ThinwireTrainer(model, settings, optimizers=(optimizer, kind(optimizer, option)))
    trainer.create_optimizer()
    return trainer


@pytest.mark.slow
@on_ranks(2)
def test_checkpoints_hold_states_of_any_scheduler(tmp_path: Path) -> None:
    kinds: list[tuple[Callable[..., Any], Any, Any]] = [
        (schedulers.ReduceLROnPlateau, "min", "max"),
        (schedulers.MultiStepLR, [2, 5], [7]),
        (schedulers.LambdaLR, Decay(0.5), Decay(0.1)),
        (schedulers.StepLR, 2, 3),
    ]
    for kind, option, other in kinds:
        saved, loaded = scheduled(tmp_path, kind, option), scheduled(tmp_path, kind, other)
        state = saved.lr_scheduler.state_dict()
        saved._save_optimizer_and_scheduler(str(tmp_path / kind.__name__))
        loaded._load_optimizer_and_scheduler(str(tmp_path / kind.__name__))
        assert loaded.lr_scheduler.state_dict() == state
    tw.save(saved.model, saved.optimizer.optimizer, tmp_path / "old" / "thinwire", extra={"scheduler": state})
    loaded = scheduled(tmp_path, schedulers.StepLR, 3)
    loaded._load_optimizer_and_scheduler(str(tmp_path / "old"))
    assert loaded.lr_scheduler.state_dict() == state, "as releases up to 0.2 wrote it"


# ------------------------------------------------------------------------------------------------------ callbacks


class Witness(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes what callbacks read from the model and from the optimizer, and changes both after two steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = next(iter(kwargs["model"].parameters()))
        rate = kwargs["optimizer"].param_groups[0]["lr"]
        self.seen.append((rate, float(weight.norm()), float(weight.grad.norm())))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.mul_(0.9)
            for group in kwargs["optimizer"].param_groups:
                group["weight_decay"] = 0.0


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_callbacks_read_and_change_whole_parameters(tmp_path: Path) -> None:
    witnesses = []
    for plan in (None, "zero3"):
        witness = Witness()
        trained(tmp_path / str(plan), plan, max_steps=5, callbacks=[witness])
        witnesses.append(witness.seen)
    want, got = witnesses
    assert len(want) == 5
    for one, other in zip(got, want, strict=True):
        assert one == pytest.approx(other, rel=1e-3)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_training_stops_early_with_the_best_weights(tmp_path: Path) -> None:
    ends = []
    for plan in (None, "zero3"):
        trainer = trained(
            tmp_path / str(plan), plan, max_steps=8, learning_rate=0.5, adam_epsilon=1e-8, eval_strategy="steps",
            eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True, warmup_steps=0,
            metric_for_best_model="eval_loss", callbacks=[transformers.EarlyStoppingCallback(1)],
        )  # fmt: skip
        ends.append((trainer.state.global_step, trainer.evaluate()["eval_loss"]))
    (steps, loss), (got_steps, got_loss) = ends
    assert got_steps == steps < 8
    assert got_loss == pytest.approx(loss, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # an option that TRL itself sets
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"use_transformers_continuous_batching": True}, "leave it out"),
        ({"use_vllm": True, "vllm_mode": "server"}, "valid is vllm_mode='colocate'"),
    ],
    ids=["batching", "server"],
)
def test_generation_in_which_not_all_ranks_take_part_is_refused(
    option: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **option)
    with pytest.raises(UsageError, match=said):
        ThinwireTrainer(build(), arguments, plan="zero3")
