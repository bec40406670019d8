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
    """State of a unit's parameters."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


@dataclass
class FlatBuffer:
    """One flat buffer on this rank.

    Attributes:
        layout: Positions of the parameters in the buffer.
        parameters: Parameters of the modules, in slot order.
        full: The whole buffer, ``[layout.numel]`` in compute dtype; its storage is empty while the unit is sharded.
        shard: This rank's P shard, ``[layout.shard_numel]``; the same tensor as ``full`` if P is not sharded.
        shares: Shares of this P shard, by position along the shard axis.
        secondary: This rank's part of the secondary copy; ``None`` if the plan keeps none.
        master: Master values of this rank's share, fp32; ``None`` if the P shard itself holds them, which requires that
            P is fp32 and travels without loss.
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
        """Allocate the gathered storage; its contents are undefined until the unit is gathered."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())

    def release(self) -> None:
        """Free the gathered storage."""
        self.full.untyped_storage().resize_(0)

    def show(self, *, whole: bool) -> None:
        """Point the module's parameters at the gathered buffer, or at husks."""
        if not whole:
            for husk in self._single_husks:  # a husk of one element does not refuse writes
                husk.copy_(self._poison)
        for parameter, value in zip(self.parameters, self._views if whole else self._husks, strict=True):
            set_local(parameter, value)


@dataclass(frozen=True)
class GatherLink:
    """The lanes, groups and codec for gathering units.

    Attributes:
        lanes: Lanes that gathers run on.
        params: Group of ranks that hold one copy of the parameters.
        secondary: Group of ranks that hold one secondary copy; ``None`` if the plan keeps none.
        codec: Codec of gathers over ``params``. Gathers from the secondary shard need none: its values were already
            encoded once.
        seeds: Seeds for the codec.
    """

    lanes: Lanes
    params: AxisGroup
    secondary: AxisGroup | None
    codec: Codec | None
    seeds: Seeds


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
        secondary_valid: Whether the secondary shard has the current values.
        computes_with_copies: Whether modules compute with copies of the masters: P is sharded, or masters are separate.
        num_updates: Number of times that torch's version counters were raised for new values.
        exact: Whether the last gather ran without a codec.
    """

    def __init__(
        self, index: int, module: nn.Module, info: UnitInfo, buffers: Sequence[FlatBuffer], link: GatherLink
    ) -> None:
        params, secondary = link.params, link.secondary
        self.index, self.module, self.info, self.buffers = index, module, info, tuple(buffers)
        self.sharded = params.size > 1
        self.state = State.SHARDED if self.sharded else State.GATHERED
        self.secondary_valid = False
        self.computes_with_copies = self.sharded or any(buffer.master is not None for buffer in buffers)
        self.num_updates = 0
        self.exact = True
        self._spreads: list[Ticket] = []
        self._lanes, self._params, self._secondary = link.lanes, params, secondary
        self._codec, self._seeds = link.codec, link.seeds
        self._gather: list[Ticket] = []
        self._spread_loads = self._loads("spread", Axis.SHARD)
        self._shard_loads = self._loads("gather", Axis.PARAMS)
        self._secondary_loads = self._loads("gather", Axis.SECONDARY, encoded=False)
        if self.sharded:
            for buffer in buffers:
                buffer.restore()  # collectives are built from views, which need allocated memory
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
        """Whether the parameters are whole and up to date."""
        return self.state is State.GATHERED and not self._spreads

    def start_gather(self, *, from_secondary: bool, exact: bool = False) -> None:
        """Start a gather (sharded -> gathering). Does nothing in any other state.

        Args:
            from_secondary: Whether to gather from the secondary shard if it is valid.
            exact: Whether to gather without a codec, whatever the plan says.
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
            # Built for each gather, so that a unit keeps no memory for messages between gathers.
            collectives = [self._encoded_gather(buffer, self._codec) for buffer in self.buffers]
        for moves, load in zip(collectives, loads, strict=True):
            self._gather.append(self._lanes.submit(Lane.GATHER, moves, after=self._spreads, load=load))
        self.state = State.GATHERING

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
        """Start spreading the buffer with the given number; the next gather waits for the spread."""
        self._spreads.append(self._lanes.submit(lane, moves, load=self._spread_loads[number]))

    def join_spread(self) -> None:
        """Wait until the parameters that the last step updated have arrived."""
        for ticket in self._spreads:
            ticket.wait()
        self._spreads.clear()

    def updated(self) -> None:
        """Invalidate everything derived from the P shard, which gets new values."""
        self.free()
        self.secondary_valid = False
        self.num_updates += 1
        for buffer in self.buffers:
            for parameter in buffer.parameters:
                # A graph from before the update would compute with new values: let torch detect that.
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
    """Gather the whole buffer from the pieces that the ranks of the group hold. It uses the same memory every time, so
    that without a codec the collective is built only once."""

    def place_own() -> None:
        _piece(buffer.full, group).copy_(source)

    return all_gather(group, buffer.full, codec=codec, seed=seed).after(place_own)
