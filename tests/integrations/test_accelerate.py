"""A loop by hand under ``ThinwireAccelerator`` beside the same loop under accelerate's own DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.frameworks.stateful import Counter
from tests.support.ranks import on_ranks
from torch import nn
from torch.utils.data import DataLoader

import thinwire as tw
from thinwire.errors import SpecError, UsageError
from thinwire.testing import run_ranks

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.local_sgd import LocalSGD  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from tests.support.frameworks.accelerate import accelerator_of, job  # noqa: E402

from thinwire.integrations.accelerate import ThinwireAccelerator  # noqa: E402

STEPS = 20
LENGTH = 8
VOCABULARY = 32


def build() -> Any:
    """A small Llama whose output shares the weight of its embedding."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def tokens(number: int) -> list[torch.Tensor]:
    return list(torch.randint(0, VOCABULARY, (number, LENGTH), generator=torch.Generator().manual_seed(1)))


@dataclass
class Course:
    """What a loop has seen."""

    losses: list[float] = field(default_factory=list)
    """Loss of each micro-batch on this rank."""
    norms: list[float] = field(default_factory=list)
    """Norm of each step's gradient before clipping."""
    rates: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    metrics: list[torch.Tensor] = field(default_factory=list)
    """Losses of all validation sequences, after each fifth step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The whole weights at the end."""


@dataclass
class Loop:
    """A loop as accelerate's examples write it; nothing in it knows thinwire."""

    accelerator: Any
    batch: int = 2
    clip: float | None = None
    steps: int = STEPS

    def __post_init__(self) -> None:
        accelerator, model = self.accelerator, build()
        decayed = [item for item in model.parameters() if item.dim() > 1]
        rest = [item for item in model.parameters() if item.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count / 100))
        training = DataLoader(tokens(10000), batch_size=self.batch, shuffle=True)
        prepared = accelerator.prepare(model, optimizer, training, DataLoader(tokens(13), batch_size=2), scheduler)
        self.model, self.optimizer, self.training, self.validation, self.scheduler = prepared

    def train(self, skip: int = 0, save: tuple[int, Path] | None = None) -> Course:
        accelerator, course = self.accelerator, Course()
        batches = accelerator.skip_first_batches(self.training, skip * accelerator.gradient_accumulation_steps)
        step = skip
        for batch in batches:
            with accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                course.losses.append(loss.item())
                if accelerator.sync_gradients:
                    parameters = self.model.parameters()
                    clip = float("inf") if self.clip is None else self.clip
                    course.norms.append(float(accelerator.clip_grad_norm_(parameters, clip)))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            course.rates.append(self.scheduler.get_last_lr()[0])
            step += 1
            if step % 5 == 0:
                course.metrics.append(self.evaluate())
            if save is not None and step == save[0]:
                accelerator.save_state(str(save[1]))
            if step == self.steps:
                break
        course.weights = {name: value.clone() for name, value in accelerator.get_state_dict(self.model).items()}
        return course

    @torch.no_grad()
    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        losses = []
        for batch in self.validation:
            logits = self.model(input_ids=batch).logits[:, :-1].float()
            one = nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(1)
            losses.append(self.accelerator.gather_for_metrics(one))
        self.model.train()
        return torch.cat(losses)


def run(plan: str | None, clip: float | None = None, steps: int = STEPS, **options: Any) -> Course:
    with job():
        return Loop(accelerator_of(plan, **options), clip=clip, steps=steps).train()


