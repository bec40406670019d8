"""Small exchanges between the data-parallel ranks of a model, in which each rank contributes a row."""

from __future__ import annotations

import torch

from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.memory import allocate
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Lane
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.spec import Plan

__all__ = ["exchange_bytes", "gather_rows"]


def gather_rows(group: AxisGroup, row: torch.Tensor) -> torch.Tensor:
    """All-gather a row of each rank.

    Args:
        group: The ranks.
        row: This rank's row, ``[k]``, on the host or on the group's device. All rows have one size and dtype.

    Returns:
        The rows, ``[ranks, k]``, in the order of the group.
    """
    if group.size == 1:
        return row.reshape(1, -1)
    table = allocate(group.size * row.numel(), row.dtype, row.device)
    rows = table.view(group.size, -1)
    rows[group.index].copy_(row)
    all_gather(group, table).perform()
    return rows


def exchange_bytes(sharded: ShardedModel, payload: bytes, size: int) -> list[bytes]:
    """All-gather bytes of each rank on the host.

    Args:
        sharded: The model.
        payload: This rank's bytes.
        size: Number of bytes that each rank sends; shorter payloads are filled up with zeros.

    Returns:
        The bytes of each rank, by rank.
    """
    group = sharded.axes[Axis.WORLD, Lane.CONTROL]
    rows = gather_rows(group, torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8))
    ranks = sharded.part.data.ranks
    positions = sorted(range(group.size), key=ranks.__getitem__)
    by_rank = [rows[_index_of(sharded.plan, position)] for position in positions]
    return [bytes(row.numpy()) for row in by_rank]


def _index_of(plan: Plan, position: int) -> int:
    """Index of a mesh position in the control group, which sorts by place within the node, then by node."""
    node, local = divmod(position, plan.mesh.local)
    return local * plan.mesh.nodes + node
