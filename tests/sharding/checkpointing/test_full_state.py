"""Whole states by torch's own functions of ``torch.distributed.checkpoint``, as programs for FSDP2 use them."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.support.ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import thinwire as tw
from thinwire.sharding.tensors.tensor import ShareTensor

pytestmark = pytest.mark.ranks

KINDS: dict[str, Any] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class Odd(nn.Module):
    """A scalar, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.nothing.sum()


def plan(preset: str) -> tw.Plan:
    return tw.Plan.preset(preset, nodes=1, local=2, compute_dtype="float32")


def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 5)).square().sum().backward()
    optim.step()
    optim.zero_grad()


def check_equal(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@on_ranks(2)
def test_the_first_rank_saves_whole_states(preset: str) -> None:
    for make in KINDS.values():
        alone, model = Odd(), tw.shard(Odd(), plan(preset))
        own, optim = make(alone.parameters()), make(model.parameters())
        step(alone, own)
        step(model, optim)
        for offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            saved = (
                get_model_state_dict(model, options=options),
                get_optimizer_state_dict(model, optim, options=options),
            )
            if offload and dist.get_rank():
                assert saved == ({}, {})
                continue
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            weights, states = torch.load(file)
            want = get_optimizer_state_dict(alone, own)
            check_equal((weights, states["state"]), (get_model_state_dict(alone), want["state"]))
            assert states["param_groups"] == want["param_groups"]


@pytest.mark.parametrize("broadcast", [None, False, True], ids=["load_state_dict", "every rank", "first rank"])
@on_ranks(2)
def test_whole_states_are_cut_when_they_are_loaded(tmp_path: Path, broadcast: bool | None) -> None:
    for kind, make in KINDS.items():
        alone = Odd()
        own = make(alone.parameters())
        step(alone, own)
        model = tw.shard(Odd(), plan("zero3"))
        model.load_state_dict(alone.state_dict())
        optim = make(model.parameters())
        if broadcast is None:
            optim.load_state_dict(copy.deepcopy(own.state_dict()))
        else:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            whole = copy.deepcopy(get_optimizer_state_dict(alone, own))
            given = whole if dist.get_rank() == 0 or not broadcast else {}
            set_optimizer_state_dict(model, optim, given, options=options)
        tw.save(model, optim, tmp_path / kind)
        held = [value for entries in optim.state.values() for key, value in entries.items() if key != "step"]
        assert all(isinstance(value, ShareTensor) for value in held)
        step(alone, own)
        step(model, optim)
        check_equal(tw.full_state_dict(model), alone.state_dict())


@on_ranks(2)
def test_checkpoints_of_torch_hold_a_parameter_without_elements(tmp_path: Path) -> None:
    model = tw.shard(Odd(), plan("zero3"))
    want = tw.full_state_dict(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = {"model": model.state_dict()}
    dcp.load(states, checkpoint_id=tmp_path)
    model.load_state_dict(states["model"])
    check_equal(tw.full_state_dict(model), want)
