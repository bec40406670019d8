"""Encodes what FSDP2 or DDP sends, by one line after wrapping the model. No device mesh is compressed first."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UsageError
from thinwire.intercept.gate import MIN_NUMEL, AxisCodecs
from thinwire.intercept.group import CompressingGroup
from thinwire.intercept.mesh import compress_group
from thinwire.intercept.scope import StepMarks, mark_steps
from thinwire.spec import CodecSpec
from thinwire.units import whole

_Compressed = Callable[[dist.ProcessGroup], CompressingGroup]


def _compressed(codecs: AxisCodecs, min_numel: int, nodes: int | None) -> _Compressed:
    """Returns the compressing group of each of FSDP's groups, made on first use."""

    @functools.cache
    def of(group: dist.ProcessGroup) -> CompressingGroup:
        if isinstance(group, CompressingGroup):
            raise UsageError(
                f"axis {group.axis} is compressed already: leave out compress_fsdp(), or do not compress the axis"
            )
        made = compress_group(group, codecs.reduce, axis="fsdp")
        made.configure(codecs, min_numel=min_numel, nodes=nodes)
        return made

    return of


class CompressedAllGather(DefaultAllGather):
    """Encoded all-gather for ``FSDPModule.set_custom_all_gather``; :func:`compress_fsdp` sets it on every module."""

    def __init__(self, compressed: _Compressed) -> None:
        self._compressed = compressed

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return super().__call__(output_tensor, input_tensor, self._compressed(group), async_op)


class CompressedReduceScatter(DefaultReduceScatter):
    """Encoded reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``; :func:`compress_fsdp` sets it everywhere."""

    def __init__(self, compressed: _Compressed) -> None:
        self._compressed = compressed

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work:
        return super().__call__(output_tensor, input_tensor, self._compressed(group), op, async_op)


def compress_fsdp(
    model: nn.Module,
    codec: str | CodecSpec,
    *,
    gather: str | CodecSpec | None = None,
    inside: str | CodecSpec | None = None,
    nodes: int | None = None,
    min_numel: int = MIN_NUMEL,
) -> StepMarks:
    """Encode what FSDP2 sends: gradients with ``codec``, parameters with ``gather``. Call it after ``fully_shard``.

    Outside training steps, parameters are gathered exactly: in ``full_tensor()``, checkpoints and evaluation. With a
    hybrid mesh, FSDP does not let the all-reduce between replicas be replaced; compress that axis of the mesh instead.

    On several nodes, reductions take one hop inside the node and then one across nodes, and gathers the reverse, so
    that a byte crosses nodes once.

    Args:
        model: Model on which ``fully_shard`` has been called.
        codec: Codec of reduce-scatters.
        gather: Codec of all-gathers; ``codec`` by default. Its messages take both hops unchanged.
        inside: Codec of reduce-scatters inside a node, for example ``"none"``; ``codec`` by default.
        nodes: Number of nodes that the ranks span, consecutive ranks on each; 1 for a single hop. By default it follows
            from ``LOCAL_WORLD_SIZE``, which torchrun sets.
        min_numel: Tensors with fewer values are sent unencoded.

    Returns:
        Marks of the training steps, which are set on ``model``.

    Raises:
        UsageError: ``fully_shard`` has not been called on the model or any of its modules. Or, in the first step, nodes
            have different numbers of ranks.
    """
    # Groups are made in the first step, which is late for a wrong number.
    min_numel, nodes = whole("min_numel", min_numel, 0), None if nodes is None else whole("nodes", nodes)
    compressed = _compressed(AxisCodecs.of(codec, gather=gather, inside=inside), min_numel, nodes)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise UsageError("compress_fsdp() comes after fully_shard(): no module of this model is sharded")
    for module in modules:
        module.set_custom_all_gather(CompressedAllGather(compressed))
        module.set_custom_reduce_scatter(CompressedReduceScatter(compressed))
    return mark_steps(model)


def compress_ddp(
    model: DistributedDataParallel,
    codec: str | CodecSpec,
    *,
    inside: str | CodecSpec | None = None,
    nodes: int | None = None,
    min_numel: int = MIN_NUMEL,
) -> CompressingGroup:
    """Encode the gradients that DDP reduces. Call it after ``DistributedDataParallel(module)``.

    On several nodes, an all-reduce adds inside the node first and across nodes second, and its sums come back the
    reverse way, so that a byte crosses nodes once in each direction.

    Args:
        model: Model wrapped by DDP.
        codec: Codec of the all-reduces. Gradients are still means.
        inside: Codec of the first hop, inside a node, for example ``"none"``; ``codec`` by default. The sums take both
            hops back as messages of ``codec``.
        nodes: Number of nodes that the ranks span, consecutive ranks on each; 1 for a single hop. By default it follows
            from ``LOCAL_WORLD_SIZE``, which torchrun sets.
        min_numel: Buckets with fewer values are sent unencoded.

    Returns:
        The group of the communication hook. :meth:`CompressingGroup.traffic` reports what it sent.

    Raises:
        UsageError: The model is not wrapped, its process group is compressed already, or nodes have different numbers
            of ranks.
    """
    if not hasattr(model, "process_group"):
        raise UsageError(f"compress_ddp() comes after DistributedDataParallel(module): {type(model).__name__} is none")
    if isinstance(model.process_group, CompressingGroup):
        raise UsageError(
            f"axis {model.process_group.axis} is compressed already: leave out compress_ddp(), or do not compress it"
        )
    group = compress_group(model.process_group, codec, axis="ddp")
    # It carries nothing but gradients; under DDP's join(), a rank without data sends zeros outside of a backward.
    group.configure(AxisCodecs.of(codec, inside=inside), min_numel=min_numel, always=True, nodes=nodes)
    model.register_comm_hook(group, allreduce_hook)  # divides first, so that fp16 does not overflow
    return group
