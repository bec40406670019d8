"""Gradients on their way: which reduction starts when, on which lane.

Units are reduced in one order on every rank, the reverse of their forward, whatever order autograd delivers them in;
a unit that is ready early waits for its predecessors, and whatever never became ready is reduced when the backward
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from thinwire.collectives.all_reduce import all_reduce
from thinwire.collectives.group import allocate
from thinwire.collectives.reduce_scatter import reduce_scatter
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Lane, UnitInfo, buckets, padded
from thinwire.shard.gradient import Accumulator, Topology, UnitGradient
from thinwire.shard.lanes import Lanes, Ticket
from thinwire.spec import Plan

__all__ = ["Reducer"]

Sources = list[tuple[UnitGradient, torch.Tensor]]


class Reducer:
    """Reduces the gradients of all units.

    Args:
        plan: the plan.
        infos: what the program knows of the units; the source of the buckets.
        gradients: by unit, for units with trainable parameters.
        lanes: where reductions run.
        params, shard, replica: the axes.
    """

    def __init__(
        self,
        plan: Plan,
        infos: Sequence[UnitInfo],
        gradients: Mapping[int, UnitGradient],
        lanes: Lanes,
        params: AxisGroup,
        shard: AxisGroup,
        replica: AxisGroup,
    ) -> None:
        self.plan, self.gradients = plan, gradients
        self.topology = Topology(plan)
        self._infos, self._lanes = infos, lanes
        self._params, self._shard, self._replica = params, shard, replica
        self._pending: deque[int] = deque()
        self._ready: set[int] = set()
        self._reduced: set[int] = set()
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._bucket_cache: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
        self._filling: Sources = []
        self._filling_after: list[Ticket] = []
        self._tickets: list[Ticket] = []
        self._last = True

    # -- a backward, from begin to end -------------------------------------------------------------------------

    def begin(self, order: Sequence[int], *, last: bool) -> None:
        """A backward starts.

        Args:
            order: units in reduction order, the same on every rank.
            last: whether it belongs to the step's last micro-batch.
        """
        self._last = last
        self._pending = deque(unit for unit in order if unit in self.gradients)
        self._ready.clear()
        self._reduced.clear()
        self._buckets = self._bucket_ends(tuple(self._pending))

    def collect(self, unit: int, index: int, grad: torch.Tensor) -> bool:
        """Take one parameter's gradient; whether its unit is complete now."""
        gradient = self.gradients[unit]
        if unit in self._reduced:
            self.join()  # a late gradient must not be added to what a lane is reading
        gradient.collect(index, grad, last=self._last)
        gradient.unsynced = True
        return gradient.complete

    def ready(self, unit: int) -> None:
        """A unit is complete: reduce it, and those that waited for it, in order."""
        self._ready.add(unit)
        while self._pending and self._pending[0] in self._ready:
            self._reduce(self._pending.popleft())

    def delivered(self, unit: int) -> bool:
        """Whether every parameter of a unit has delivered its gradient in this backward."""
        return unit in self._reduced or self.gradients[unit].complete

    def end(self) -> None:
        """The backward has ended: reduce what never became complete, and what came late."""
        while self._pending:
            self._reduce(self._pending.popleft())
        for unit, gradient in self.gradients.items():
            if gradient.started or (self._last and gradient.unsynced):
                self._buckets = {unit: (unit,)}
                self._reduce(unit)

    def join(self) -> None:
        """Wait until every reduction has arrived."""
        for ticket in self._tickets:
            ticket.wait()
        self._tickets.clear()

    def reset(self) -> None:
        """Forget every gradient."""
        for gradient in self.gradients.values():
            gradient.reset()

    # -- one unit, then its bucket -----------------------------------------------------------------------------

    def _reduce(self, unit: int) -> None:
        gradient = self.gradients[unit]
        topology = self.topology
        source = gradient.finish(last=self._last)
        self._reduced.add(unit)
        if topology.params > 1:
            source = self._reduce_over_params(gradient, source)
        self._filling.append((gradient, source))
        if unit in self._buckets:
            bucket, after = self._filling, self._filling_after
            self._filling, self._filling_after = [], []
            self._reduce_bucket(bucket, after)

    def _reduce_over_params(self, gradient: UnitGradient, staging: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter the micro-batch's gradient over the ranks that share P; the fp32 P-shard gradient."""
        topology = self.topology
        if topology.scatter_always:
            target = Accumulator(allocate(gradient.layout.shard_numel, torch.float32, staging.device))
        else:
            target = gradient.local
        out, accumulate = target.values, target.claim()
        scale = topology.scale(topology.params)

        def body() -> None:
            reduce_scatter(self._params, staging, out, scale=scale, accumulate=accumulate)

        self._filling_after.append(
            self._submit(Lane.REDUCE, body, held=(staging, out), overlapped=self.plan.overlap.reduce)
        )
        return out

    def _reduce_bucket(self, bucket: Sources, after: list[Ticket]) -> None:
        topology = self.topology
        overlapped = self.plan.overlap.sync if self._last else self.plan.overlap.reduce
        scatter = topology.shard > 1 and (self._last or topology.scatter_always)
        sync = topology.replica > 1 and self._last
        if scatter:
            straight = not sync or topology.scatter_always
            part, ticket = self._scatter(bucket, into_owned=straight, overlapped=overlapped)
            after = [ticket]
            sources = [(g, g.owned.values) for g, _ in bucket] if straight else _cut(bucket, part)
        else:
            sources = bucket
        if sync:
            self._synchronise(sources, after, overlapped=overlapped)
        if self._last:
            for gradient, _ in bucket:
                gradient.unsynced = False
                if topology.shard > 1 and gradient.has_local:
                    gradient.local.empty = True

    def _scatter(
        self, bucket: Sources, *, into_owned: bool, overlapped: bool
    ) -> tuple[torch.Tensor, Ticket]:
        """Reduce-scatter a bucket over the shard axis, into the optimizer shares or into a part of its own."""
        topology, group = self.topology, self._shard
        sizes = [sum(column) for column in zip(*(g.share_sizes for g, _ in bucket), strict=True)]
        device = bucket[0][1].device
        alone = into_owned and len(bucket) == 1
        part = (
            bucket[0][0].owned.values
            if alone
            else allocate(sizes[group.index], torch.float32, device)
        )
        accumulate = bucket[0][0].owned.claim() if alone else False
        claims = [] if alone or not into_owned else [(g, g.owned.claim()) for g, _ in bucket]
        scale = topology.scale(group.size)

        def body() -> None:
            whole = _pack(bucket, sizes, topology.wire_dtype)
            reduce_scatter(group, whole, part, scale=scale, accumulate=accumulate, sizes=sizes)
            for (gradient, piece), (_, add) in zip(_cut(bucket, part), claims, strict=False):
                _store(gradient.owned.values, piece, add=add)

        held = (part, *(source for _, source in bucket))
        return part, self._submit(Lane.REDUCE, body, held=held, overlapped=overlapped)

    def _synchronise(self, sources: Sources, after: list[Ticket], *, overlapped: bool) -> None:
        """All-reduce a bucket's optimizer shares over their replicas."""
        topology, group = self.topology, self._replica
        total = sum(source.numel() for _, source in sources)
        scale = topology.scale(group.size)
        # What already is the accumulated gradient is replaced by its mean; anything else is added to it.
        claims = [
            (g, source, False if source is g.owned.values else g.owned.claim()) for g, source in sources
        ]
        device = sources[0][1].device

        def body() -> None:
            if len(sources) == 1 and _travels_as_is(sources[0][1], total, group.size, topology.wire_dtype):
                vector = sources[0][1]
            else:
                vector = allocate(padded(total, group.size), topology.wire_dtype, device)
                _concatenate([source for _, source in sources], vector)
            position = 0
            if len(claims) == 1:
                gradient, _, add = claims[0]
                all_reduce(group, vector, gradient.owned.values, scale=scale, accumulate=add)
                return
            summed = allocate(total, torch.float32, device)
            all_reduce(group, vector, summed, scale=scale)
            for gradient, source, add in claims:
                piece = summed[position : position + source.numel()]
                _store(gradient.owned.values, piece, add=add)
                position += source.numel()

        held = tuple(source for _, source in sources)
        self._submit(Lane.SYNC, body, after=after, held=held, overlapped=overlapped)

    # -- parts -------------------------------------------------------------------------------------------------

    def _submit(
        self,
        lane: Lane,
        body: Callable[[], None],
        *,
        overlapped: bool,
        after: Sequence[Ticket] = (),
        held: Sequence[torch.Tensor] = (),
    ) -> Ticket:
        ticket = self._lanes.submit(lane, body, after=after, held=held)
        if overlapped:
            self._tickets = [other for other in self._tickets if not _finished(other)]
            self._tickets.append(ticket)
        else:
            ticket.wait()
        return ticket

    def _bucket_ends(self, order: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        if order not in self._bucket_cache:
            self._bucket_cache[order] = {b[-1]: b for b in buckets(self.plan, self._infos, order)}
        return self._bucket_cache[order]


def _finished(ticket: Ticket) -> bool:
    """Whether a reduction is over; raises its error as soon as it is known."""
    if not ticket.done():
        return False
    ticket.wait()
    return True


def _travels_as_is(source: torch.Tensor, total: int, ranks: int, wire_dtype: torch.dtype) -> bool:
    """Whether a source can be the all-reduce's own buffer: staging is ours to overwrite, accumulators are not."""
    return source.dtype == wire_dtype and source.dtype != torch.float32 and total % ranks == 0


def _pack(bucket: Sources, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A bucket's P-shard gradients in wire dtype, ordered by the optimizer rank that owns each part."""
    first, source = bucket[0]
    if len(bucket) == 1 and first.even and source.dtype == dtype:
        return source
    whole = allocate(sum(sizes), dtype, source.device)
    if all(gradient.even for gradient, _ in bucket):
        table = whole.view(len(sizes), -1)
        column = 0
        for _, source in bucket:
            rows = source.view(len(sizes), -1)
            table[:, column : column + rows.shape[1]].copy_(rows)
            column += rows.shape[1]
        return whole
    position = 0
    for owner in range(len(sizes)):
        for gradient, source in bucket:
            for run in gradient.shares[owner]:
                whole[position : position + run.length].copy_(source[run.start : run.start + run.length])
                position += run.length
    return whole


def _cut(bucket: Sources, part: torch.Tensor) -> Sources:
    """A bucket's part by unit."""
    sizes = [gradient.owned.values.numel() for gradient, _ in bucket]
    return [(gradient, piece) for (gradient, _), piece in zip(bucket, part.split(sizes), strict=True)]


def _concatenate(sources: Sequence[torch.Tensor], vector: torch.Tensor) -> None:
    position = 0
    for source in sources:
        vector[position : position + source.numel()].copy_(source)
        position += source.numel()
    vector[position:].zero_()


def _store(target: torch.Tensor, value: torch.Tensor, *, add: bool) -> None:
    if add:
        target.add_(value)
    else:
        target.copy_(value)
