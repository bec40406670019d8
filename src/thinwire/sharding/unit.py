"""A unit's parameters: sharded, being gathered, or whole. The state machine that owns correctness.

Facts this file is built on:

- Each unit owns one gathered storage for life; freeing resizes it to nothing. A pool shared by units would give
  silently wrong gradients: autograd keeps views of the old buffer, and ``p.data =`` bypasses version counters.
- Reading a storage of size zero crashes the process, so a freed parameter points at a *husk*: a NaN expanded to its
  shape, which reads as NaN and refuses writes.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.moves import Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Lane, UnitInfo
from thinwire.sharding.lanes.journal import Load
from thinwire.sharding.lanes.lanes import Lanes, Ticket
from thinwire.sharding.memory.layout import FlatLayout, Run
from thinwire.sharding.memory.local import set_local
from thinwire.sharding.seeds import Seeds

__all__ = ["FlatBuffer", "GatherLink", "State", "Unit"]


class State(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass
class FlatBuffer:
    """One flat buffer on this rank.

    Attributes:
        layout: what lies where.
        parameters: the module's parameters, in slot order.
        full: the whole buffer, ``[layout.numel]`` in compute dtype; its storage is empty while the unit is sharded.
        shard: this rank's P shard, ``[layout.shard_numel]``; a view of ``full`` when P is not sharded.
        shares: the optimizer ranks' shares of this P shard, by position along the shard axis.
        secondary: this rank's part of the secondary copy, if the plan keeps one.
        master: fp32 values of this rank's share: a tensor of its own, or ``None`` where P is fp32, travels exactly and
            *is* the master.
    """

    layout: FlatLayout
    parameters: list[nn.Parameter]
    full: torch.Tensor
    shard: torch.Tensor
    shares: tuple[tuple[Run, ...], ...]
    secondary: torch.Tensor | None
    master: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._views = [self.full[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.layout.slots]
        poison = torch.full((), float("nan") if self.layout.dtype.is_floating_point else 0).to(self.full)
        self._poison = poison
        self._husks = [(poison.clone() if s.numel == 1 else poison).expand(s.shape) for s in self.layout.slots]
        self._single_husks = [husk for husk in self._husks if husk.numel() == 1]

    def restore(self) -> None:
        """Give the gathered storage its memory back; contents are undefined until gathered."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())

    def release(self) -> None:
        """Let go of the gathered memory."""
        self.full.untyped_storage().resize_(0)

    def show(self, *, whole: bool) -> None:
        """Point the module's parameters at the gathered buffer, or at husks."""
        if not whole:
            for husk in self._single_husks:  # one element cannot refuse writes
                husk.copy_(self._poison)
        for parameter, value in zip(self.parameters, self._views if whole else self._husks, strict=True):
            set_local(parameter, value)


@dataclass(frozen=True)
class GatherLink:
    """How units are gathered.

    Attributes:
        lanes: where gathers run.
        params: the axis that holds one copy of the parameters.
        secondary: the axis that holds a secondary copy, if the plan keeps one.
        codec: encodes what is gathered over ``params``; what is gathered from the secondary shard was encoded before.
        seeds: for that codec.
    """

    lanes: Lanes
    params: AxisGroup
    secondary: AxisGroup | None
    codec: Codec | None
    seeds: Seeds