def assert_alike(got: Course, want: Course) -> None:
    assert got.rates == want.rates
    torch.testing.assert_close(torch.tensor(got.losses), torch.tensor(want.losses), rtol=1e-4, atol=0)
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms), rtol=2e-4, atol=0)
    torch.testing.assert_close(torch.stack(got.metrics), torch.stack(want.metrics), rtol=1e-4, atol=0)
    assert len(want.metrics[0]) == 13
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "settings", "plans"),
    [
        (2, [(4, 0.1)], ["zero3"]),
        pytest.param(4, [(4, 0.1)], ["zero3"], marks=pytest.mark.slow),
        pytest.param(4, [(1, 0.1), (1, None), (4, None)], ["zero3", "zero1"], marks=pytest.mark.slow),
    ],
)
@on_ranks("world", timeout=300)
def test_a_loop_trains_as_under_ddp(
    world: int, settings: Sequence[tuple[int, float | None]], plans: Sequence[str]
) -> None:
    for accumulation, clip in settings:
        want = run(None, clip, gradient_accumulation_steps=accumulation)
        assert len(want.norms) == STEPS
        assert len(want.losses) == STEPS * accumulation
        for plan in plans:
            assert_alike(run(plan, clip, gradient_accumulation_steps=accumulation), want)


# ------------------------------------------------------------------------------------------------------ checkpoints


def save(directory: Path) -> Course:
    with job():
        # By default, accelerate steps a schedule once for each rank.
        accelerator = ThinwireAccelerator(plan="zero3", cpu=True, step_scheduler_with_optimizer=False)
        loop, counter = Loop(accelerator, batch=2, clip=0.1), Counter()
        accelerator.register_for_checkpointing(counter)
        names: list[str] = []
        accelerator.register_save_state_pre_hook(lambda models, *_: names.extend(type(m).__name__ for m in models))
        counter.count = 7
        course = loop.train(save=(8, directory / "state"))
        assert names == ["LlamaForCausalLM"]
        accelerator.save_model(loop.model, str(directory / "saved"))
        weights = accelerator.get_state_dict(loop.model)
        whole = accelerator.unwrap_model(loop.model)
        whole.save_pretrained(directory / "export", state_dict=weights, is_main_process=accelerator.is_main_process)
        return course


def resume(directory: Path) -> Course:
    with job():
        # Twice the batch of each rank; a step still has the same sequences.
        accelerator = ThinwireAccelerator(plan="zero1", cpu=True, step_scheduler_with_optimizer=False)
        loop, counter = Loop(accelerator, batch=4, clip=0.1), Counter()
        accelerator.register_for_checkpointing(counter)
        accelerator.load_state(str(directory / "state"))
        assert counter.count == 7
        assert accelerator.step == 8
        return loop.train(skip=8)


def load_nothing(directory: Path) -> str:
    with job():
        accelerator = ThinwireAccelerator(plan="zero1", cpu=True)
        Loop(accelerator)
        with pytest.raises(tw.errors.CheckpointError) as caught:
            accelerator.load_state(str(directory))
        return str(caught.value)


@pytest.mark.slow
def test_four_ranks_save_and_two_resume(tmp_path: Path) -> None:
    want = run_ranks(4, save, tmp_path, timeout=100)[0]
    got = run_ranks(2, resume, tmp_path, timeout=100)[0]
    torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(want.norms[8:]), rtol=2e-4, atol=0)
    assert got.rates == want.rates[8:]
    torch.testing.assert_close(got.weights, want.weights, rtol=1e-4, atol=1e-5)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "export")
    for name, value in again.state_dict().items():
        assert torch.equal(value, want.weights[name]), name
    model = build()
    accelerate.load_checkpoint_in_model(model, str(tmp_path / "saved"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, want.weights[name]), name
    assert {path.name for path in (tmp_path / "state").iterdir()} >= {"thinwire", "scheduler.bin"}
    (tmp_path / "empty").mkdir()
    assert "thinwire" in run_ranks(2, load_nothing, tmp_path / "empty", timeout=60)[0]


# ------------------------------------------------------------------------------------------------------ other settings


@pytest.mark.slow
@on_ranks(2, timeout=100)
def test_float16_has_a_loss_scale_and_skips_steps() -> None:
    """A course in float16, and the same course in float32 without the steps that float16 skipped."""
    with job():
        scaling = accelerate.utils.GradScalerKwargs(init_scale=2.0**30)
        accelerator = ThinwireAccelerator(plan="zero3", cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling])
        got = Loop(accelerator, clip=0.1).train()
        assert accelerator.loss_scale is not None
        skipped = accelerator.loss_scale.skipped_steps
    with job():
        want = Loop(ThinwireAccelerator(plan="zero3", cpu=True), clip=0.1).train(skip=skipped)
    assert 1 <= skipped < 15, "2 ** 30 overflows"
    assert got.rates == [1e-2] * skipped + want.rates
    assert got.losses[skipped:] == pytest.approx(want.losses, rel=2e-3)
    assert got.norms[skipped:] == pytest.approx(want.norms, rel=2e-2)


