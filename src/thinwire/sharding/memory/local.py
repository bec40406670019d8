"""Accesses this rank's slice of parameters that tensor parallelism cuts (DTensors)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Shard

from thinwire.collectives.group import Control, arrived, control
from thinwire.collectives.topology import DataRanks
from thinwire.errors import UsageError


@dataclass(frozen=True)
class Slice:
    """A rank's slice of a parameter whose dimension ``dim`` is cut into so many equal slices."""

    dim: int
    ways: int
    index: int


@dataclass(frozen=True)
class LocalPart:
    """The part of a model that a rank trains under tensor, pipeline or expert parallelism.

    Attributes:
        data: Ranks that train the same part.
        stage: Number of the pipeline stage; 0 without a pipeline. Experts that ranks share are stage 1.
        tensor: Index of this rank among the tensor-parallel ranks, or among those that share experts.
        tensor_ranks: Number of these ranks.
        masters: Initial fp32 masters of parameters that already have a narrower dtype, by name.
        is_inner: Whether another part calls this one's modules and, with recomputation, runs them again.
        members: Global ranks that train any part of the model; ``None`` for all ranks of the job.
    """

    data: DataRanks
    stage: int = 0
    tensor: int = 0
    tensor_ranks: int = 1
    masters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    is_inner: bool = False
    members: tuple[int, ...] | None = None

    @property
    def control(self) -> Control:
        """Connects the ranks that train any part of the model."""
        return control(self.members)

    @property
    def label(self) -> str:
        """Label for keys of values that belong to this part alone; empty if the part is the whole model."""
        return f"stage {self.stage}, tensor rank {self.tensor}" if self.stage or self.tensor_ranks > 1 else ""


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The elements of a parameter that this rank holds: all of them, unless the parameter is a DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def local_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of this rank's slice. If all tensor-parallel ranks hold the parameter, each may have processed only
    some of the tokens; their gradients are summed first."""
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(parameter, DTensor)
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return arrived(grad._local_tensor)


def slice_of(name: str, parameter: torch.Tensor) -> Slice | None:
    """The slice of a parameter that this rank holds; ``None`` if it holds the whole parameter.

    Raises:
        UsageError: The parameter is not cut evenly along one dimension over a one-dimensional mesh.
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
