"""Tensor parallelism: splits every matrix over neighbouring ranks by torch's DTensor styles."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from thinwire.intercept import exact_scope

_axis_numbers = itertools.count(1)


def tensor_axis(mesh: DeviceMesh) -> DeviceMesh:
    """The axis ``tp`` of a mesh, as an object that is unequal to the axes of all other models.

    torch caches how it shards operations on DTensors, including their mesh, and compares meshes by ranks and names. If
    the axes of two models were equal, the second model would send its activations through the groups of the first, with
    the first one's codecs.
    """
    axis = mesh["tp"]
    axis._thread_id = next(_axis_numbers)  # torch compares this field too, to distinguish the meshes of simulated ranks
    axis._hash = None
    return axis


def cast_parts(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cast this rank's slices of parameters to the compute dtype. Returns the fp32 values of those that the cast has
    changed, by name.

    A DTensor cannot change its dtype in place as plain parameters can, so it is replaced.
    """
    masters = {
        name: (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).detach()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dtype != dtype
    }
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor) and parameter.is_floating_point() and parameter.dtype != dtype:
                if id(parameter) not in cast:  # tied parameters stay tied
                    local = parameter._local_tensor.detach().to(dtype)
                    value = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
                    cast[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                parameters[name] = cast[id(parameter)]
    return masters


def vocabulary_parallel_loss(logits: torch.Tensor, labels: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Mean cross-entropy of logits that are divided by vocabulary.

    Call and differentiate it inside ``torch.distributed.tensor.parallel.loss_parallel()``. Ranks exchange a maximum and
    a sum per token, which are never encoded.

    Args:
        logits: This rank's part of the logits, ``(B, T, V / tp)``.
        labels: Labels, int64, ``(B, T)``; -100 does not count.
        mesh: Mesh of the ranks.

    Returns:
        fp32 scalar, nats per label.
    """
    with exact_scope():
        whole = DTensor.from_local(logits.flatten(0, -2).float(), mesh, [Shard(1)], run_check=False)
        loss = F.cross_entropy(whole, labels.flatten())
        assert isinstance(loss, DTensor)
        return loss.to_local()
