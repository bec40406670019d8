"""Times the library calls of other frameworks: one over a whole group, where thinwire's collectives have two hops."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

import torch
import torch.distributed as dist

from thinwire.collectives.group import Control
from thinwire.collectives.job.torch_groups import library_call, named_group
from thinwire.profile.exchanging import COPIES, LARGE, Exchange
from thinwire.profile.timing import Call, Deadline, in_turn, timed
from thinwire.program import Kind
from thinwire.spec import Factor
from thinwire.spec.profile import CollectiveRow

LIBRARY_SIZES: Final = (1 << 20, 1 << 16, 1 << 22, 1 << 24, 1 << 12)
"""Bytes of the whole vector, the most useful first."""

_KINDS: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
_PATIENCE: Final = datetime.timedelta(minutes=10)


def measure_library(
    mesh: Factor, control: Control, device: torch.device, deadline: Deadline, report: Callable[[str], None]
) -> list[CollectiveRow]:
    """Time every call over every shape of group, all groups of the shape at once, on vectors of bfloat16.

    The first two sizes are measured whatever the deadline says. Rows are the same on every rank.
    """
    # Other frameworks shard or replicate over all ranks, those of a node, and one of each node.
    shapes = dict.fromkeys((mesh, Factor(local=mesh.local), Factor(nodes=mesh.nodes)))
    groups = {shape: _group_of(mesh, shape, control.rank) for shape in shapes if shape.ranks > 1}
    wanted = [(size, shape, kind) for size in LIBRARY_SIZES for shape in groups for kind in _KINDS]
    needed = 2 * len(groups) * len(_KINDS)
    rows = []
    for number, (size, shape, kind) in enumerate(wanted):
        left = deadline.left()
        if left <= 0 and number >= needed:
            report(f"no time left for library calls of {size >> 10} KiB and those that follow")
            break
        report(f"the library's {kind} over {shape.local} x {shape.nodes}, {size >> 10} KiB")
        share = min(1.0, max(0.0, left) / (len(wanted) - number))
        rows.append(_row(kind, shape, size, groups[shape], control, device, share))
    return rows


def _row(
    kind: Kind,
    shape: Factor,
    size: int,
    group: dist.ProcessGroup,
    control: Control,
    device: torch.device,
    seconds: float,
) -> CollectiveRow:
    def call() -> Call:
        return library_call(kind, torch.zeros(size // 2, dtype=torch.bfloat16, device=device), group)

    spread = timed(control, in_turn(call, COPIES if size <= LARGE else 1), seconds=seconds, device=device)
    what = Exchange(str(kind), shape.local, shape.nodes)
    sent = size * (shape.ranks - 1) // shape.ranks * (2 if kind is Kind.ALL_REDUCE else 1)
    return CollectiveRow(**asdict(what), sent=sent, **spread.row, processor=spread.processor)


def _group_of(mesh: Factor, shape: Factor, rank: int) -> dist.ProcessGroup:
    """This rank's group of a shape."""
    node, local = divmod(rank, mesh.local)
    nodes = range(mesh.nodes) if shape.nodes > 1 else [node]
    indices = range(mesh.local) if shape.local > 1 else [local]
    ranks = [node * mesh.local + index for node in nodes for index in indices]
    return named_group("thinwire/profile/library", ranks, _PATIENCE)
