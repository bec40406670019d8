"""Parameters that were frozen when the model was sharded, and are trained later: refusals, and groups of optimizers."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.behaviours.models import Stack
from tests.support.ranks import on_ranks
from tests.support.said import heard
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import thinwire as tw
from thinwire.errors import MismatchError, UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import check_streams, run_ranks

pytestmark = pytest.mark.ranks


def half_frozen(**changes: Any) -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = Stack()
    model.first.requires_grad_(False)
    plan = tw.Plan.preset("zero3", nodes=1, local=2, **{"compute_dtype": "float32", **changes})
    return tw.shard(model, plan)


@on_ranks(2)
def test_refusals_name_what_stands_in_the_way() -> None:
    on_host = {"optimizer": "host-update", "gradients": "host", "params": "host"}
    for changes, why in (
        ({"residence": on_host}, "places on the host"),
        ({"frozen": {"storage": "int8:32"}}, r"frozen\.storage"),
        ({}, "an average of its weights"),
    ):
        model = half_frozen(**changes)
        if not changes:
            tw.average(model, decay=0.9)
        with pytest.raises(UsageError, match=f"first.weight was frozen.*{why}.*before thinwire.shard"):
            model.first.weight.requires_grad_(True)
    model = half_frozen()
    with (
        tw.generating(model),
        pytest.raises(UsageError, match=r"requires_grad = True for first.weight.*leave the block"),
    ):
        runtime(model).shares["first.weight"].requires_grad_(True)
    with pytest.raises(MismatchError, match="unfreeze different parameters"):
        (model.first.weight if dist.get_rank() else model.first.bias).requires_grad_(True)


@on_ranks(2)
def test_groups_of_the_fast_optimizer() -> None:
    model = half_frozen()
    optim = tw.optimizer(model, torch.optim.SGD, lr=1.0, param_groups=[{"params": ["first.*", "head.*"], "lr": 0.0}])
    with pytest.raises(UsageError, match="after their requires_grad = True"):
        optim.add_param_group({"params": model.first.parameters()})
    with tw.full_parameters(model):
        model.first.weight.requires_grad_(True)  # where it is the tensor that the module computes with
    model.first.bias.requires_grad_(True)
    assert [len(group["params"]) for group in optim.param_groups] == [2, 12]
    optim.add_param_group({"params": [model.first.bias], "lr": 1.0})
    before = tw.full_state_dict(model)
    model(torch.ones(2, 8)).square().mean().backward()
    assert [len(group["params"]) for group in optim.param_groups] == [3, 12, 1]
    optim.step()
    after = tw.full_state_dict(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed >= {"first.bias", "blocks.0.up.weight"}
    assert not changed & {"first.weight", "head.weight"}
    with pytest.raises(UsageError, match="before their first gradient"):
        optim.add_param_group({"params": [model.first.weight]})


@pytest.mark.parametrize("decay", [0.01, 0.1])
@on_ranks(2)
def test_schedulers_know_the_group_of_what_is_unfrozen_later(decay: float) -> None:
    model = half_frozen()
    groups = [{"params": ["head.*"], "weight_decay": 0.0}, {"params": ["blocks.*"], "weight_decay": decay}]
    optim = tw.optimizer(model, torch.optim.AdamW, lr=0.1, param_groups=groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 0.5**step)

    def step() -> None:
        model(torch.ones(2, 8)).square().mean().backward()
        optim.step()
        scheduler.step()
        optim.zero_grad()

    step()
    with torch.no_grad():
        model.first.weight.mul_(0.5)  # gives the bias a master as well
    step()
    model.first.weight.requires_grad_(True)
    before = tw.full_state_dict(model)["first.weight"]
    if decay == 0.01:  # AdamW's default
        step()
        assert [group["lr"] for group in optim.param_groups] == [0.1 * 0.5**3] * 2
        assert not torch.equal(tw.full_state_dict(model)["first.weight"], before)
    else:
        with pytest.raises(UsageError, match=r"first.weight was frozen.*scheduler could not set.*freeze it after"):
            step()


class MeanTeacher(nn.Module):
    """A student, and a frozen teacher whose weights follow it slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Stack(), Stack()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher(x) + 0.1
        return (self.student(x) - target).square().mean()


def mean_teacher() -> MeanTeacher:
    torch.default_generator.manual_seed(0)
    return MeanTeacher()


def by_lerp(teacher: list[torch.Tensor], student: list[torch.Tensor]) -> None:
    torch._foreach_lerp_(teacher, student, 0.01)


def by_methods(teacher: list[torch.Tensor], student: list[torch.Tensor]) -> None:
    for mine, other in zip(teacher, student, strict=True):
        mine.detach().mul_(0.99).add_(other.data, alpha=0.01)


def by_copies(teacher: list[torch.Tensor], student: list[torch.Tensor]) -> None:
    for mine, other in zip(teacher, student, strict=True):
        mine.copy_(mine * 0.99 + other * 0.01)


