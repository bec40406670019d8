"""Parameters of which this rank holds a slice: DTensors of tensor parallelism, seen as the tensors they hold here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from thinwire.collectives.group import arrived
from thinwire.collectives.topology import DataRanks
from thinwire.errors import UsageError

__all__ = ["LocalPart", "Slice", "local_gradient", "local_tensor", "set_local", "slice_of"]


@dataclass(frozen=True)
class Slice:
    """Which of the equal slices of a parameter a rank holds.

    Attributes:
        dim: the dimension that is cut.
        ways: number of slices.
        index: which one.
    """

    dim: int
    ways: int
    index: int


@dataclass(frozen=True)
class LocalPart:
    """What a rank trains of a model that is spread over more than data-parallel ranks.

    Attributes:
        data: the ranks that train the same part.
        stage: number of the pipeline stage, 0 without a pipeline.
        tensor: this rank's place among those that share every matrix.
        tensor_ranks: how many they are.
        masters: fp32 values of parameters that are narrower already, by name: what the optimizer starts from.
    """

    data: DataRanks
    stage: int = 0
    tensor: int = 0
    tensor_ranks: int = 1
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """For keys of what belongs to this part alone; empty where the part is the whole model."""
        return f"stage {self.stage}, tensor rank {self.tensor}" if self.stage or self.tensor_ranks > 1 else ""


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter: all of it, unless it is a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def set_local(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Re-point a parameter at other memory; the one place that does."""
    if isinstance(parameter, DTensor):
        parameter._local_tensor = value
    else:
        parameter.data = value


def local_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """What a gradient adds to this rank's slice. Of a parameter that all tensor-parallel ranks hold, each may have seen
    some tokens only: then their parts are summed first."""
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return arrived(grad._local_tensor)


def slice_of(name: str, parameter: torch.Tensor) -> Slice | None:
    """The slice of a parameter that this rank holds; none where it holds all of it.

    Raises:
        UsageError: if it is cut in another way than along one dimension of a one-dimensional mesh, evenly.
    """
    if not isinstance(parameter, DTensor) or all(placement.is_replicate() for placement in parameter.placements):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1 or type(placements[0]) is not Shard or parameter.shape[placements[0].dim] % mesh.size():
        raise UsageError(
            f"parameter {name} of shape {tuple(parameter.shape)} is {placements} over {mesh.size()} ranks: one "
            "dimension should be cut, evenly"
        )
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return Slice(placements[0].dim, mesh.size(), coordinate[0])
