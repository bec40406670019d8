"""Position of a rank in a job of pipeline stages, data-parallel and tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from thinwire import intercept
from thinwire.collectives import group as groups
from thinwire.spec import Plan


@dataclass(frozen=True)
class Grid:
    """Ranks in the order ``(islands, pp, dp, tp)``.

    Tensor-parallel ranks are neighbours, because they communicate most. Stages of an island are farthest apart, because
    they communicate least (Narayanan et al. 2021, arXiv 2104.04473, section 3). A node must have as many ranks as one
    of the plan's mesh times ``tp``, or all ranks of several stages. The ranks of an island lie together.

    Attributes:
        pp: Number of pipeline stages.
        dp: Number of data-parallel ranks of a stage, in one island.
        tp: Number of ranks that share every matrix.
        rank: This rank, of ``islands * pp * dp * tp``.
        placed: Position of this rank in the plan's mesh where a ``placement`` permutes the ranks of a job without
            tensor and pipeline parallelism.
        islands: Number of islands.
        ep: Number of data-parallel ranks that share experts; they are neighbours.
        cp: Number of data-parallel ranks that share sequences; they are neighbours.
    """

    pp: int
    dp: int
    tp: int
    rank: int
    placed: int | None = None
    islands: int = 1
    ep: int = 1
    cp: int = 1

    @classmethod
    def of(cls, plan: Plan, rank: int, size: int) -> Grid:
        """The grid of a plan, for this rank of a job of ``size`` ranks.

        Raises:
            SpecError: The job has another number of ranks than the plan.
        """
        grid = cls(plan.pp, plan.world, plan.tp, rank, islands=plan.job_islands, ep=plan.ep, cp=plan.cp)
        if grid.size != size:
            of_islands = "" if plan.job_islands == 1 else f" on each of {plan.job_islands} islands"
            raise plan.unsuitable(
                f"mesh = {plan.mesh} with tp = {plan.tp} and pp = {plan.pp}{of_islands} has {grid.size} ranks, the job "
                f"has {size}; start {grid.size} ranks, or change the plan"
            )
        if plan.placement is not None and grid.is_data_parallel:
            return replace(grid, placed=plan.placement.index(rank % grid.dp))
        return grid

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.islands * self.of_island

    @property
    def of_island(self) -> int:
        """Number of ranks of an island."""
        return self.pp * self.dp * self.tp

    @property
    def is_data_parallel(self) -> bool:
        """Whether each rank trains a whole replica of the model on sequences of its own."""
        return self.tp == self.pp == self.ep == self.cp == 1

    @property
    def island(self) -> int:
        """Number of this rank's island."""
        return self.rank // self.of_island

    @property
    def island_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's island."""
        first = self.island * self.of_island
        return tuple(range(first, first + self.of_island))

    @property
    def sampler(self) -> int:
        """Number of this rank among those with data of their own, over all islands; ranks that hold one replica
        together, or share sequences, share it."""
        return (self.island * self.dp + self.data) // self.cp

    @property
    def stage(self) -> int:
        """Index of this rank's stage in the pipeline."""
        return self.rank % self.of_island // (self.dp * self.tp)

    @property
    def data(self) -> int:
        """This rank's position in the plan's mesh."""
        return self._column if self.placed is None else self.placed

    @property
    def _column(self) -> int:
        return self.rank // self.tp % self.dp

    @property
    def tensor(self) -> int:
        """Index of this rank among those that share its matrices."""
        return self.rank % self.tp

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """Global ranks that train the same part of the model, in the order of their positions in the mesh, island by
        island."""
        first = self.stage * self.dp * self.tp + self.tensor
        return tuple(
            rank
            for island in range(0, self.size, self.of_island)
            for rank in range(island + first, island + first + self.dp * self.tp, self.tp)
        )

    @property
    def model_ranks(self) -> tuple[int, ...]:
        """Global ranks that together hold one replica of the model."""
        if self.ep > 1:
            return self._sharing(self.ep)
        return tuple(
            self.island_ranks[0] + (stage * self.dp + self._column) * self.tp + tensor
            for stage in range(self.pp)
            for tensor in range(self.tp)
        )

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Global ranks with which this rank exchanges activations: those of its matrices, its pipeline, its experts."""
        if self.ep > 1 or self.cp > 1:
            return self._sharing(max(self.ep, self.cp))
        here = self.island_ranks[0] + self.rank % (self.dp * self.tp)
        pipeline = range(here, self.island_ranks[0] + self.of_island, self.dp * self.tp)
        first = self.rank - self.tensor
        return tuple(sorted({*pipeline, *range(first, first + self.tp)}))

    def mesh(self, plan: Plan, device: torch.device, *, encoded: bool) -> DeviceMesh:
        """Make torch's mesh of this rank's island, with axes ``pp``, ``dp`` and ``tp``. All ranks make it together.

        Args:
            plan: Plan with the codecs of the axes.
            device: Device of the tensors.
            encoded: Whether the axes but ``dp`` send through their codecs, and count their bytes and the time that
                computation waits for them. On CUDA devices, axes without a codec keep torch's own groups.

        Raises:
            UsageError: The plan has a codec for an axis that does not support the device.
        """
        ranks = self.island_ranks[0] + torch.arange(self.of_island, device="cpu").view(self.pp, self.dp, self.tp)
        axes = {
            "pp": ranks[:, self.data, self.tensor],
            "dp": ranks[self.stage, :, self.tensor],
            "tp": ranks[self.stage, self.data],
        }
        made = [groups.mesh_group(members.tolist(), axis) for axis, members in axes.items()]
        mesh = DeviceMesh.from_group(made, device.type, mesh=ranks, mesh_dim_names=tuple(axes))
        for axis, ways in (("tp", self.tp), ("pp", self.pp)):
            if ways > 1 and encoded:
                _compress(mesh, axis, plan)
        return mesh

    def neighbour_mesh(
        self, axis: Literal["ep", "cp"], plan: Plan, device: torch.device, *, encoded: bool
    ) -> DeviceMesh:
        """Make torch's mesh of the ranks that share experts or sequences, with one axis. Arguments and errors are those
        of :meth:`mesh`."""
        ranks = self._sharing(self.ep if axis == "ep" else self.cp)
        mesh = DeviceMesh.from_group(groups.mesh_group(ranks, axis), device.type, mesh_dim_names=(axis,))
        if encoded and (group := _compress(mesh, axis, plan)) is not None:
            group.configure(group.codecs, nodes=max(1, len(ranks) // plan.mesh.local))
        return mesh

    def _sharing(self, ways: int) -> tuple[int, ...]:
        """Global ranks of this rank's group of ``ways`` neighbouring data-parallel ranks, in order."""
        first = self.data // ways * ways
        return self.data_ranks[first : first + ways]


def _compress(mesh: DeviceMesh, axis: str, plan: Plan) -> intercept.CompressingGroup | None:
    """Send along an axis through its codec, and time it; on CUDA devices, an axis without a codec is left alone."""
    codec = plan.wire.codecs()[axis]
    if mesh.device_type != "cpu" and codec.is_none:
        return None
    group = intercept.compress_axis(mesh, axis, codec)
    group.time_waits()
    return group
