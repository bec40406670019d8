"""Small exchanges between the data-parallel ranks of a model, in which each rank contributes a row."""

from __future__ import annotations

import torch

from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.memory import allocate
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Lane
from thinwire.sharding.lanes.journal import Load
from thinwire.sharding.step.sharded_model import ShardedModel
from thinwire.spec import Plan

__all__ = ["exchange_bytes", "gather_noted", "gather_rows"]


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


def gather_noted(sharded: ShardedModel, group: AxisGroup, row: torch.Tensor) -> torch.Tensor:
    """All-gather a row of each rank, and note it in the model's journal; see :func:`gather_rows`."""
    rows = gather_rows(group, row)
    journal = sharded.lanes.journal
    if journal is not None and group.size > 1:
        exchange = object()  # what computes next comes after it, so it starts and is waited for at the same time
        journal.started(Lane.CONTROL, Load("control", Axis.WORLD), exchange, ())
        journal.waited(exchange)
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
    rows = gather_noted(sharded, group, torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8))
    ranks = sharded.part.data.ranks
    positions = sorted(range(group.size), key=ranks.__getitem__)
    by_rank = [rows[_index_of(sharded.plan, position)] for position in positions]
    return [bytes(row.numpy()) for row in by_rank]


def _index_of(plan: Plan, position: int) -> int:
    """Index of a mesh position in the control group, which sorts by place within the node, then by node."""
    node, local = divmod(position, plan.mesh.local)
    return local * plan.mesh.nodes + node
