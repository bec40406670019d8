"""Loops as users of DDP and fully_shard write them: ignored parameters, models sharded in parts, state dicts, DCP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.ranks import on_ranks
from tests.support.training.edge import TOLERANCE, build, close, gap, plan, raised, samples
from tests.support.training.models import Stack
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks

over_plans = pytest.mark.parametrize(
    "plans", [("zero3",), pytest.param(("ddp", "zero1", "zero2", "hpz"), marks=pytest.mark.slow)]
)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def check_same(model: nn.Module, reference: nn.Module, what: str) -> None:
    mine, theirs = whole(model), whole(reference)
    for name in theirs:
        assert torch.allclose(mine[name], theirs[name], atol=TOLERANCE), f"{what}: {name}"


# -- parameters to ignore --------------------------------------------------------------------------------------


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_parameters_that_are_ignored(tmp_path: Path, plans: Sequence[str]) -> None:
    path = tmp_path / "checkpoint"
    for name in plans:
        model = build(Stack)
        ignored = model.last.bias
        tw.ignore(ignored)
        tw.shard(model, plan(name))
        assert model.last.bias is ignored
        optim = tw.optimizer(model, torch.optim.SGD, lr=0.1)
        own = torch.optim.SGD([ignored], lr=0.1)
        reference = build(Stack)
        reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1)
        for number in range(2):
            x = samples(number, 1, 4)[0, 0]  # the same on every rank: ignored gradients are not combined
            for one in (model, reference):
                one(x).square().mean().backward()
            assert torch.allclose(ignored.grad, reference.last.bias.grad, atol=1e-6)
            for step in (optim, own, reference_optim):
                step.step()
                step.zero_grad()
        check_same(model, reference, f"ignored under {name}")
        tw.save(model, optim, path)
        tw.load(model, optim, path)


# -- part by part ----------------------------------------------------------------------------------------------


def train(model: nn.Module, optim: Any) -> None:
    for number in range(2):
        model(samples(number, 1, 4)[0, dist.get_rank()]).square().mean().backward()
        optim.step()
        optim.zero_grad()


@pytest.mark.slow
@on_ranks(4)
def test_models_that_are_sharded_part_by_part() -> None:
    model = build(Stack)
    for block in model.blocks:
        tw.shard(block.up, plan("zero3"))
        tw.shard(block, plan("zero3"))
    tw.shard(model, plan("zero3"))
    names = {unit.info.name for unit in model._thinwire_runtime.units}
    assert names >= {f"blocks.{i}{part}" for i in range(3) for part in ("", ".up")}
    listed = build(Stack)
    tw.shard(listed.blocks, plan("zero3"))
    x = samples(0, 1, 4)[0, 0]
    assert torch.allclose(listed(x), build(Stack)(x), atol=1e-6)
    model = build(Stack)
    tw.shard(model.blocks[0], plan("zero3"))
    assert "give it the model's plan in the rest" in raised(UsageError, tw.shard, model, plan("zero1"))
    tw.optimizer(model.blocks[0], torch.optim.AdamW, lr=1e-2)
    assert "before the optimizer" in raised(UsageError, tw.shard, model, plan("zero3"))
    assert "is sharded already" in raised(UsageError, tw.shard, model.blocks[0], plan("zero3"))
    close(model.blocks[0])


# -- state dicts and torch.distributed.checkpoint --------------------------------------------------------------


def shard_with(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(Stack, seed=seed)
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        tw.shard(model, plan(kind))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow
@on_ranks(4)
def test_checkpoints_travel_between_plans_and_fsdp2(tmp_path: Path) -> None:
    """Each loads the other's checkpoint, and training continues without a difference."""
    for saver, loader in (
        ("zero3", "zero1"),
        ("zero1", "fsdp2"),
        ("hpz", "fsdp2"),
        ("fsdp2", "zero3"),
        ("fsdp2", "ddp"),
    ):
        model, optim = shard_with(saver, 0)
        train(model, optim)
        states = dict(zip(("model", "optim"), get_state_dict(model, optim), strict=True))
        dcp.save(states, checkpoint_id=tmp_path / f"{saver}-{loader}")
        other, other_optim = shard_with(loader, 1)
        states = dict(zip(("model", "optim"), get_state_dict(other, other_optim), strict=True))
        dcp.load(states, checkpoint_id=tmp_path / f"{saver}-{loader}")
        set_state_dict(other, other_optim, model_state_dict=states["model"], optim_state_dict=states["optim"])
        check_same(other, model, f"loaded from {saver} into {loader}")
        train(model, optim)
        train(other, other_optim)
        check_same(other, model, f"gone on from {saver} as {loader}")


@pytest.mark.slow
@over_plans
@on_ranks(4)
def test_full_state_dicts(plans: Sequence[str]) -> None:
    for name in plans:
        model, optim = shard_with(name, 0)
        train(model, optim)
        states = tw.full_state_dict(model)
        assert all(type(value) is torch.Tensor for value in states.values())
        assert gap(list(states.values()), list(whole(model).values())) == 0.0
        for options in (
            StateDictOptions(full_state_dict=True),
            StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ):
            another, _ = shard_with(name, 4)
            own = states if dist.get_rank() == 0 or not options.broadcast_from_rank0 else {}
            set_model_state_dict(another, dict(own), options=options)
            check_same(another, model, f"set_model_state_dict under {name}")