@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_deferred_gradients_and_compiled_models() -> None:
    """Gradients that are combined by ``trigger_sync_in_backward``, and a compiled model."""

    def deferred(plan: str | None) -> list[torch.Tensor]:
        with job():
            accelerator = accelerator_of(plan)
            loop = Loop(accelerator)
            batches = iter(loop.training)
            norms = []
            for _ in range(3):
                with accelerator.no_sync(loop.model):
                    losses = [loop.model(input_ids=b, labels=b).loss for b in (next(batches), next(batches))]
                    accelerator.backward(losses[0])
                with accelerator.trigger_sync_in_backward(loop.model):
                    accelerator.backward(losses[1])
                norms.append(accelerator.clip_grad_norm_(loop.model.parameters(), 1.0))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            return norms

    torch.testing.assert_close(deferred("zero2"), deferred(None), rtol=1e-4, atol=0)
    compiled = run("zero3", 0.1, steps=5, dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))
    eager = run("zero3", 0.1, steps=5)
    torch.testing.assert_close(compiled.losses, eager.losses, rtol=1e-4, atol=0)


def train_apart(accelerator: Any, loop: Loop, batches: Iterator[torch.Tensor]) -> None:
    with LocalSGD(accelerator, loop.model, 2) as local:
        for batch in batches:
            with accelerator.accumulate(loop.model):
                accelerator.backward(loop.model(input_ids=batch, labels=batch).loss)
                loop.optimizer.step()
            local.step()


def accumulated_by_hand(plan: str | None) -> list[torch.Tensor]:
    """Norms of a loop that calls the prepared model's own ``no_sync``, as over DDP's wrapper."""
    with job():
        accelerator = accelerator_of(plan)
        loop, norms = Loop(accelerator), []
        batches = iter(loop.training)
        for _ in range(3):
            for last in (False, True):
                batch = next(batches)
                with contextlib.nullcontext() if last else loop.model.no_sync():
                    accelerator.backward(loop.model(input_ids=batch, labels=batch).loss)
            norms.append(accelerator.clip_grad_norm_(loop.model.parameters(), 1.0))
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        if plan is not None:
            accelerator.gradient_accumulation_steps = 2
            with pytest.raises(UsageError, match="inside no_sync"):
                train_apart(accelerator, loop, batches)
        return norms


@on_ranks(2)
def test_the_models_own_no_sync() -> None:
    want = accumulated_by_hand(None)
    for plan in ("zero1", "zero3"):
        torch.testing.assert_close(accumulated_by_hand(plan), want, rtol=1e-4, atol=0)


class WithModes(torch.optim.SGD):
    """Steps in ``train()``, and ``eval()`` swaps means into the parameters, as optimizers without a schedule do."""

    training = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.training:
            raise RuntimeError("the optimizer is not in train mode")
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            mean = self.state[parameter].setdefault("mean", parameter.detach().clone())
            mean.lerp_(parameter.detach(), 0.5)

    @torch.no_grad()
    def swap(self) -> None:
        for parameter in self.state:
            kept = parameter.detach().clone()
            parameter.copy_(self.state[parameter]["mean"])
            self.state[parameter]["mean"].copy_(kept)

    def train(self) -> None:
        if not self.training:
            self.swap()
        self.training = True

    def eval(self) -> None:
        if self.training:
            self.swap()
        self.training = False


