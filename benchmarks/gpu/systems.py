"""The timed systems: plain PyTorch twice, thinwire, FSDP2. Each trains the same model on the same tokens in bf16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import thinwire as tw
from thinwire.spec import Plan
from thinwire.train.models.common import RotaryTable
from thinwire.train.models.llama import Llama, LlamaConfig

__all__ = ["FSDP2", "OURS", "PLAIN", "Step", "llama", "make_system", "make_systems", "thinwire_step", "tokens"]

Step = Callable[[], Tensor]
"""Makes one update and returns the loss, in nats per token, without waiting for the device."""

OURS: Final = "thinwire zero3"
FSDP2: Final = "FSDP2"
PLAIN: Final = ("PyTorch, autocast", "PyTorch, fp32 masters")
_RATE = 1e-4


def llama(fields: Mapping[str, Any], device: str) -> Llama:
    """The model in fp32, drawn where it is going to be: billions of values take a processor longer than a part may."""
    config = LlamaConfig(**fields)
    with torch.device("meta"):
        model = Llama(config)
    model.to_empty(device=device)
    model.rotary = RotaryTable(config.hidden // config.heads, config.seq, config.rope_theta).to(device)
    generator = torch.Generator(device).manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02, generator=generator)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
    return model


def tokens(fields: Mapping[str, Any], batch: int, device: str, seed: int = 0) -> Tensor:
    """int64 ids of shape [batch, seq + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, fields["vocab"], (batch, fields["seq"] + 1), generator=generator).to(device)


def make_systems(whole: Llama, ids: Tensor) -> dict[str, Step]:
    """All systems, by label. The caller has joined a job.

    Args:
        whole: The model in fp32; every system gets a copy of it.
        ids: int64 ids of shape [batch, seq + 1], on the device of the systems.
    """
    return {name: make_system(name, copy.deepcopy(whole), ids) for name in (*PLAIN, OURS, FSDP2)}


def make_system(name: str, model: Llama, ids: Tensor) -> Step:
    """A system by its label; it takes the model, in fp32, and trains it."""
    makers = {
        PLAIN[0]: _autocast,
        PLAIN[1]: _masters,
        OURS: lambda model, ids: thinwire_step(model, ids, Plan.preset("zero3", nodes=1, local=1))[0],
        FSDP2: fsdp2_step,
    }
    return makers[name](model, ids)


def thinwire_step(model: Llama, ids: Tensor, plan: Plan) -> tuple[Step, nn.Module]:
    """A step of a model in fp32 under a plan, and the sharded model."""
    tw.shard(model, plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=_RATE, fused=True)
    return _step(model, optim, ids), model


def fsdp2_step(model: Llama, ids: Tensor) -> Step:
    """A step of FSDP2 over all ranks; it computes in bf16 from fp32 masters, as thinwire does."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh(ids.device.type, (world,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in (model.embed_tokens, *model.layers):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    # What remains, the last norm and the head, is needed again as soon as the backward starts.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True), ids)


def _step(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    ids: Tensor,
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Step:
    """A step whose forward runs in the context that ``forward`` makes."""

    def step() -> Tensor:
        with forward():
            loss: Tensor = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return step


def _autocast(model: Llama, ids: Tensor) -> Step:
    """fp32 parameters, bf16 matrix products by autocast."""
    optim = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)
    return _step(model, optim, ids, lambda: torch.autocast(ids.device.type, torch.bfloat16))


def _masters(model: Llama, ids: Tensor) -> Step:
    """bf16 parameters and gradients, fp32 masters in the optimizer: what thinwire keeps, written by hand."""
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.bfloat16()
    parameters = list(model.parameters())
    optim = torch.optim.AdamW(masters, lr=_RATE, fused=True)

    def step() -> Tensor:
        loss: Tensor = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        optim.step()
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](parameters), list[Tensor](masters))
        model.zero_grad()
        return loss.detach()

    return step
