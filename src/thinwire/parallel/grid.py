"""Where a rank stands in a job of pipeline stages, data-parallel and tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from thinwire import intercept
from thinwire.collectives import group as groups
from thinwire.errors import SpecError
from thinwire.spec import Plan

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """Ranks in the order ``(pp, dp, tp)``, tensor-parallel ones next to each other, as they talk most.

    Stages are the farthest apart, as they talk least (Narayanan et al. 2021, arXiv 2104.04473, section 3). A node is to
    have as many ranks as a node of the plan's mesh times ``tp``, or all ranks of several stages.

    Attributes:
        pp: stages.
        dp: data-parallel ranks of a stage.
        tp: ranks that share every matrix.
        rank: this rank, of ``pp * dp * tp``.
    """

    pp: int
    dp: int
    tp: int
    rank: int

    @classmethod
    def of(cls, plan: Plan, rank: int, size: int) -> Grid:
        """The grid of a plan.

        Args:
            plan: the plan.
            rank: this rank.
            size: ranks of the job.

        Raises:
            SpecError: if the job has another number of ranks.
        """
        grid = cls(plan.pp, plan.world, plan.tp, rank)
        if grid.size != size:
            raise SpecError(
                f"plan {plan.name or plan.fingerprint()}",
                [
                    f"mesh = {plan.mesh} with tp = {plan.tp} and pp = {plan.pp} has {grid.size} ranks, the job has "
                    f"{size}; start {grid.size} ranks, or change the plan"
                ],
            )
        return grid

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.pp * self.dp * self.tp

    @property
    def stage(self) -> int:
        """This rank's place in the pipeline."""
        return self.rank // (self.dp * self.tp)

    @property
    def data(self) -> int:
        """This rank's position in the plan's mesh."""
        return self.rank // self.tp % self.dp

    @property
    def tensor(self) -> int:
        """This rank's place among those that share its matrices."""
        return self.rank % self.tp

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that train the same part of the model, by their positions in the mesh."""
        first = self.stage * self.dp * self.tp + self.tensor
        return tuple(range(first, first + self.dp * self.tp, self.tp))

    @property
    def model_ranks(self) -> tuple[int, ...]:
        """The ranks that together hold the model and see the same data."""
        return tuple(
            (stage * self.dp + self.data) * self.tp + tensor for stage in range(self.pp) for tensor in range(self.tp)
        )

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The ranks that this one exchanges activations with: its matrices' and its pipeline's."""
        pipeline = range(self.rank % (self.dp * self.tp), self.size, self.dp * self.tp)
        first = self.rank - self.tensor
        return tuple(sorted({*pipeline, *range(first, first + self.tp)}))

    def mesh(self, plan: Plan, device: torch.device, *, encoded: bool) -> DeviceMesh:
        """Torch's mesh of the grid, with axes ``pp``, ``dp`` and ``tp``; made by all ranks together.

        Args:
            plan: with the codecs of ``tp`` and ``pp``.
            device: where tensors live.
            encoded: whether what the axes ``tp`` and ``pp`` send passes through their codecs, and is counted, as is the
                time that computation stands still for it.

        Raises:
            UsageError: if there is a codec, but not for such a device.
        """
        ranks = torch.arange(self.size).view(self.pp, self.dp, self.tp)
        axes = {
            "pp": ranks[:, self.data, self.tensor],
            "dp": ranks[self.stage, :, self.tensor],
            "tp": ranks[self.stage, self.data],
        }
        made = [groups.mesh_group(members.tolist(), axis) for axis, members in axes.items()]
        mesh = DeviceMesh.from_group(made, device.type, mesh=ranks, mesh_dim_names=tuple(axes))
        for axis, ways, codec in (("tp", self.tp, plan.wire.tp), ("pp", self.pp, plan.wire.pp)):
            if ways > 1 and encoded and (device.type == "cpu" or not codec.is_none):
                intercept.compress_axis(mesh, axis, codec).time_waits()
        return mesh