class Unit:
    """The parameters that are gathered, freed and reduced together.

    Args:
        index: number of the unit.
        module: the module that drives it.
        info: what the program knows of it.
        buffers: its flat buffers, shown whole if P is not sharded, else as husks and without the gathered memory.
        link: how it is gathered.
    """

    def __init__(
        self, index: int, module: nn.Module, info: UnitInfo, buffers: Sequence[FlatBuffer], link: GatherLink
    ) -> None:
        params, secondary = link.params, link.secondary
        self.index, self.module, self.info, self.buffers = index, module, info, tuple(buffers)
        self.sharded = params.size > 1
        self.state = State.SHARDED if self.sharded else State.GATHERED
        self.secondary_valid = False
        # Where a master is a tensor of its own, or parameters are gathered, modules compute with copies.
        self.computes_with_copies = self.sharded or any(buffer.master is not None for buffer in buffers)
        self.num_updates = 0  # times that torch was made to notice new values of the parameters
        self.exact = True  # whether what was gathered last travelled without a codec
        self._spreads: list[Ticket] = []
        self._lanes, self._params, self._secondary = link.lanes, params, secondary
        self._codec, self._seeds = link.codec, link.seeds
        self._gather: list[Ticket] = []
        self._spread_loads = self._loads("spread", Axis.SHARD)
        self._shard_loads = self._loads("gather", Axis.PARAMS)
        self._secondary_loads = self._loads("gather", Axis.SECONDARY, encoded=False)
        if self.sharded:
            for buffer in buffers:
                buffer.restore()  # collectives are made of views, which need the memory that they will see
        self._from_shard = [_gather(params, buffer, buffer.shard) for buffer in buffers] if self.sharded else []
        self._from_secondary = [
            _gather(secondary, buffer, buffer.secondary)
            for buffer in buffers
            if secondary is not None and buffer.secondary is not None
        ]
        if self.sharded:
            for buffer in buffers:
                buffer.release()

    @property
    def name(self) -> str:
        """Dotted module name, for messages."""
        return self.info.name or "(root)"

    @property
    def ready(self) -> bool:
        """Whether its parameters are whole and up to date."""
        return self.state is State.GATHERED and not self._spreads

    def start_gather(self, *, from_secondary: bool, exact: bool = False) -> None:
        """sharded -> gathering. Does nothing in any other state.

        Args:
            from_secondary: read the secondary shard when it is valid.
            exact: send values as they are, whatever the plan's codec.
        """
        if self.state is not State.SHARDED:
            return
        for buffer in self.buffers:
            buffer.restore()
        self.exact = exact or self._codec is None
        loads = self._shard_loads
        if from_secondary and self.secondary_valid:
            collectives, loads = self._from_secondary, self._secondary_loads
        elif self._codec is None or exact:
            collectives = self._from_shard
        else:
            # Made anew each time: a unit that is not on its way keeps no memory for messages.
            collectives = [self._encoded_gather(buffer, self._codec) for buffer in self.buffers]
        for moves, load in zip(collectives, loads, strict=True):
            self._gather.append(self._lanes.submit(Lane.GATHER, moves, after=self._spreads, load=load))
        self.state = State.GATHERING

    def need(self, *, from_secondary: bool) -> None:
        """any state -> gathered: act on demand and wait until the parameters are whole and up to date."""
        self.start_gather(from_secondary=from_secondary)
        if self.state is State.GATHERING:
            for ticket in self._gather:
                ticket.wait()
            self._gather.clear()
            for buffer in self.buffers:
                buffer.show(whole=True)
            self.state = State.GATHERED
        self.join_spread()

    def free(self) -> bool:
        """gathering or gathered -> sharded; drains a gather that nobody needed. Whether anything was freed."""
        if not self.sharded or self.state is State.SHARDED:
            return False
        for ticket in self._gather:
            ticket.wait()
        self._gather.clear()
        for buffer in self.buffers:
            buffer.show(whole=False)
            buffer.release()
        self.state = State.SHARDED
        if (journal := self._lanes.journal) is not None:
            journal.freed(self.index)
        return True

    def keep_secondary(self) -> None:
        """Copy this rank's part of the gathered parameters into the secondary shard, unless it is still valid."""
        if self._secondary is None or self.secondary_valid or self.state is not State.GATHERED:
            return
        for buffer in self.buffers:
            assert buffer.secondary is not None
            buffer.secondary.copy_(_piece(buffer.full, self._secondary))
        self.secondary_valid = True

    def spread(self, number: int, lane: Lane, moves: Moves) -> None:
        """Start spreading the buffer of that number; what is gathered next waits for it."""
        self._spreads.append(self._lanes.submit(lane, moves, load=self._spread_loads[number]))

    def join_spread(self) -> None:
        """Wait until the parameters of the last step have arrived."""
        for ticket in self._spreads:
            ticket.wait()
        self._spreads.clear()

    def updated(self) -> None:
        """The P shard has new values: whatever was derived from the old ones is stale."""
        self.free()
        self.secondary_valid = False
        self.num_updates += 1
        for buffer in self.buffers:
            for parameter in buffer.parameters:
                # An old graph that is still alive would compute with new values: make torch notice.
                torch.autograd.graph.increment_version(parameter)

    def _loads(self, what: str, axis: Axis, *, encoded: bool = True) -> list[Load]:
        label = f"{what} {self.name}"
        return [Load(label, axis, (self.index,), encoded and buffer.layout.encoded) for buffer in self.buffers]

    def _encoded_gather(self, buffer: FlatBuffer, codec: Codec) -> Moves:
        if not buffer.layout.encoded:
            return _gather(self._params, buffer, buffer.shard)
        return _gather(self._params, buffer, buffer.shard, codec, self._seeds.of_unit(Lane.GATHER, self.index))


def _piece(full: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    return full.view(group.size, -1)[group.index]


def _gather(
    group: AxisGroup, buffer: FlatBuffer, source: torch.Tensor, codec: Codec | None = None, seed: int | None = None
) -> Moves:
    """Gather the whole buffer from what each member of the axis holds of it. The same memory every time, so that the
    collective is made once, if there is no codec."""

    def place_own() -> None:
        _piece(buffer.full, group).copy_(source)

    return all_gather(group, buffer.full, codec=codec, seed=seed).after(place_own)