def by_assigning(teacher: list[torch.Tensor], student: list[torch.Tensor]) -> None:
    for mine, other in zip(teacher, student, strict=True):
        mine.data = mine.data * 0.99 + other.data * 0.01


def by_results(teacher: list[torch.Tensor], student: list[torch.Tensor]) -> None:
    for mine, other in zip(teacher, student, strict=True):
        torch.lerp(mine, other, 0.01, out=mine)


WAYS = (by_lerp, by_methods, by_copies, by_assigning, by_results)


@torch.no_grad()
def follow(model: MeanTeacher, way: Any, times: int) -> None:
    for _ in range(times):
        way(list(model.teacher.parameters()), list(model.student.parameters()))


@torch.no_grad()
def move(model: MeanTeacher) -> None:
    for parameter in model.student.parameters():
        parameter.add_(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@on_ranks(2)
def test_a_mean_teacher_moves_in_every_way(preset: str) -> None:
    wanted = mean_teacher()
    start = {name: value.clone() for name, value in wanted.state_dict().items()}
    move(wanted)
    follow(wanted, by_lerp, 100)
    for way in WAYS:
        model = tw.shard(mean_teacher(), tw.Plan.preset(preset, nodes=1, local=2))
        assert model.teacher.head.weight.dtype == torch.bfloat16
        move(model)
        follow(model, way, 100)
        for name, value in tw.full_state_dict(model).items():
            moved, expected = value - start[name], wanted.state_dict()[name] - start[name]
            torch.testing.assert_close(moved, expected, rtol=0.0, atol=0.01, msg=f"{way.__name__} {name}")
        assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
        with torch.no_grad():
            seen, teacher = model.teacher(torch.ones(2, 8)), wanted.teacher.bfloat16()
            torch.testing.assert_close(seen, teacher(torch.ones(2, 8).bfloat16()).to(seen.dtype), rtol=0.1, atol=0.1)
        wanted.float()


@torch.no_grad()
def by_states(mean: nn.Module, model: nn.Module) -> None:
    """As other libraries average, here by what a state dict shows."""
    pairs = list(zip(mean.state_dict().values(), model.state_dict().values(), strict=True))
    for mine, other in pairs[:4]:
        mine.lerp_(other, 0.1)
    torch._foreach_lerp_([mine for mine, _ in pairs[4:]], [other for _, other in pairs[4:]], weight=0.1)


def averaged(kind: str, *, sharded: str) -> dict[str, torch.Tensor]:
    """What an average of a model in training is after some steps. Some of its layers are frozen."""
    torch.default_generator.manual_seed(0)
    model: nn.Module = Stack()
    model.blocks[0].requires_grad_(False)
    if sharded:
        model = tw.shard(model, tw.Plan.preset(sharded, nodes=1, local=2))
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ways = {"each": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}, "one": {"avg_fn": get_ema_avg_fn(0.9)}, "equal": {}}
    mean = AveragedModel(model, **ways.get(kind, {}))
    for step in range(5):
        model(torch.full((2, 8), 0.1 * step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        if kind == "states":
            by_states(mean.module, model)
        else:
            mean.update_parameters(model)
    return tw.full_state_dict(mean.module) if sharded else mean.module.state_dict()


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@on_ranks(2)
def test_averages_of_partly_frozen_models(preset: str) -> None:
    for kind in ("each", "one", "equal", "states"):
        got, wanted = averaged(kind, sharded=preset), averaged(kind, sharded="")
        for name, value in got.items():
            torch.testing.assert_close(value.float(), wanted[name], rtol=0.0, atol=4e-3, msg=f"{kind} {name}")


@on_ranks(2)
def test_loads_and_narrow_models_get_no_masters() -> None:
    model = tw.shard(mean_teacher(), tw.Plan.preset("zero3", nodes=1, local=2))
    values = {name: torch.ones_like(value) for name, value in mean_teacher().teacher.state_dict().items()}
    model.teacher.load_state_dict(values)
    model.teacher.load_state_dict(values)
    with torch.no_grad():
        model.teacher.head.weight.copy_(model.student.head.weight)
        model.teacher.head.bias.zero_()
    assert {parameter.dtype for parameter in model.teacher.parameters()} == {torch.bfloat16}
    narrow = tw.shard(mean_teacher().bfloat16(), tw.Plan.preset("zero3", nodes=1, local=2))
    follow(narrow, by_methods, 1)
    assert narrow.teacher.head.weight.dtype == torch.bfloat16  # as the user's


def check_teacher_resumes(path: str, *, fast: bool, steps: int) -> None:
    def begun(preset: str) -> tuple[MeanTeacher, torch.optim.Optimizer]:
        model = tw.shard(mean_teacher(), tw.Plan.preset(preset, nodes=1, local=2))
        if fast:
            return model, tw.optimizer(model, torch.optim.AdamW, lr=0.01)
        return model, torch.optim.AdamW(model.student.parameters(), lr=0.01)

    def train(model: MeanTeacher, optim: torch.optim.Optimizer, steps: int = 3) -> dict[str, torch.Tensor]:
        for step in range(steps):
            model(torch.full((2, 8), 0.1 * step + dist.get_rank())).backward()
            optim.step()
            optim.zero_grad()
            follow(model, by_methods, 1)
        return tw.full_state_dict(model)

    model, optim = begun("zero3")
    train(model, optim, steps)
    follow(model, by_methods, 1)
    tw.save(model, optim, path)
    resumed, optim_of_resumed = begun("zero1")
    tw.load(resumed, optim_of_resumed, path)
    torch.testing.assert_close(tw.full_state_dict(resumed), tw.full_state_dict(model), rtol=0.0, atol=0.0)
    torch.testing.assert_close(train(resumed, optim_of_resumed), train(model, optim), rtol=0.0, atol=0.0)


@pytest.mark.parametrize(("fast", "steps"), [(True, 3), (False, 3), (True, 0)])
def test_a_mean_teacher_goes_on_from_a_checkpoint(tmp_path: Path, fast: bool, steps: int) -> None:
    run_ranks(2, partial(check_teacher_resumes, str(tmp_path / "saved"), fast=fast, steps=steps))


@on_ranks(2)
def test_updates_that_round_are_told() -> None:
    for changes, why in (
        ({"residence": {"optimizer": "host-update", "gradients": "host", "params": "host"}}, "places on the host"),
        ({}, "an average of its weights"),
    ):
        model = half_frozen(compute_dtype="bfloat16", **changes)
        if not changes:
            tw.average(model, decay=0.9)
        before = tw.full_state_dict(model)["first.weight"]
        with heard(logging.WARNING) as warnings, torch.no_grad():
            model.first.weight.mul_(0.5)
            model.first.bias.mul_(0.5)
        said = [text for text in warnings if why in text and text.startswith("first.weight was frozen")]
        assert len(said) == len(warnings) == (dist.get_rank() == 0), warnings
        assert torch.equal(tw.full_state_dict(model)["first.weight"], before * 0.5)


@on_ranks(2)
def test_checkpoints_hold_what_was_unfrozen_after_the_optimizer_was_made(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")

    def begun() -> tuple[nn.Module, tw.ShardedOptimizer]:
        model = half_frozen()
        optim = tw.optimizer(model, torch.optim.AdamW, lr=0.1)
        model.first.requires_grad_(True)
        return model, optim

    def step(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        model(torch.ones(2, 8)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        return tw.full_state_dict(model)

    model, optim = begun()
    step(model, optim)
    tw.save(model, optim, path)
    resumed, optim_of_resumed = begun()
    tw.load(resumed, optim_of_resumed, path)
    torch.testing.assert_close(step(resumed, optim_of_resumed), step(model, optim), rtol=0.0, atol=0.0)


@on_ranks(2)
def test_new_masters_wait_for_what_is_under_way() -> None:
    """Hazards where parameters get masters while gradients are on their way."""
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        model = mean_teacher()
        for block in (*model.student.blocks, *model.teacher.blocks):
            block.up.requires_grad_(False)
        plan = tw.Plan.preset("zero3", nodes=1, local=2, bucket_bytes=1)
        model = tw.shard(model, plan, codec_backend="reference")
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2, fused=True)  # others make the host wait
        for step in range(4):
            for number in tw.micro_batches(model, range(2)):
                model(torch.full((2, 8), 0.1 * step + number)).backward()
                if (step, number) == (1, 0):
                    for block in model.student.blocks:
                        block.up.requires_grad_(True)
                if step == 2:
                    follow(model, by_lerp, 1)
            optim.step()
            optim.zero_grad()
            follow(model, by_lerp, step)
    assert [str(hazard) for hazard in check.hazards] == []


@on_ranks(4)
def test_two_buffers_of_a_unit_are_each_spread_once() -> None:
    """Differences that are spread twice are added twice."""
    model = mean_teacher()
    for block in model.student.blocks:
        block.up.requires_grad_(False)
    plan = tw.Plan.preset("thinwire", nodes=2, local=2, bucket_bytes=1, compute_dtype="float32")
    model = tw.shard(model, plan)
    optim = tw.optimizer(model, torch.optim.SGD, lr=0.3)
    for step in range(6):
        model(torch.full((2, 8), 0.1 * step)).backward()
        optim.step()
        optim.zero_grad()
        if step == 1:
            for block in model.student.blocks:
                block.up.requires_grad_(True)
        if step == 2:
            follow(model, by_lerp, 1)
    masters = tw.full_state_dict(model)
    with tw.full_parameters(model):
        for name, computed in model.named_parameters():
            torch.testing.assert_close(computed.detach(), masters[name], rtol=0.0, atol=1e-3, msg=name)
