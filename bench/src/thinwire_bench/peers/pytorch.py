"""PyTorch's own ways to train on several ranks, each as fast as its options allow on gloo.

DDP holds parameters and optimizer states in bf16, its cheapest form; FSDP2 computes in bf16 from fp32 masters, as
thinwire does. The settings were measured against their alternatives, unshaped and at 1 Gbit/s: DDP's ``static_graph``
and FSDP2's explicit prefetch orders change nothing on gloo (prefetching backward sends more), and a head that is a unit
of its own is gathered twice in FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from thinwire_bench.peers.interface import Place, System
from thinwire_bench.peers.system import LEARNING_RATE, TorchSystem, fused_adamw
from thinwire_bench.peers.workload import batches, make_model

_BUCKET_MIB = 5
"""Of DDP: its default, 25, starts so late on this model that a link of 1 Gbit/s makes a step a fifth longer."""

_POWERSGD_RANK = 4
"""Of its matrices; PyTorch's documentation advises 1 to 4."""


def local(place: Place, options: Mapping[str, Any]) -> System:
    """The bound: the same ranks, each training by itself on its own data, without communication."""
    model = make_model(options).bfloat16()
    return TorchSystem(model, fused_adamw(model.parameters()), batches(options, place.rank))


def ddp(place: Place, options: Mapping[str, Any]) -> System:
    """DistributedDataParallel."""
    model = _replicated(make_model(options).bfloat16())
    return TorchSystem(model, fused_adamw(model.parameters()), batches(options, place.rank))


def ddp_bf16_hook(place: Place, options: Mapping[str, Any]) -> System:
    """DDP with fp32 parameters under autocast, whose gradients its hook sends as bf16."""
    replicated = _replicated(Autocast(make_model(options)))
    # Not the hook itself: by its name DDP refuses the hook without NCCL, though gloo adds bf16 as well.
    replicated.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
    return TorchSystem(replicated, fused_adamw(replicated.parameters()), batches(options, place.rank))


def ddp_powersgd(place: Place, options: Mapping[str, Any]) -> System:
    """DDP that sends gradients as matrices of low rank, with error feedback (arXiv 1905.13727); fp32 under autocast."""
    replicated = _replicated(Autocast(make_model(options)))
    # Two is the least number of ordinary steps before that PyTorch allows.
    state = PowerSGDState(None, matrix_approximation_rank=_POWERSGD_RANK, start_powerSGD_iter=2)
    # Without annotations, which DDP would want as classes.
    replicated.register_comm_hook(state, lambda state, bucket: _powersgd_in_order(state, bucket))
    return TorchSystem(replicated, fused_adamw(replicated.parameters()), batches(options, place.rank))


def zero1(place: Place, options: Mapping[str, Any]) -> System:
    """DistributedDataParallel with ZeroRedundancyOptimizer: optimizer states over all ranks."""
    model = _replicated(make_model(options).bfloat16())
    optim = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
    )
    return TorchSystem(model, optim, batches(options, place.rank))


def fsdp2(place: Place, options: Mapping[str, Any]) -> System:
    """fully_shard over all ranks."""
    return _fully_sharded(place, options, (place.world,), True)


def hsdp(place: Place, options: Mapping[str, Any]) -> System:
    """fully_shard inside a node, replicas across nodes."""
    return _fully_sharded(place, options, (place.nodes, place.local), True)


def hpz(place: Place, options: Mapping[str, Any]) -> System:
    """fully_shard over all ranks, parameters kept sharded inside the node from forward to backward, as in ZeRO++."""
    return _fully_sharded(place, options, (place.world,), place.local)


def _powersgd_in_order(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """PowerSGD's hook, bucket after bucket: its later collectives start in callbacks, in an order that differs between
    ranks, which gloo pairs wrongly."""
    reduced = powerSGD_hook(state, bucket)
    reduced.wait()
    return reduced


class Autocast(nn.Module):
    """A model whose matrices multiply in bf16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **kwargs)


def _replicated(model: nn.Module) -> nn.parallel.DistributedDataParallel:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=_BUCKET_MIB)


def _fully_sharded(
    place: Place, options: Mapping[str, Any], mesh_shape: tuple[int, ...], reshard: bool | int
) -> System:
    names = ("replicate", "shard")[2 - len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = make_model(options)
    for unit in (model.embed_tokens, *model.layers):
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # What remains, the last norm and the head, is needed again as soon as the backward starts.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return TorchSystem(model, fused_adamw(model.parameters()), batches(options, place.rank))
