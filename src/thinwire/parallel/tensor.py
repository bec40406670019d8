"""Tensor parallelism: every matrix is cut over neighbouring ranks, by torch's DTensor styles."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from thinwire.intercept import exact_scope
from thinwire.parallel.divisible import Divisible

__all__ = ["cut_matrices", "tensor_axis", "vocabulary_parallel_loss"]

_axis_numbers = itertools.count(1)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The axis ``tp`` of a mesh, as an object that equals no other axis.

    Torch remembers how it shards the operations of DTensors, and on which mesh, by the mesh's ranks and names. If the
    axes of two models were equal, the second model's activations would be sent through the groups of the first, with
    its codecs.

    Args:
        mesh: with an axis ``tp``.
    """
    axis = mesh["tp"]
    axis._thread_id = next(_axis_numbers)  # torch compares it, to keep the meshes of simulated ranks apart
    axis._hash = None
    return axis


def cut_matrices(
    model: nn.Module, anatomy: Divisible, mesh: DeviceMesh, dtype: torch.dtype, *, sequence: bool
) -> dict[str, torch.Tensor]:
    """Cut a model's matrices in place, and cast what is left here to the dtype in which it computes.

    Args:
        model: with fp32 parameters, the same on every rank.
        anatomy: the same object: how it is cut.
        mesh: one-dimensional.
        dtype: of computation.
        sequence: whether tokens are cut between matrices.

    Returns:
        The fp32 values of this rank's slices by name, where ``dtype`` is narrower.
    """
    parallelize_module(model, mesh, anatomy.tensor_parallel_styles(sequence=sequence))
    anatomy.sequence_ways = mesh.size() if sequence else 1
    anatomy.tie()
    masters = {
        name: (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype != dtype
    }
    _cast(model, dtype)
    return masters


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """A DTensor cannot change its dtype in place, as a plain parameter can: new ones take their places."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor) and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in cast:  # tied ones stay tied
                    local = parameter._local_tensor.detach().to(dtype)
                    value = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
                    cast[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                parameters[name] = cast[id(parameter)]


def vocabulary_parallel_loss(logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Mean cross-entropy where every rank has the logits of a part of the vocabulary.

    To be called, and differentiated, inside ``torch.distributed.tensor.parallel.loss_parallel()``. What ranks exchange
    for it, a maximum and a sum per token, always travels exactly.

    Args:
        logits: ``(B, T, V / tp)``, this rank's.
        labels: int64, ``(B, T)``; -100 does not count.
        mesh: the ranks.

    Returns:
        fp32 scalar, nats per label.
    """
    with exact_scope():
        whole = DTensor.from_local(logits.flatten(0, -2).float(), mesh, [Shard(1)], run_check=False)
        loss = F.cross_entropy(whole, labels.flatten())
        assert isinstance(loss, DTensor)
        return loss.to_local()
