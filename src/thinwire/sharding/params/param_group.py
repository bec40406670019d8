"""The state machine of a unit's parameters, which are sharded, being gathered, or gathered.

Two facts explain the memory management:

- Each unit owns one gathered storage for its whole life; freeing resizes the storage to zero. A pool shared by units
  would silently give wrong gradients: autograd keeps views of the old buffer, and ``p.data =`` bypasses version
  counters.
- Reading a storage of size zero crashes the process. A freed parameter therefore points at a *husk*: a NaN expanded to
  the parameter's shape, which reads as NaN and refuses writes.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from thinwire.collectives.joint_gather import joint_gather
from thinwire.collectives.moves import Moves
from thinwire.program import Axis, BufferKey, Lane, UnitInfo, gather_batches
from thinwire.sharding.lanes.lanes import Ticket
from thinwire.sharding.lanes.load import Load
from thinwire.sharding.params.gathers import BufferGathers, FlatBuffer, GatherLink, piece_of

__all__ = ["GatherBatch", "State", "Tables", "Unit", "start_gathers"]


class State(enum.Enum):
    """State of a unit's parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Tables:
    """The tables of parameters of a unit's modules. This one stands for none."""

    def open(self) -> None:
        """Let modules read parameters without asking."""

    def close(self) -> None:
        """Let modules ask before they read parameters."""


class Unit:
    """The parameters that are gathered, freed and reduced together.

    Args:
        index: Number of the unit.
        module: Module whose forward and backward drive the unit.
        info: Description of the unit for the program.
        buffers: Flat buffers of the unit; shown whole if P is not sharded, otherwise as husks with freed storage.
        link: Lanes, groups and codec for gathering.

    Attributes:
        state: State of the parameters.
        ready: Whether the parameters are whole and up to date.
        is_open: Whether modules read the parameters without asking: the unit is ready, inside a pass.
        tables: Tables of parameters of the unit's modules, which follow ``is_open``.
        secondary_valid: Whether the secondary shard has the current values.
        computes_with_copies: Whether modules compute with copies of the masters: P is sharded, or masters are separate.
        num_updates: Number of times that torch's version counters were raised for new values.
        exact: Whether the last gather ran without a codec.
        gathers: The collectives that gather the buffers.
    """

    def __init__(
        self, index: int, module: nn.Module, info: UnitInfo, buffers: Sequence[FlatBuffer], link: GatherLink
    ) -> None:
        self.index, self.module, self.info, self.buffers = index, module, info, tuple(buffers)
        self.sharded = link.params.size > 1
        self.state = State.SHARDED if self.sharded else State.GATHERED
        self.ready = not self.sharded
        self.is_open = False
        self.tables = Tables()
        self.secondary_valid = False
        self.computes_with_copies = self.sharded or any(buffer.master is not None for buffer in buffers)
        self.num_updates = 0
        self.exact = True
        self._spreads: list[Ticket] = []
        self._link = link
        self._gather: list[Ticket] = []
        self._spread_loads = [Load(f"spread {self.name}", Axis.SHARD, (index,), b.layout.encoded) for b in buffers]
        self._singles = {
            second: [
                GatherBatch(batch, second)
                for batch in gather_batches({index: info}, [index], link.at_least, encoded_apart=not second)
            ]
            for second in (False, True)
        }
        self.gathers = BufferGathers(index, buffers, link)

    @property
    def name(self) -> str:
        """Dotted module name, for messages."""
        return self.info.name or "(root)"

    def start_gather(self, *, from_secondary: bool, exact: bool = False) -> None:
        """Start a gather (sharded -> gathering). Does nothing in any other state.

        Args:
            from_secondary: Whether to gather from the secondary shard if it is valid.
            exact: Whether to gather without a codec, whatever the plan says.
        """
        if self.state is State.SHARDED:
            start_gathers({self.index: self}, self._singles[from_secondary and self.secondary_valid], exact=exact)

    def expect_gathers(self, *, exact: bool) -> None:
        """Prepare for the gathers of all buffers, which :meth:`gather_moves` or a joint gather perform (sharded ->
        gathering)."""
        for buffer in self.buffers:
            buffer.restore()
        self.exact = exact or self._link.codec is None
        self.state = State.GATHERING

    def expect_ticket(self, ticket: Ticket) -> None:
        """Take the ticket of a gather of one or more of the buffers."""
        self._gather.append(ticket)

    @property
    def spreads(self) -> Sequence[Ticket]:
        """Tickets of spreads that gathers wait for."""
        return self._spreads

    def need(self, *, from_secondary: bool) -> None:
        """Gather on demand (any state -> gathered), and wait until the parameters are whole and up to date."""
        self.start_gather(from_secondary=from_secondary)
        if self.state is State.GATHERING:
            for ticket in self._gather:
                ticket.wait()
            self._gather.clear()
            for buffer in self.buffers:
                buffer.show(whole=True)
            self.state = State.GATHERED
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
            buffer.show(whole=False)
            buffer.release()
        self.state, self.ready = State.SHARDED, False
        self.close()
        return True

    def keep_secondary(self) -> None:
        """Copy this rank's part of the gathered parameters into the secondary shard, unless it is still valid."""
        if self._link.secondary is None or self.secondary_valid or self.state is not State.GATHERED:
            return
        for buffer in self.buffers:
            assert buffer.secondary is not None
            buffer.secondary.copy_(piece_of(buffer.full, self._link.secondary))
        self.secondary_valid = True

    def spread(self, number: int, lane: Lane, moves: Moves) -> None:
        """Start spreading the buffer with the given number; the next gather waits for the spread."""
        self.expect_spread(self._link.lanes.submit(lane, moves, load=self._spread_loads[number]))

    def expect_spread(self, ticket: Ticket) -> None:
        """Take the ticket of a spread of one or more of the buffers; the next gather waits for it."""
        self._spreads.append(ticket)
        self.ready = False
        self.close()

    def close(self) -> None:
        """Let modules ask before they read the parameters."""
        if self.is_open:
            self.is_open = False
            self.tables.close()

    def join_spread(self) -> None:
        """Wait until the parameters that the last step updated have arrived."""
        if self._spreads:
            for ticket in self._spreads:
                ticket.wait()
            self._spreads.clear()
            self.ready = self.state is State.GATHERED

    def release_shard(self) -> None:
        """Wait until nothing reads or writes the P shard: a spread, or a gather that nobody has waited for because a
        forward ended early."""
        self.join_spread()
        for ticket in self._gather:
            ticket.wait()

    def updated(self) -> None:
        """Invalidate everything derived from the P shard, which gets new values."""
        self.free()
        self.secondary_valid = False
        self.num_updates += 1
        for buffer in self.buffers:
            # A graph from before the update would compute with new values: let torch detect that.
            torch.autograd.graph.increment_version(buffer.parameters)


