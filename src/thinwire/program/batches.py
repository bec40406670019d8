"""Batches: gathers that start together, and gradients of consecutive units, travel as one up to a number of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from thinwire.program.step import BufferKey, UnitInfo
from thinwire.program.wire import ITEMSIZE, spreads_difference
from thinwire.spec import Plan


def gather_batches(
    units: Mapping[int, UnitInfo] | Sequence[UnitInfo],
    order: Iterable[int],
    at_least: float,
    *,
    encoded_apart: bool,
    only_stored: bool = False,
) -> tuple[tuple[BufferKey, ...], ...]:
    """Cut the flat buffers of units that are gathered at the same time into operations.

    Args:
        units: The units, by number.
        order: Numbers of the units that are gathered, in the order in which they are needed.
        at_least: An operation takes further buffers until it has this many bytes; 0: one buffer for each operation.
        encoded_apart: Whether buffers that the plan's codecs apply to travel apart from the others. Those that ranks
            keep encoded always do.
        only_stored: Whether only buffers that ranks keep encoded are gathered.

    Returns:
        Buffers of each operation. Operations are in the order in which their first buffers are needed.
    """
    keys = [(unit, number) for unit in order for number in range(len(units[unit].buffers))]
    open_: dict[object, list[BufferKey]] = {}
    sizes: dict[object, int] = {}
    batches: list[list[BufferKey]] = []
    for unit, number in keys:
        buffer = units[unit].buffers[number]
        if only_stored and buffer.stored is None:
            continue
        kind = buffer.stored or (encoded_apart and buffer.encoded)
        if kind not in open_:
            open_[kind], sizes[kind] = [], 0
            batches.append(open_[kind])
        open_[kind].append((unit, number))
        sizes[kind] += buffer.nbytes
        if sizes[kind] >= at_least:
            del open_[kind]
    return tuple(tuple(batch) for batch in batches)


def buckets(plan: Plan, units: Sequence[UnitInfo], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group trainable units, in reduction order, into buckets of at least ``plan.bucket_bytes`` of a P shard.

    The remainder becomes a bucket of its own, or joins the previous bucket if it is less than half full. The step waits
    for the last bucket, and a small bucket costs as many messages as a large one.
    """
    return grouped(_gradient_bytes(plan, units, order, plan.params.ranks), plan.bucket_bytes)


def reduction_batches(plan: Plan, units: Sequence[UnitInfo], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Group trainable units, in reduction order, into reductions over the params axis of at least
    ``plan.reduce_bytes``; the remainder as in :func:`buckets`."""
    return grouped(_gradient_bytes(plan, units, order, 1), plan.reduce_bytes)


def spread_batches(
    plan: Plan, units: Sequence[UnitInfo], clusters: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Group trainable units into spreads of at least ``plan.spread_bytes`` of a P shard; the remainder as in
    :func:`buckets`. Shares of unequal sizes, and differences, travel unit by unit."""
    of_clusters = [tuple(unit for unit in cluster if units[unit].trainable) for cluster in clusters]
    if plan.spread_bytes == 0 or plan.partition == "inter" or spreads_difference(plan):
        return tuple((unit,) for cluster in of_clusters for unit in cluster)
    sizes = {
        number: sum(buffer.nbytes for unit in cluster for buffer in units[unit].buffers if buffer.trainable)
        // plan.params.ranks
        for number, cluster in enumerate(of_clusters)
        if cluster
    }
    groups = grouped(sizes, plan.spread_bytes)
    return tuple(tuple(unit for number in group for unit in of_clusters[number]) for group in groups)


def _gradient_bytes(plan: Plan, units: Sequence[UnitInfo], order: Sequence[int], pieces: int) -> dict[int, int]:
    """Bytes of one of ``pieces`` slices of the gradients on the wire, by trainable unit."""
    itemsize, made = ITEMSIZE[plan.effective_reduce_dtype], {}
    for unit in order:
        sizes = [buffer.numel // pieces * itemsize for buffer in units[unit].buffers if buffer.trainable]
        if sizes:
            made[unit] = sum(sizes)
    return made


def grouped(sizes: Mapping[int, int], at_least: int) -> tuple[tuple[int, ...], ...]:
    """Group units, given with their bytes in order, into groups of at least this many bytes; the remainder as in
    :func:`buckets`."""
    closed: list[tuple[int, ...]] = []
    open_: list[int] = []
    size = 0
    for unit, nbytes in sizes.items():
        open_.append(unit)
        size += nbytes
        if size >= at_least:
            closed.append(tuple(open_))
            open_, size = [], 0
    if open_ and closed and size < at_least / 2:
        closed[-1] += tuple(open_)
    elif open_:
        closed.append(tuple(open_))
    return tuple(closed)
