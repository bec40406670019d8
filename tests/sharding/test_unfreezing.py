"""Parameters that were frozen when the model was sharded, and are trained later: refusals, and groups of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.behaviours.models import Stack
from torch import nn

import thinwire as tw
from thinwire.errors import MismatchError, UsageError
from thinwire.sharding.api import runtime
from thinwire.testing import run_ranks

pytestmark = pytest.mark.ranks


def half_frozen(**changes: Any) -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = Stack()
    model.first.requires_grad_(False)
    plan = tw.Plan.preset("zero3", nodes=1, local=2, **{"compute_dtype": "float32", **changes})
    return tw.shard(model, plan)


def check_refusals() -> None:
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


def test_refusals_name_what_stands_in_the_way() -> None:
    run_ranks(2, check_refusals)


def check_groups() -> None:
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


def test_groups_of_the_fast_optimizer() -> None:
    run_ranks(2, check_groups)