@dataclass(frozen=True)
class GatherBatch:
    """Flat buffers that are gathered as one.

    Attributes:
        buffers: The buffers.
        from_secondary: Whether to gather from the secondary shards.
    """

    buffers: tuple[BufferKey, ...]
    from_secondary: bool

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Numbers of the units."""
        return tuple(dict.fromkeys(unit for unit, _ in self.buffers))


def start_gathers(
    units: Sequence[Unit] | Mapping[int, Unit], batches: Sequence[GatherBatch], *, exact: bool = False
) -> None:
    """Start gathers (sharded -> gathering). Units in any other state are left out.

    Args:
        units: Units by number.
        batches: Gathers to start, in order; together, they carry all buffers of their units.
        exact: Whether to gather without a codec, whatever the plan says.
    """
    if not batches:
        return
    wanted = dict.fromkeys(unit for batch in batches for unit in batch.units)
    fresh = {number for number in wanted if units[number].state is State.SHARDED}
    if not fresh:
        return
    for number in fresh:
        units[number].expect_gathers(exact=exact)
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
    if len(parts) == 1 or group is None or group.size == 1:
        moves = [unit.gathers.single(number, from_secondary=from_secondary, exact=exact) for unit, number in parts]
    else:
        codec = link.codec if encoded and not exact else None
        joint = [
            unit.gathers.part(number, from_secondary=from_secondary, encoded=codec is not None)
            for unit, number in parts
        ]
        moves = [joint_gather(group, joint, codec=codec)]
    axis = Axis.SECONDARY if from_secondary else Axis.PARAMS
    load = _load(axis, tuple(unit.index for unit in of_units), tuple(unit.name for unit in of_units), encoded)
    after = [spread for unit in of_units for spread in unit.spreads]
    for work in moves:
        ticket = link.lanes.submit(Lane.GATHER, work, after=after, load=load)
        for unit in of_units:
            unit.expect_ticket(ticket)


@functools.cache
def _load(axis: Axis, units: tuple[int, ...], names: tuple[str, ...], encoded: bool) -> Load:
    """The description of a gather's data, which is the same in every step."""
    return Load(f"gather {', '.join(names)}", axis, units, encoded)
