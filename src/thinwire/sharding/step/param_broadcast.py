"""Sends updated parameters from the ranks that own them to the ranks that hold the same P shard."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import torch

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.joint_gather import Part, joint_gather
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import LEAVING, Axis, BufferKey, HostLane, Kind, Lane, Operation
from thinwire.program.wire import spreads_difference
from thinwire.sharding.lanes.lanes import Load, Ticket
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.step.schedule import Programs
from thinwire.sharding.step.sharded_model import ShardedModel


class Spreads:
    """Spreads the updated parameters of one model, as its program says."""

    def __init__(self, sharded: ShardedModel, programs: Programs) -> None:
        self.units, self._sharded, self._programs = sharded.units, sharded, programs
        self._group = sharded.axes[Axis.SHARD, Lane.SPREAD]
        self._on_host = sharded.plan.residence.streams_params
        self._leaving = deque[Unit]()  # units whose new values are on their way to the host
        self._parts: dict[BufferKey, Part] = {}  # parts of joint spreads without a codec, made once

    def expect(self, ticket: Ticket, units: Iterable[int]) -> None:
        """Let units wait for their update."""
        for index in units:
            self.units[index].expect_spread(ticket)

    def forget_parts(self) -> None:
        """Forget which buffers travel together, because units have other ones."""
        self._parts.clear()

    def write_back(
        self,
        indices: Sequence[int],
        *,
        differences: bool = False,
        only: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """Cast the new values of units' masters into their P shards. ``differences`` includes buffers whose spreads
        carry differences from the masters; ``only`` has by unit the identities of the parameters that have new values,
        all by default."""
        self.invalidate(indices, only)
        if self._on_host:
            self.visit(indices)
        self.cast(indices, differences=differences)

    def invalidate(self, indices: Sequence[int], only: Mapping[int, Collection[int]] | None = None) -> None:
        """Invalidate everything that is derived from units' P shards; see :meth:`write_back` for the arguments."""
        for index in indices:
            self.units[index].updated(None if only is None else only[index])

    def cast(self, indices: Sequence[int], *, differences: bool = False) -> None:
        """Cast the new values of units' masters, on the device, into their P shards; see :meth:`write_back`."""
        places: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index in indices:
            for buffer in self.units[index].buffers:
                if buffer.stored is not None:
                    buffer.stored.take_edits()
                if buffer.layout.trainable and (differences or not self._spreads_difference(buffer)):
                    of_shard, of_master = buffer.master_runs(self._group.index)
                    places += of_shard
                    values += of_master
        if places:
            torch._foreach_copy_(places, values)

    def start(self, *, exactly: bool = False, only: Set[int] | None = None) -> None:
        """Start spreading the P shards of units, the same on every rank; all by default. A plan that spreads
        differences may spread the values themselves this time, ``exactly`` and without a codec."""
        for batch in self._programs.spreads:
            if only is None or not only.isdisjoint(batch):
                self.start_batch(batch, exactly=exactly, only=only)
        if self._on_host:
            self.send_home(range(len(self.units)))  # those that no batch spreads

    def start_batch(
        self,
        batch: tuple[int, ...],
        *,
        exactly: bool = False,
        only: Set[int] | None = None,
        after: Sequence[Ticket] = (),
    ) -> None:
        """Start spreading the P shards of units that travel together, once ``after`` has ended; see :meth:`start`.
        Ranks start batches in the same order."""
        operations = self._programs.spreads.get(batch, ())
        for operation, _ in operations:
            if len(batch) > 1:
                self._start_together(operation, only, after)
            else:
                ((index, number),) = operation.buffers
                unit = self.units[index]
                moves = self._moves(operation, unit.buffers[number], exactly=exactly)
                unit.spread(number, operation.lane, moves, after)
        if self._on_host:
            self.send_home(batch, after)
        if any(waited for _, waited in operations):
            for index in batch:
                self.units[index].join_spread()

    def visit(self, indices: Iterable[int]) -> None:
        """Have memory of the device for P shards of units that live on the host, and where spreads add to what ranks
        hold, these values. On the thread that computes, before :meth:`write_back` on any stream."""
        units = [self.units[index] for index in indices]
        buffers = [buffer for unit in units for buffer in unit.buffers if buffer.visit()]
        kept = [buffer for buffer in buffers if self._spreads_difference(buffer)]

        def come_up() -> None:
            for buffer in kept:
                buffer.written.copy_(buffer.shard, non_blocking=True)

        if kept:
            self._sharded.lanes.submit(HostLane.UP, come_up).wait()

    def send_home(self, indices: Iterable[int], after: Sequence[Ticket] = ()) -> None:
        """Let new values of P shards that live on the host go down, once those of several units before have. Their
        spreads have begun; ``after`` are tickets of their updates."""
        units = self.units
        self._leaving += [unit for unit in (units[index] for index in indices) if unit.send_home(after)]
        while len(self._leaving) > LEAVING:
            self._leaving.popleft().join_spread()

    def _start_together(self, operation: Operation, only: Set[int] | None, after: Sequence[Ticket]) -> None:
        units, codec = self.units, self._sharded.codecs.spread if operation.encoded else None
        parts, names = [], {}
        for key in operation.buffers:
            index, _ = key
            if only is None or index in only:
                parts.append(self._part(key, encoded=codec is not None))
                names[index] = units[index].name
        if not parts:
            return
        moves = joint_gather(self._group, parts, codec=codec)
        load = Load(f"spread {', '.join(names.values())}", Axis.SHARD, tuple(names), operation.encoded)
        ticket = self._sharded.lanes.submit(operation.lane, moves, after=after, load=load)
        for index in names:
            units[index].expect_spread(ticket)

    def _part(self, key: BufferKey, *, encoded: bool) -> Part:
        """A buffer as a part of a joint spread."""
        index, number = key
        if key not in self._parts:
            shard = self.units[index].buffers[number].written
            self._parts[key] = Part(shard, shard.view(self._group.size, -1)[self._group.index])
        return (
            replace(self._parts[key], seed=self._sharded.seeds.of_unit(Lane.SPREAD, index))
            if encoded
            else self._parts[key]
        )

    def join(self, *, settle: bool = True) -> None:
        """Wait until every unit's parameters are up to date, and its P shard may be written; to ``settle``, the host
        waits as well, so that it can read what lives there."""
        for unit in self.units:
            unit.release_shard()
        if settle:
            self._sharded.lanes.settle(HostLane.DOWN)

    def _moves(self, operation: Operation, buffer: FlatBuffer, *, exactly: bool) -> Moves:
        codec = self._sharded.codecs.spread if buffer.layout.encoded else None
        update = None
        if self._spreads_difference(buffer):
            codec, update = (None, None) if exactly else (codec, buffer.masters_on_device)
        seed = self._sharded.seeds.of_unit(Lane.SPREAD, operation.units[0])
        return _gather_shares(self._group, buffer, operation.kind, codec, update, seed)

    def _spreads_difference(self, buffer: FlatBuffer) -> bool:
        """Whether spreads of a buffer carry the difference between the masters and the values that ranks hold."""
        spreads = self._group.size > 1 and buffer.layout.encoded and buffer.master is not None
        return spreads and spreads_difference(self._sharded.plan)