def with_modes(plan: str | None) -> list[torch.Tensor]:
    """Losses of validation sequences under the means."""
    with job():
        accelerator = accelerator_of(plan)
        model = build()
        loop = Loop(accelerator)
        model, optimizer = accelerator.prepare(model, WithModes(model.parameters(), lr=0.5))
        loop.model, found = model, []
        for batch, _ in zip(loop.training, range(4), strict=False):
            optimizer.train()
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.eval()
            found.append(loop.evaluate())
        return found


@on_ranks(2)
def test_optimizers_with_modes_equal_ddp() -> None:
    want = with_modes(None)
    assert not torch.equal(want[0], want[-1])
    for plan in ("zero1", "zero3"):
        torch.testing.assert_close(with_modes(plan), want, rtol=1e-5, atol=0)


def adversaries(plan: str | None, folder: str) -> list[torch.Tensor]:
    """A generator, and a discriminator with two optimizers, which clip parts and by value; saved and loaded midway."""
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)] if plan is None else []
    accelerator = accelerator_of(plan, kwargs_handlers=handlers)
    torch.manual_seed(0)
    generator = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    judge = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    if plan == "zero1":  # a plan of its own
        tw.shard(judge, tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32"))
    plain = (
        torch.optim.AdamW(generator.parameters(), lr=1e-2),
        torch.optim.SGD(judge[0].parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(judge[1].parameters(), lr=1e-2),
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(plain[0], 2, 0.5)
    generator, judge, of_generator, first, second, schedule = accelerator.prepare(generator, judge, *plain, schedule)

    def train(steps: Sequence[int]) -> None:
        for _ in steps:
            truth, noise = torch.randn(2, 4, 8)
            with accelerator.accumulate(generator, judge):
                made = generator(noise)
                seen = judge(torch.cat([truth, made.detach()]))
                accelerator.backward(nn.functional.softplus(seen).mean())
                accelerator.clip_grad_value_(accelerator.unwrap_model(judge)[0].parameters(), 1e-2)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.backward(nn.functional.softplus(-judge(made)).mean())
                accelerator.clip_grad_value_(generator.parameters(), 1e-2)
                of_generator.step()
                schedule.step()
                for optimizer in (of_generator, first, second):
                    optimizer.zero_grad()

    torch.manual_seed(dist.get_rank())
    train(range(3))
    accelerator.save_state(folder)
    train(range(3))
    accelerator.load_state(folder)
    train(range(2))
    states = [accelerator.get_state_dict(model) for model in (generator, judge)]
    norms = [
        accelerator.clip_grad_norm_(parameters, float("inf")).cpu()
        for parameters in (judge.parameters(), [*generator.parameters(), *judge.parameters()])
    ]
    return [*(value.clone() for state in states for value in state.values()), *norms]


def common_optimizer(plan: str | None, folder: str) -> list[torch.Tensor]:
    """Two models of which one optimizer holds all parameters, as those of a diffusion model and its text encoder."""
    accelerator = accelerator_of(plan)
    torch.manual_seed(0)
    encoder, decoder = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
    plain = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    encoder, decoder, optimizer, schedule = accelerator.prepare(encoder, decoder, plain, schedule)
    torch.manual_seed(dist.get_rank())
    for step in range(6):
        with accelerator.accumulate(encoder, decoder):
            accelerator.backward(decoder(encoder(torch.randn(4, 8))).square().mean())
            accelerator.clip_grad_value_([*encoder.parameters(), *decoder.parameters()], 1e-2)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(folder)
        if step == 3:
            accelerator.load_state(folder)
    return [value.clone() for m in (encoder, decoder) for value in accelerator.get_state_dict(m).values()]


@on_ranks(2)
def test_several_models_and_optimizers_equal_ddp(tmp_path: Path) -> None:
    folder = str(tmp_path)
    equal = []
    for program in (adversaries, common_optimizer):
        results = []
        for plan in (None, "zero3", "zero1"):
            with job():
                results.append(program(plan, f"{folder}/{program.__name__}/{plan}"))
        equal += [all(map(torch.equal, got, results[0])) for got in results[1:]]
    assert equal == [True] * 4


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank, whose state accelerate forgets at the end."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with job():
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(2, sync_each_batch=True)},
            "sync_each_batch = True",
        ),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]},
            "comm_hook = fp16: choose codecs in the plan's wire instead",
        ),
        (
            {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)},
            "use_regional_compilation = True: leave it out",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ThinwireAccelerator(cpu=True, **options)


