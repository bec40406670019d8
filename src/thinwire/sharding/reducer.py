"""Gradients on their way: which reduction starts when, on which lane.

Units are reduced in one order on every rank, the reverse of their forward, whatever order autograd delivers them in;
a unit that is ready early waits for its predecessors, and whatever never became ready is reduced when the backward
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from thinwire.collectives.all_reduce import Feedback, all_reduce, feedback_numels
from thinwire.collectives.memory import allocate
from thinwire.collectives.messages import Residual
from thinwire.collectives.moves import Moves
from thinwire.collectives.reduce_scatter import EXACT, HopCodecs, reduce_scatter, residual_numel
from thinwire.collectives.topology import AxisGroup
from thinwire.program import UNDER_WAY, Axis, Lane, UnitInfo, buckets, padded
from thinwire.sharding.gradient import Accumulator, Topology, UnitGradient
from thinwire.sharding.journal import Load
from thinwire.sharding.lanes import Lanes, Ticket
from thinwire.sharding.seeds import Seeds
from thinwire.spec import Plan

__all__ = ["Reducer"]

Sources = list[tuple[UnitGradient, torch.Tensor]]


class Reducer:
    """Reduces the gradients of all units.

    Args:
        plan: the plan.
        infos: what the program knows of the units; the source of the buckets.
        gradients: by unit, for units with trainable parameters: one for each trainable buffer, in their order.
        lanes: where reductions run.
        params, shard, replica: the axes.
        codecs: what encodes gradients.
        seeds: for codecs that round at random.

    Attributes:
        parts: every gradient of every unit.
        lost: what codecs rounded away of this rank's messages and the next step makes up for (error feedback), fp32,
            by reduction; the same reductions on every rank, of sizes of their own.
    """

    def __init__(
        self,
        plan: Plan,
        infos: Sequence[UnitInfo],
        gradients: Mapping[int, Sequence[UnitGradient]],
        lanes: Lanes,
        params: AxisGroup,
        shard: AxisGroup,
        replica: AxisGroup,
        codecs: HopCodecs,
        seeds: Seeds,
    ) -> None:
        self._plan_codecs, self._codecs, self._seeds = codecs, codecs, seeds
        self.lost: dict[str, torch.Tensor] = {}
        self.plan, self.gradients = plan, gradients
        self.parts = tuple(part for parts in gradients.values() for part in parts)
        self.topology = Topology(plan)
        self._infos, self._lanes = infos, lanes
        self._params, self._shard, self._replica = params, shard, replica
        self._pending: deque[int] = deque()
        self._ready: set[int] = set()
        self._reduced: set[int] = set()
        self._buckets: dict[int, tuple[int, ...]] = {}
        self._bucket_cache: dict[tuple[int, ...], dict[int, tuple[int, ...]]] = {}
        self._filling = (_Filling(), _Filling())  # of what is encoded, and of what is not
        self._tickets: dict[int, list[Ticket]] = {unit: [] for unit in gradients}
        self._under_way: deque[Ticket] = deque()
        self._last = True

    # -- a backward, from begin to end -------------------------------------------------------------------------

    def begin(self, order: Sequence[int], *, last: bool) -> None:
        """A backward starts.

        Args:
            order: units in reduction order, the same on every rank.
            last: whether it belongs to the step's last micro-batch.
        """
        if self._last:
            # A step's reductions are still under way where backwards follow each other without a step between: what
            # they write must not be added to yet.
            self.join()
        self._last = last
        self._pending = deque(unit for unit in order if unit in self.gradients)
        self._ready.clear()
        self._reduced.clear()
        self._buckets = self._bucket_ends(tuple(self._pending))

    def collect(self, unit: int, index: int, grad: torch.Tensor) -> bool:
        """Take one parameter's gradient; whether its unit is complete now."""
        parts = self.gradients[unit]
        part = parts[0] if len(parts) == 1 else next(p for p in reversed(parts) if p.first_slot <= index)
        if unit in self._reduced:
            self.join()  # a late gradient must not be added to what a lane is reading
        part.collect(index - part.first_slot, grad, last=self._last)
        part.unsynced = True
        return part.complete and _complete(parts)

    def ready(self, unit: int) -> None:
        """A unit is complete: reduce it, and those that waited for it, in order."""
        self._ready.add(unit)
        while self._pending and self._pending[0] in self._ready:
            self._reduce(self._pending.popleft())

    def delivered(self, unit: int) -> bool:
        """Whether every parameter of a unit has delivered its gradient in this backward."""
        return unit in self._reduced or _complete(self.gradients[unit])

    def end(self) -> None:
        """The backward has ended: reduce what never became complete, and what came late."""
        while self._pending:
            self._reduce(self._pending.popleft())
        for unit, parts in self.gradients.items():
            if any(part.started or (self._last and part.unsynced) for part in parts):
                self._buckets = {unit: (unit,)}
                self._reduce(unit)

    def abort(self) -> None:
        """The backward failed: what it has collected and not sent is dropped; what is under way arrives."""
        self._pending.clear()
        self._ready.clear()
        for filling in self._filling:
            filling.take()
        self.join()
        for part in self.parts:
            part.drop()

    def join(self) -> None:
        """Wait until every reduction has arrived."""
        self._under_way.clear()
        for unit in self._tickets:
            self.join_unit(unit)

    def join_unit(self, unit: int) -> None:
        """Wait until every reduction of one unit has arrived."""
        tickets = self._tickets[unit]
        for ticket in tickets:
            ticket.wait()
        tickets.clear()

    def encode(self, *, wanted: bool) -> None:
        """Whether gradients are encoded from now on; ``True`` until said otherwise."""
        self.forget_lost()
        self._codecs = self._plan_codecs if wanted else EXACT

    def forget_lost(self) -> None:
        """Forget what codecs lost of earlier gradients."""
        self.join()
        self.lost.clear()

    def reset(self) -> None:
        """Forget every gradient."""
        for part in self.parts:
            part.reset()

    # -- one unit, then its bucket -----------------------------------------------------------------------------

    def _reduce(self, unit: int) -> None:
        self._reduced.add(unit)
        for part in self.gradients[unit]:
            source = part.finish(last=self._last)
            filling = self._filling[0 if part.layout.encoded else 1]
            if self.topology.params > 1:
                source, ticket = self._reduce_over_params(part, source)
                for other in self._filling:
                    other.after.append(ticket)
            filling.sources.append((part, source))
        if unit in self._buckets:
            for filling in self._filling:
                bucket, after = filling.take()
                if bucket:
                    self._reduce_bucket(bucket, after)

    def _reduce_over_params(self, gradient: UnitGradient, staging: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        """Reduce-scatter the micro-batch's gradient over the ranks that share P; the fp32 P-shard gradient, and what
        waits for it."""
        topology = self.topology
        if topology.scatter_always:
            target = Accumulator(allocate(gradient.layout.shard_numel, torch.float32, staging.device))
        else:
            target = gradient.local
        out, accumulate = target.values, target.claim()
        scale = topology.scale(topology.params)
        even_sizes = [out.numel()] * topology.params
        moves = reduce_scatter(
            self._params,
            staging,
            out,
            scale=scale,
            accumulate=accumulate,
            codecs=self._codecs_of([(gradient, staging)]),
            residual=self._lost_by_scatter("params", self._params, [(gradient, staging)], even_sizes),
            seed=self._seeds.next(),
        )
        overlapped = self.plan.overlap.reduce
        return out, self._submit(Lane.REDUCE, moves, "reduce", [(gradient, staging)], overlapped=overlapped)

    def _reduce_bucket(self, bucket: Sources, after: list[Ticket]) -> None:
        topology = self.topology
        overlapped = self.plan.overlap.sync if self._last else self.plan.overlap.reduce
        scatter = topology.shard > 1 and (self._last or topology.scatter_always)
        sync = topology.replica > 1 and self._last
        if scatter and sync and not topology.scatter_always:
            vector, ticket = self._scatter(bucket, after, overlapped=overlapped)
            self._synchronise(bucket, vector, [ticket], overlapped=overlapped)
        else:
            if scatter:
                after = [self._scatter_into_owned(bucket, after, overlapped=overlapped)]
                bucket = [(gradient, gradient.owned.values) for gradient, _ in bucket]
            if sync:
                self._synchronise(bucket, None, after, overlapped=overlapped)
        if self._last:
            for gradient, _ in bucket:
                gradient.unsynced = False
                if topology.shard > 1 and gradient.has_local:
                    gradient.local.empty = True

    def _scatter(self, bucket: Sources, after: list[Ticket], *, overlapped: bool) -> tuple[torch.Tensor, Ticket]:
        """Reduce-scatter a bucket over the shard axis, into a vector that goes on to the replicas in wire dtype."""
        topology, group = self.topology, self._shard
        sizes = _share_sizes(bucket)
        mine = sizes[group.index]
        vector = allocate(padded(mine, self._replica.size), topology.wire_dtype, bucket[0][1].device)
        whole, pack = _packing(bucket, sizes, topology.wire_dtype)
        moves = reduce_scatter(
            group,
            whole,
            vector[:mine],
            scale=topology.scale(group.size),
            sizes=sizes,
            codecs=self._codecs_of(bucket),
            residual=self._lost_by_scatter("shard", group, bucket, sizes),
            seed=self._seeds.next(),
        )
        moves = moves.after(pack).then(lambda: _zero(vector[mine:]))
        ticket = self._submit(Lane.REDUCE, moves, "scatter", bucket, after=after, overlapped=overlapped)
        return vector, ticket

    def _scatter_into_owned(self, bucket: Sources, after: list[Ticket], *, overlapped: bool) -> Ticket:
        """Reduce-scatter a bucket over the shard axis, into the fp32 gradients of the optimizer shares."""
        topology, group = self.topology, self._shard
        sizes = _share_sizes(bucket)
        adds = [gradient.owned.claim() for gradient, _ in bucket]
        scale = topology.scale(group.size)
        whole, pack = _packing(bucket, sizes, topology.wire_dtype)
        alone = len(bucket) == 1
        out = bucket[0][0].owned.values if alone else allocate(sizes[group.index], torch.float32, whole.device)
        moves = reduce_scatter(
            group,
            whole,
            out,
            scale=scale,
            accumulate=alone and adds[0],
            sizes=sizes,
            codecs=self._codecs_of(bucket),
            residual=self._lost_by_scatter("shard", group, bucket, sizes),
            seed=self._seeds.next(),
        ).after(pack)
        if not alone:
            moves = moves.then(lambda: _distribute(bucket, out, adds))
        return self._submit(Lane.REDUCE, moves, "scatter", bucket, after=after, overlapped=overlapped)

    def _synchronise(
        self, bucket: Sources, vector: torch.Tensor | None, after: list[Ticket], *, overlapped: bool
    ) -> None:
        """All-reduce a bucket's optimizer shares over their replicas.

        Args:
            bucket: the units, and their shares' gradients where ``vector`` is not given.
            vector: the shares laid end to end in wire dtype, padded; used as scratch.
            after: what has to finish first.
            overlapped: whether computation goes on meanwhile.
        """
        topology, group = self.topology, self._replica
        scale = topology.scale(group.size)
        # What already is the accumulated gradient is replaced by its mean; anything else is added to it.
        adds = [
            False if vector is None and source is gradient.owned.values else gradient.owned.claim()
            for gradient, source in bucket
        ]
        for gradient, _ in bucket:
            gradient.synchronised = vector is None
        whole, pack = (
            (vector, _nothing) if vector is not None else _concatenation(bucket, group.size, topology.wire_dtype)
        )
        alone = len(bucket) == 1
        total = sum(gradient.owned.values.numel() for gradient, _ in bucket)
        summed = bucket[0][0].owned.values if alone else allocate(total, torch.float32, whole.device)
        scattered, gathered = feedback_numels(group, whole.numel())
        moves = all_reduce(
            group,
            whole,
            summed,
            scale=scale,
            accumulate=alone and adds[0],
            codecs=self._codecs_of(bucket),
            feedback=Feedback(
                self._lost_of("replica", group, bucket, scattered),
                self._lost_of("replica-sum", group, bucket, gathered) if gathered else None,
            ),
            seed=self._seeds.next(),
        )
        if not alone:
            moves = moves.then(lambda: _distribute(bucket, summed, adds))
        self._submit(Lane.SYNC, moves.after(pack), "sync", bucket, after=after, overlapped=overlapped)

    # -- error feedback ----------------------------------------------------------------------------------------

    def _lost_by_scatter(self, what: str, group: AxisGroup, bucket: Sources, sizes: Sequence[int]) -> Residual | None:
        """What a reduce-scatter's last hop lost of the bucket's gradients so far."""
        return self._lost_of(what, group, bucket, residual_numel(group, sizes))

    def _codecs_of(self, bucket: Sources) -> HopCodecs:
        return self._codecs if bucket[0][0].layout.encoded else EXACT

    def _lost_of(self, what: str, group: AxisGroup, bucket: Sources, numel: int) -> Residual | None:
        """fp32, kept from step to step, nothing at first; ``None`` without error feedback, or if nothing gets lost."""
        codecs = self._codecs_of(bucket)
        codec = codecs.across if group.nodes > 1 else codecs.inside
        if not self.plan.wire.error_feedback or codec is None or codec.spec.is_lossless:
            return None
        key = f"{what}/{'-'.join(str(gradient.unit) for gradient, _ in bucket)}"
        lost = self.lost.get(key)
        if lost is None or lost.numel() != numel:
            lost = self.lost[key] = torch.zeros(numel, device=bucket[0][1].device)
        return Residual(lost, self.plan.wire.feedback_gain)

    # -- parts -------------------------------------------------------------------------------------------------

    def _submit(
        self,
        lane: Lane,
        moves: Moves,
        what: str,
        bucket: Sources,
        *,
        overlapped: bool,
        after: Sequence[Ticket] = (),
    ) -> Ticket:
        label = f"{what} {', '.join(gradient.name for gradient, _ in bucket)}"
        axis = {"reduce": Axis.PARAMS, "scatter": Axis.SHARD, "sync": Axis.REPLICA}[what]
        load = Load(label, axis, tuple(gradient.unit for gradient, _ in bucket), bucket[0][0].layout.encoded)
        ticket = self._lanes.submit(lane, moves, after=after, load=load)
        if not overlapped:
            ticket.wait()
            return ticket
        for gradient, _ in bucket:
            tickets = self._tickets[gradient.unit]
            tickets[:] = [other for other in tickets if not _finished(other)]
            tickets.append(ticket)
        self._under_way.append(ticket)
        while len(self._under_way) > UNDER_WAY:
            self._under_way.popleft().wait()
        return ticket

    def _bucket_ends(self, order: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        if order not in self._bucket_cache:
            self._bucket_cache[order] = {b[-1]: b for b in buckets(self.plan, self._infos, order)}
        return self._bucket_cache[order]


class _Filling:
    """A bucket that fills up: of gradients that are encoded, or of those that are not.

    Attributes:
        sources: gradients, and where their values are.
        after: what has to finish first.
    """

    def __init__(self) -> None:
        self.sources: Sources = []
        self.after: list[Ticket] = []

    def take(self) -> tuple[Sources, list[Ticket]]:
        """What it holds; it is empty then."""
        taken = self.sources, self.after
        self.sources, self.after = [], []
        return taken


def _complete(parts: Sequence[UnitGradient]) -> bool:
    """Whether every parameter of a unit has delivered its gradient in this backward."""
    return all(part.complete for part in parts)


def _finished(ticket: Ticket) -> bool:
    """Whether a reduction is over; raises its error as soon as it is known."""
    if not ticket.done():
        return False
    ticket.raise_error()
    return True


def _share_sizes(bucket: Sources) -> list[int]:
    """Elements of a bucket that each rank of the shard axis owns."""
    return [sum(column) for column in zip(*(g.share_sizes for g, _ in bucket), strict=True)]


def _packing(bucket: Sources, sizes: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
    """A bucket's P-shard gradients in wire dtype, ordered by the optimizer rank that owns each part: the vector, and
    what fills it."""
    first, source = bucket[0]
    if len(bucket) == 1 and first.even and source.dtype == dtype:
        return source, _nothing
    whole = allocate(sum(sizes), dtype, source.device)
    fill = _pack_rows if all(gradient.even for gradient, _ in bucket) else _pack_runs
    return whole, lambda: fill(bucket, whole, len(sizes))


def _pack_rows(bucket: Sources, whole: torch.Tensor, owners: int) -> None:
    """Equal slices: every source is a table with a row for each owner."""
    table = whole.view(owners, -1)
    column = 0
    for _, source in bucket:
        rows = source.view(owners, -1)
        table[:, column : column + rows.shape[1]].copy_(rows)
        column += rows.shape[1]


def _pack_runs(bucket: Sources, whole: torch.Tensor, owners: int) -> None:
    """Whole fragments: each owner's runs, one after another."""
    position = 0
    for owner in range(owners):
        for gradient, source in bucket:
            for run in gradient.shares[owner]:
                whole[position : position + run.length].copy_(source[run.start : run.start + run.length])
                position += run.length


def _concatenation(bucket: Sources, ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], None]]:
    """The sources laid end to end in wire dtype, padded to a multiple of ``ranks``, in memory of our own to work in:
    the vector, and what fills it."""
    if len(bucket) == 1 and bucket[0][1].dtype == dtype != torch.float32 and bucket[0][1].numel() % ranks == 0:
        return bucket[0][1], _nothing  # staging is ours; accumulators are fp32
    total = sum(source.numel() for _, source in bucket)
    vector = allocate(padded(total, ranks), dtype, bucket[0][1].device)

    def fill() -> None:
        position = 0
        for _, source in bucket:
            vector[position : position + source.numel()].copy_(source)
            position += source.numel()
        _zero(vector[position:])

    return vector, fill


def _nothing() -> None:
    """What fills a vector that is full."""


def _zero(padding: torch.Tensor) -> None:
    padding.zero_()


def _distribute(bucket: Sources, values: torch.Tensor, adds: Sequence[bool]) -> None:
    """Give each unit of a bucket its part of ``values``."""
    position = 0
    for (gradient, _), add in zip(bucket, adds, strict=True):
        owned = gradient.owned.values
        piece = values[position : position + owned.numel()]
        if add:
            owned.add_(piece)
        else:
            owned.copy_(piece)
        position += owned.numel()