def _gather_shares(
    group: AxisGroup, buffer: FlatBuffer, kind: Kind, codec: Codec | None, update: torch.Tensor | None, seed: int
) -> Moves:
    """Gather all shares of a P shard, in place if they are contiguous, otherwise packed.

    With ``update``, which holds this rank's masters, the differences from the masters travel instead.
    """
    if kind is Kind.ALL_GATHER:
        return all_gather(group, buffer.written, codec=codec, update=update, seed=seed)
    sizes = [sum(run.length for run in share) for share in buffer.shares]
    whole = allocate(sum(sizes), buffer.layout.dtype, buffer.full.device)
    shares = list(enumerate(buffer.shares))
    packed = shares if update is not None else [shares[group.index]]
    unpacked = shares if codec is not None else [share for share in shares if share[0] != group.index]

    def pack() -> None:
        for owner, share in packed:
            offset = sum(sizes[:owner])
            for run in share:
                whole[offset : offset + run.length].copy_(buffer.written[run.start : run.start + run.length])
                offset += run.length

    def unpack() -> None:
        for owner, share in unpacked:
            offset = sum(sizes[:owner])
            for run in share:
                buffer.written[run.start : run.start + run.length].copy_(whole[offset : offset + run.length])
                offset += run.length

    moves = all_gather(group, whole, sizes, kind, codec=codec, update=update, seed=seed)
    return moves.after(pack).then(unpack)