@pytest.mark.usefixtures("alone")
def test_another_engine_of_accelerate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match=r"ACCELERATE_USE_FSDP=true: .* choose the sharding with plan="):
        ThinwireAccelerator(cpu=True)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_calls_that_cannot_work_are_refused() -> None:
    accelerator = ThinwireAccelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(UsageError, match="no model is prepared; pass the model and the optimizer to one call"):
        accelerator.prepare(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with pytest.raises(UsageError, match="clip_grad_norm_: no model is prepared"):
        accelerator.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)
    loop = Loop(accelerator)
    with pytest.raises(UsageError, match=r"prepare.SGD.: the model has an optimizer: .* call accelerator.free_memory"):
        accelerator.prepare(torch.optim.SGD(loop.model.parameters()))
    with pytest.raises(UsageError, match=r"join_uneven_inputs: .* thinwire.join"):
        accelerator.join_uneven_inputs([loop.model])
    with accelerator.accumulate(loop.model), pytest.raises(UsageError, match=r"if accelerator.sync_gradients"):
        accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert isinstance(accelerator.prepare(frozen).weight, nn.Parameter)
    accelerator.free_memory()
    with pytest.raises(UsageError, match="parameters of SGD are not parameters of the sharded model"):
        accelerator.prepare(build(), torch.optim.SGD(build().parameters()))


@on_ranks(2)
def test_a_registered_average_of_shares_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with job():
        accelerator = ThinwireAccelerator(cpu=True)
        model, other = accelerator.prepare(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
        accelerator.register_for_checkpointing(Counter(), torch.optim.swa_utils.AveragedModel(other))
        accelerator.save_state(str(tmp_path / "kept"))
        accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(model))
        with pytest.raises(UsageError, match=r"register_for_checkpointing.AveragedModel.: .* thinwire.average"):
            accelerator.save_state(str(tmp_path / "state"))
        assert not (tmp_path / "state").exists()


@pytest.mark.usefixtures("alone")
def test_a_plan_of_another_precision_is_refused() -> None:
    plan = tw.Plan.preset("zero3", nodes=1, local=1, compute_dtype="float32")
    accelerator = ThinwireAccelerator(cpu=True, mixed_precision="bf16", plan=plan)
    with pytest.raises(SpecError, match=r'compute_dtype = "float32", but the mixed precision .* asks for "bfloat16"'):
        accelerator.prepare(build())


@pytest.mark.usefixtures("alone")
def test_float16_trains_one_model_by_one_optimizer() -> None:
    accelerator = ThinwireAccelerator(cpu=True, mixed_precision="fp16")
    with pytest.raises(UsageError, match=r'prepare.Linear.: mixed_precision = "fp16" .* use "bf16"'):
        accelerator.prepare(nn.Linear(2, 2), nn.Linear(2, 2))
    accelerator.free_memory()
    model = build()
    with pytest.raises(UsageError, match=r'prepare.SGD.: mixed_precision = "fp16" .* use "bf16"'):
        accelerator.prepare(model, torch.optim.SGD(model.model.layers.parameters()))
