"""What loops by hand meet under accelerate, beside the same loops over its own DDP: each thing by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, SequentialLR, StepLR

accelerate = pytest.importorskip("accelerate")

from tests.support.frameworks.accelerate import accelerator_of, job  # noqa: E402


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(accelerator: Any, model: Any, optimizer: Any, scheduler: Any = None) -> dict[str, torch.Tensor]:
    """The whole weights after four steps."""
    torch.manual_seed(dist.get_rank())
    for _ in range(4):
        accelerator.backward(model(torch.randn(3, 4)).square().mean())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    weights: dict[str, torch.Tensor] = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in weights.items()}


def assert_equals_ddp(program: Callable[[str | None], dict[str, torch.Tensor]], *plans: str) -> None:
    """Compare the weights that a program trains."""
    with job():
        want = program(None)
    for plan in plans or ("zero1", "zero3"):
        with job():
            got = program(plan)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=plan)


def scheduled(plan: str | None, passed: str) -> dict[str, torch.Tensor]:
    accelerator, model = accelerator_of(plan), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts: list[Any] = [StepLR(optimizer, 1, 0.5), OneCycleLR(optimizer, 0.1, total_steps=9)]
    scheduler = SequentialLR(optimizer, parts, [1])
    model, prepared = accelerator.prepare(model, optimizer)
    if passed == "later":
        scheduler = accelerator.prepare(scheduler)
    return train(accelerator, model, prepared, scheduler)


@pytest.mark.parametrize("passed", ["never", "later"])
@on_ranks(2)
def test_schedulers_that_prepare_is_not_given_set_the_rates(passed: str) -> None:
    warnings.simplefilter("error", UserWarning)  # schedulers warn if they see no step of the optimizer
    assert_equals_ddp(lambda plan: scheduled(plan, passed))


class Clamped(torch.optim.SGD):
    """Keeps an option that is no default, and takes the model."""

    def __init__(self, model: nn.Module, lr: float = 0.1, largest: float = 10.0) -> None:
        super().__init__(model.parameters(), lr=lr, momentum=0.9)
        self.largest = largest

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.clamp_(-self.largest, self.largest)
        super().step(closure)


def hooked(plan: str | None) -> dict[str, torch.Tensor]:
    accelerator, model, steps = accelerator_of(plan), build(), list[Any]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    weights = train(accelerator, *accelerator.prepare(model, optimizer))
    assert len(steps) == 4
    return weights


def clamped(plan: str | None) -> dict[str, torch.Tensor]:
    accelerator, model = accelerator_of(plan), build()
    return train(accelerator, *accelerator.prepare(model, Clamped(model, largest=1e-3)))


@on_ranks(2)
def test_optimizers_that_their_options_do_not_tell_train_as_they_are() -> None:
    assert_equals_ddp(hooked)
    assert_equals_ddp(clamped)


@on_ranks(2)
def test_gradients_of_float16_are_unscaled_once() -> None:
    """A norm that the loop itself computes is that of float32, and clipping divides no more."""
    norms = []
    for precision in ("no", "fp16"):
        with job():
            scaling = accelerate.utils.GradScalerKwargs(init_scale=2.0**10)
            accelerator = accelerator_of("zero3", mixed_precision=precision, kwargs_handlers=[scaling])
            model = build()
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            torch.manual_seed(dist.get_rank())
            accelerator.backward(model(torch.randn(3, 4)).square().mean())
            accelerator.unscale_gradients()
            norms.append(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
    assert [float(norm) for norm in norms] == pytest.approx([float(norms[0])] * 4, rel=1e-2)


class WithLoss(nn.Module):
    """Computes its loss itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = build()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.body(x)
        return {"loss": (made - 100).square().mean(), "made": made}


def in_bfloat16(plan: str | None) -> dict[str, torch.Tensor]:
    accelerator, model = accelerator_of(plan, mixed_precision="bf16"), WithLoss()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    with accelerator.autocast():
        product = x @ x.T
    return {**model(x), "product": product, "again": accelerator.prepare(model)(x)["made"]}


@on_ranks(2)
def test_losses_and_outputs_have_the_dtypes_of_accelerate() -> None:
    assert_equals_ddp(in_bfloat16)


def normed(plan: str | None) -> dict[str, torch.Tensor]:
    """What each rank computes by the running statistics, of which DDP keeps the first rank's."""
    accelerator, model = accelerator_of(plan), nn.Sequential(build(), nn.BatchNorm1d(1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(accelerator, model, optimizer)
    return {"evaluated": accelerator.gather(model.eval()(torch.ones(1, 4)).detach())}


@on_ranks(2)
def test_ranks_evaluate_by_the_first_ones_statistics() -> None:
    assert_equals_ddp(normed)


def two_phases(plan: str | None) -> dict[str, torch.Tensor]:
    accelerator, model = accelerator_of(plan), build()
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        model, optimizer = accelerator.prepare(model, kind(model.parameters(), lr=1e-2))
        weights = train(accelerator, model, optimizer)
        accelerator.free_memory()
        if plan is None:
            model = accelerator.unwrap_model(model)
    return weights


@on_ranks(2)
def test_a_second_phase_has_an_optimizer_of_its_own() -> None:
    assert_equals_ddp(two_phases)
