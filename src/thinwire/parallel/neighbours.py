"""Groups of neighbouring data-parallel ranks that share experts or sequences, as axes of torch's meshes."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from thinwire import intercept
from thinwire.collectives import group as groups
from thinwire.parallel.grid import Grid, neighbours_of
from thinwire.spec import Plan


def alike(grid: Grid) -> tuple[int, ...]:
    """Global ranks that hold the same experts as a rank, in the order of their positions in the mesh."""
    return grid.data_ranks[grid.data % grid.ep :: grid.ep]


def neighbour_mesh(
    grid: Grid, axis: Literal["ep", "cp"], plan: Plan, device: torch.device, *, encoded: bool
) -> DeviceMesh:
    """Make torch's mesh of the ranks that share experts or sequences, with one axis. All ranks make it together.

    Args:
        grid: Position of this rank.
        axis: Name of the axis.
        plan: Plan with the codec of the axis.
        device: Device of the tensors.
        encoded: Whether the axis sends through its codec, and counts its bytes and the time that computation waits for
            it. On CUDA devices, an axis without a codec keeps torch's own group.

    Raises:
        UsageError: The plan has a codec for the axis that does not support the device.
    """
    ranks = neighbours_of(grid, grid.ep if axis == "ep" else grid.cp)
    codec = plan.wire.ep if axis == "ep" else plan.wire.cp
    mesh = DeviceMesh.from_group(groups.mesh_group(ranks, axis), device.type, mesh_dim_names=(axis,))
    if encoded and (device.type == "cpu" or not codec.is_none):
        group = intercept.compress_axis(mesh, axis, codec)
        group.configure(group.codecs, nodes=max(1, len(ranks) // plan.mesh.local))
        group.time_waits()
    return mesh
