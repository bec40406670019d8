"""Frozen parameters that are kept encoded: adapters by peft, tensor parallelism, islands, streams of a device."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import on_ranks
from tests.support.training import grids
from tests.support.training.hf import assert_adapters_train_alike
from tests.support.training.hf import build as build_model
from tests.support.training.program import Model, freeze, train_step
from tests.support.training.quantized import rounded
from torch import nn

import thinwire as tw
from thinwire.errors import CheckpointError
from thinwire.sharding.api import runtime
from thinwire.spec import Plan
from thinwire.testing.streams import check_streams
from thinwire.train.models.common import cross_entropy

pytestmark = pytest.mark.ranks

CODEC = "int8:256"
STORED = {"frozen": {"storage": CODEC}}


def adapted() -> nn.Module:
    """A Llama whose base is frozen, with adapters by peft that change its outputs."""
    import peft

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_model("llama"), lora)
    torch.default_generator.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model.train()


@on_ranks(4)
def test_adapters_train_as_in_one_process() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("zero3", "zero1", "hpz"):
            reference = rounded(adapted(), CODEC)
            plan = Plan.preset(name, nodes=2, local=2, compute_dtype="float32", **STORED)
            model = tw.shard(adapted(), plan)
            optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-2)
            plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
            assert_adapters_train_alike(model, optim, reference, plain, name)


def frozen_llama() -> nn.Module:
    model = grids.build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "down" in name)
    return model


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallel_ranks_keep_their_slices(tmp_path: Path) -> None:
    """The checkpoint of tensor-parallel ranks goes on bit for bit, and not to ranks that hold other slices."""
    path = str(tmp_path / "run")
    plan = grids.plan_for(2, 2, 1, compute_dtype="float32", **STORED)
    losses = []
    for _ in range(2):
        model = tw.parallelize(frozen_llama(), plan, loss=cross_entropy)
        optim = model.optimizer(torch.optim.AdamW, lr=1e-3)
        steps = grids.batches(plan, model.grid.data)
        if not losses:
            grids.train(model, optim, steps[:1])
            model.save(optim, path)
        else:
            model.load(optim, path)
        losses.append(grids.train(model, optim, steps[1:])[0])
    assert losses[0] == losses[1]
    assert any(buffer.stored is not None for unit in runtime(model.chunks[0]).units for buffer in unit.buffers)
    other = tw.parallelize(
        frozen_llama(), grids.plan_for(4, 1, 1, compute_dtype="float32", **STORED), loss=cross_entropy
    )
    with pytest.raises(CheckpointError, match="load it with tp = 2"):
        other.load(None, path)


@on_ranks(4)
def test_islands_exchange_what_is_trained() -> None:
    """Islands exchange trained parameters, and hold the same frozen ones."""
    found = []
    for storage in ("none", CODEC):
        fields = {"compute_dtype": "float32", "frozen": {"storage": storage}}
        plan = Plan.preset("islands", nodes=2, local=2, group="2x1", **fields)
        torch.default_generator.manual_seed(0)
        model = freeze(Model())
        model = tw.shard(rounded(model, CODEC) if storage == "none" else model, plan)
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
        torch.default_generator.manual_seed(dist.get_rank())
        for _ in range(plan.islands.every + 1):
            train_step(model, optim, 1)
        found.append(tw.full_state_dict(model))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("residence", [{}, {"params": "host", "optimizer": "host-stream"}], ids=str)
@pytest.mark.parametrize("name", ["hpz", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero3"))])
@on_ranks(4)
def test_streams_of_a_device_wait_for_each_other(name: str, residence: dict[str, str]) -> None:
    with check_streams("never") as check:
        torch.default_generator.manual_seed(0)
        plan = Plan.preset(name, nodes=2, local=2, residence=residence, **STORED)
        model = tw.shard(freeze(Model()), plan, codec_backend="reference")
        optim = tw.optimizer(model, torch.optim.AdamW, lr=1e-3)
        for _ in range(3):
            train_step(model, optim, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        train_step(model, optim, 1)
    assert [str(hazard) for hazard in check.hazards] == []
