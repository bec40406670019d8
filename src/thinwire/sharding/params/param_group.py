"""The state machine of a unit's parameters, which are sharded, being gathered, or gathered."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from thinwire.collectives.joint_gather import joint_gather
from thinwire.collectives.moves import Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import AnyLane, Axis, BufferKey, HostLane, Lane, UnitInfo, gather_batches
from thinwire.sharding.lanes.lanes import Load, Ticket
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.gathering import BufferGathers, GatherLink, own_place


class State(enum.Enum):
    """State of a unit's parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """The parameters that are gathered, freed and reduced together, when the forward and backward of a module say so.

    In the beginning, flat buffers are shown whole if P is not sharded, otherwise as husks with freed storage.

    Attributes:
        state: State of the parameters.
        ready: Whether the parameters are whole and up to date.
        is_open: Whether modules read the parameters without asking: the unit is ready, inside a pass.
        opened: Called with whether the unit is open when that changes.
        name: Dotted module name, for messages.
        secondary_valid: Whether the secondary shard has the current values.
        trained: Its trainable parameters, in the order of their buffers.
        computes_with_copies: Whether modules compute with copies of the masters: P is sharded, or masters are separate.
        moved: Whether the ``data`` of a parameter was assigned other values while the unit was gathered, which freeing
            has undone.
        versions: Sum over the parameters of how often torch's version counters were raised for new values.
        exact: Whether the last gather ran without a codec.
        gathers: The collectives that gather the buffers.
    """

    def __init__(
        self, index: int, module: nn.Module, info: UnitInfo, buffers: Sequence[FlatBuffer], link: GatherLink
    ) -> None:
        self.index, self.module = index, module
        self._link = link
        self.lay_out(info, buffers)
        self.sharded = info.stored or link.gathers
        self.state = State.SHARDED if self.sharded else State.GATHERED
        self.ready = not self.sharded
        self.is_open = False
        self.opened: Callable[[bool], None] = lambda _: None
        self.name = info.name or "(root)"
        self.secondary_valid = self.moved = False
        self.versions = 0
        self.exact = True
        self._spreads: list[Ticket] = []
        self._take: Callable[[], None] | None = None  # takes up new values, whose way here has not begun
        self._leaves = False  # whether new values are on their way to the host
        self._gather: list[Ticket] = []

    def lay_out(self, info: UnitInfo, buffers: Sequence[FlatBuffer]) -> None:
        """Take the unit's buffers: in the beginning, and when frozen parameters are to be trained, while nothing is on
        its way."""
        self.info, self.buffers, link = info, tuple(buffers), self._link
        self.trained = [p for buffer in self.buffers if buffer.layout.trainable for p in buffer.parameters]
        has_copies = any(buffer.master is not None for buffer in buffers)
        self.computes_with_copies = info.stored or link.gathers or has_copies
        label = f"spread {info.name or '(root)'}"
        self._spread_loads = [Load(label, Axis.SHARD, (self.index,), b.layout.encoded) for b in buffers]
        self._singles = {
            second: [
                GatherBatch(batch, second)
                for batch in gather_batches(
                    {self.index: info},
                    [self.index],
                    link.at_least,
                    encoded_apart=not second,
                    only_stored=not link.gathers,
                )
            ]
            for second in (False, True)
        }
        self.gathers = BufferGathers(self.index, self.buffers, link)

    @property
    def spreads(self) -> Sequence[Ticket]:
        """Tickets of spreads that gathers wait for."""
        if self._take is not None:
            self.take_update()
        return self._spreads

    def start_gather(self, *, from_secondary: bool, exact: bool = False) -> None:
        """Start a gather (sharded -> gathering), from the secondary shard only if it is valid; if ``exact``, without a
        codec, whatever the plan says. Does nothing in any other state."""
        if self._take is not None:
            self.take_update()
        if self.state is State.SHARDED:
            start_gathers({self.index: self}, self._singles[from_secondary and self.secondary_valid], exact=exact)

    def need(self, *, from_secondary: bool) -> None:
        """Gather on demand (any state -> gathered), and wait until the parameters are whole and up to date."""
        if self._take is not None:
            self.take_update()
        if self.state is State.SHARDED:
            self.start_gather(from_secondary=from_secondary)
        if self.state is State.GATHERING:
            for ticket in self._gather:
                ticket.wait()
            self._gather.clear()
            for buffer in self.buffers:
                buffer.show(whole=True)
            self.state = State.GATHERED
        if self._spreads:
            self.join_spread()
        self.ready = True

    def free(self) -> bool:
        """Free the parameters (gathering or gathered -> sharded), after waiting for a gather in flight; returns whether
        anything was freed."""
        if not self.sharded or self.state is State.SHARDED:
            return False
        for ticket in self._gather:
            ticket.wait()
        self._gather.clear()
        for buffer in self.buffers:
            self.moved |= self.state is State.GATHERED and buffer.replaced()
            buffer.show(whole=False)
            buffer.release()
        self.state, self.ready = State.SHARDED, False
        if self.is_open:
            self.close()
        return True

    def keep_secondary(self) -> None:
        """Copy this rank's part of the gathered parameters into the secondary shard, unless it is still valid."""
        group = self._link.secondary
        if group is None or self.secondary_valid or self.state is not State.GATHERED:
            return
        for buffer in self.buffers:
            assert buffer.secondary is not None
            if buffer.stored is None:  # otherwise, the gather has left the messages there
                buffer.secondary.copy_(buffer.full.view(group.size, -1)[group.index])
        self.secondary_valid = True

    def lend_secondary(self, group: AxisGroup | None) -> None:
        """Give a sharded unit of a plan without secondary shards room for one, cut among the ranks of a group; with
        ``None``, take it back."""
        for buffer in self.buffers:
            kept = 0 if group is None else buffer.shard.numel() * (self._link.params.size // group.size)
            buffer.secondary = None if group is None else buffer.full.new_empty(kept, dtype=buffer.shard.dtype)
        self.secondary_valid, self._link = False, replace(self._link, secondary=group)
        self.gathers = BufferGathers(self.index, self.buffers, self._link)

    def spread(self, number: int, lane: AnyLane, moves: Moves, after: Sequence[Ticket] = ()) -> None:
        """Start spreading the buffer with the given number; the next gather waits for the spread."""
        self.expect_spread(self._link.lanes.submit(lane, moves, after=after, load=self._spread_loads[number]))

    def send_home(self, after: Sequence[Ticket]) -> bool:
        """Let P shards that live on the host, and have got new values, go down once they are spread and the tickets
        ``after`` have ended; the next gather waits for it. Returns whether there are any."""
        visiting = [buffer for buffer in self.buffers if buffer.visits] if not self._leaves else []
        if visiting:
            self._leaves = True
            lanes = self._link.lanes

            def go_down() -> None:
                for buffer in visiting:
                    lanes.send(buffer.written, buffer.shard)

            load = Load(f"parameters {self.name}", Axis.SHARD, (self.index,))
            self.expect_spread(lanes.submit(HostLane.DOWN, go_down, after=(*after, *self._spreads), load=load))
        return bool(visiting)

    def expect_spread(self, ticket: Ticket) -> None:
        """Take the ticket of a spread of one or more of the buffers; the next gather waits for it."""
        self._spreads.append(ticket)
        self.await_values()

    def expect_update(self, take: Callable[[], None]) -> None:
        """Take up new values by ``take``, which starts their spreads, before anything needs them."""
        self._take = take
        self.await_values()

    def take_update(self) -> None:
        """Take up the new values that an update on the host has for this unit, and start to spread them."""
        if (take := self._take) is not None:
            take()
            self._take = None
            if not self._spreads:
                self._have_values()

    def await_values(self) -> None:
        """Have whoever computes with the parameters ask for them first: new values are on their way, or written."""
        if self.ready:
            self.ready = False
            for buffer in self.buffers:
                buffer.mark(ready=False)
        if self.is_open:
            self.close()

    def settle(self) -> None:
        """Let the parameters be computed with at once, if no new values are on their way."""
        if not self._spreads and self._take is None:
            self._have_values()

    def _have_values(self) -> None:
        self.ready = self.state is State.GATHERED
        for buffer in self.buffers if self.ready else ():
            buffer.mark(ready=True)

    def close(self) -> None:
        """Let modules ask before they read the parameters."""
        self.is_open = False
        self.opened(False)

    def join_spread(self) -> None:
        """Wait until the parameters that the last step updated have arrived."""
        if self._take is not None:
            self.take_update()
        if self._spreads:
            for ticket in self._spreads:
                ticket.wait()
            self._spreads.clear()
            if self._leaves:
                self._leaves = False
                for buffer in self.buffers:
                    buffer.leave()
            self._have_values()

    def release_shard(self) -> None:
        """Wait until nothing reads or writes the P shard: a spread, or a gather that nobody has waited for because a
        forward ended early."""
        if self._take is not None or self._spreads:
            self.join_spread()
        for ticket in self._gather:
            ticket.wait()

    def updated(self, only: Collection[int] | None = None) -> None:
        """Invalidate everything derived from the P shard, which gets new values; ``only`` has the identities of the
        parameters that get them, all by default."""
        if self.sharded and self.state is not State.SHARDED:
            self.free()
        self.secondary_valid = False
        for buffer in self.buffers:
            # A graph from before the update would compute with new values: let torch detect that.
            changed = buffer.parameters if only is None else [p for p in buffer.parameters if id(p) in only]
            torch.autograd.graph.increment_version(changed)
            self.versions += len(changed)


@dataclass(frozen=True)
class GatherBatch:
    """Flat buffers that are gathered as one."""

    buffers: tuple[BufferKey, ...]
    from_secondary: bool

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Numbers of the units."""
        return tuple(dict.fromkeys(unit for unit, _ in self.buffers))


def start_gathers(
    units: Sequence[Unit] | Mapping[int, Unit], batches: Sequence[GatherBatch], *, exact: bool = False
) -> None:
    """Start gathers (sharded -> gathering), in order; together, they carry all buffers of their units. Units in any
    other state are left out. If ``exact``, no codec is used, whatever the plan says."""
    wanted = dict.fromkeys(unit for batch in batches for unit in batch.units)
    for number in wanted:
        if units[number]._take is not None:
            units[number].take_update()
    fresh = {number for number in wanted if units[number].state is State.SHARDED}
    if not fresh:
        return
    for unit in (units[number] for number in fresh):
        for buffer in unit.buffers:
            buffer.restore()
        unit.exact, unit.state = exact or unit._link.codec is None, State.GATHERING
    for batch in batches:
        for second in (False, True):
            keys = [
                (unit, number)
                for unit, number in batch.buffers
                if unit in fresh and (batch.from_secondary and units[unit].secondary_valid) is second
            ]
            if keys:
                _start_gather([(units[unit], number) for unit, number in keys], from_secondary=second, exact=exact)


def _start_gather(parts: Sequence[tuple[Unit, int]], *, from_secondary: bool, exact: bool) -> None:
    """Start a gather of buffers of one or more units."""
    of_units = tuple({unit.index: unit for unit, _ in parts}.values())
    link, (first, number) = of_units[0]._link, parts[0]
    encoded = not from_secondary and first.buffers[number].layout.encoded
    group = link.secondary if from_secondary else link.params
    stored = first.buffers[number].stored is not None
    apart = len(parts) == 1 or first.gathers.keeps_messages
    if apart or group is None or (group.size == 1 and not stored):
        moves = [unit.gathers.single(number, from_secondary=from_secondary, exact=exact) for unit, number in parts]
    elif stored:
        messages = [unit.gathers.stored_part(number, from_secondary=from_secondary) for unit, number in parts]
        moves = [first.gathers.stored(messages, from_secondary=from_secondary)]
    else:
        codec = link.codec if encoded and not exact else None
        joint = [
            unit.gathers.part(number, from_secondary=from_secondary, encoded=codec is not None)
            for unit, number in parts
        ]
        moves = [joint_gather(group, joint, codec=codec)]
        if link.from_host and not from_secondary:
            pairs = [(own_place(group, u.buffers[n]), u.buffers[n].shard) for u, n in parts]

            def come_up() -> None:
                for place, shard in pairs:
                    place.copy_(shard, non_blocking=True)

            moves = [moves[0].after(come_up)]
    axis = Axis.SECONDARY if from_secondary else Axis.PARAMS
    load = _load(axis, tuple(unit.index for unit in of_units), tuple(unit.name for unit in of_units), encoded)
    after = [spread for unit in of_units for spread in unit.spreads]
    for work in moves:
        ticket = link.lanes.submit(Lane.GATHER, work, after=after, load=load)
        for unit in of_units:
            unit._gather.append(ticket)


@functools.cache
def _load(axis: Axis, units: tuple[int, ...], names: tuple[str, ...], encoded: bool) -> Load:
    """The description of a gather's data, which is the same in every step."""
    return Load(f"gather {', '.join(names)}", axis, units, encoded)
