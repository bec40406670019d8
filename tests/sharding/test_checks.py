"""Arguments of another kind than a model and a plan, and models that cannot be sharded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import thinwire as tw
from thinwire.errors import UsageError

pytestmark = pytest.mark.ranks

PLAN = tw.Plan.preset("zero3", nodes=1, local=1)


@pytest.mark.parametrize("function", [tw.shard, tw.parallelize])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": "zero3"}, "plan is of type str: give one of Plan.preset"),
        ({"plan": {"mesh": {"nodes": 1}}}, "plan is of type dict"),
        ({"model": [nn.Linear(2, 2)]}, "model is of type list: give one torch.nn.Module"),
        ({"codec_backend": "cuda"}, "codec backend 'cuda' does not exist, valid are reference, cpp, triton"),
    ],
)
def test_other_kinds_are_refused(function: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        function(**{"model": nn.Linear(2, 2), "plan": PLAN, **changes})


def test_a_loss_scale_is_an_object() -> None:
    with pytest.raises(UsageError, match=r"loss_scale = 1024: give a thinwire\.LossScale"):
        tw.optimizer(nn.Linear(2, 2), nn.Module, loss_scale=1024)  # type: ignore[arg-type]


def test_no_models_are_refused() -> None:
    with pytest.raises(UsageError, match=r"model = \[\]: give a sharded model"):
        tw.micro_batches([], [1, 2])


@on_ranks(2)
def test_values_out_of_their_range() -> None:
    model = tw.shard(nn.Linear(2, 2), tw.Plan.preset("zero1", nodes=1, local=2))
    wrong: Any = "0.5"
    for share in (-0.1, 50, math.nan, wrong):
        with pytest.raises(UsageError, match="from 0 to 1"):
            tw.progress(model, share)
    for norm in (None, "much"):
        with pytest.raises(UsageError, match=f"max_norm = {norm!r}: give a number"):
            tw.clip_grad_norm_(model, norm)
    for prefix in ("model.", 7):
        with pytest.raises(UsageError, match=f"prefix = {prefix!r}: no name .* 'weight'"):
            tw.publisher(model, "store", prefix=prefix)
    with pytest.raises(UsageError, match="not ShardedParameter: call"):
        tw.ignore(model.weight)
    with pytest.raises(UsageError, match="mesh = 'dp' is no DeviceMesh"):
        tw.shard(nn.Linear(2, 2), tw.Plan.preset("zero1", nodes=1, local=2), mesh="dp")
    with pytest.raises(UsageError, match="valid are whole, encoded"), tw.generating(model, keep="all"):
        pass


@on_ranks(2)
def test_parameters_that_are_cut_already_are_refused_with_what_makes_them_plain() -> None:
    model, plan = nn.Linear(4, 4), tw.Plan.preset("zero3", nodes=1, local=2)
    cut = distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    model.weight = nn.Parameter(cut)
    with pytest.raises(UsageError, match=r"parameter weight is a DTensor; .* thinwire\.parallelize .* full_tensor\(\)"):
        tw.shard(model, plan)
    model.weight = nn.Parameter(model.weight.detach().full_tensor())
    tw.shard(model, plan)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@on_ranks(2)
def test_script_modules_with_parameters_are_refused() -> None:
    plan = tw.Plan.preset("zero3", nodes=1, local=2, compute_dtype="float32")
    for part in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))):
        with pytest.raises(UsageError, match=r"1 is a torch\.jit\.ScriptModule, .* torch\.compile"):
            tw.shard(nn.Sequential(nn.Linear(4, 4), torch.jit.script(part)), plan)
    model = tw.shard(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh())), plan)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optim.step()


def test_a_sparse_buffer_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacent", torch.eye(2).to_sparse())
    with pytest.raises(UsageError, match=r"buffer adjacent is sparse \(torch.sparse_coo\)"):
        tw.shard(model, PLAN)
