"""The flat buffers of a unit on this rank, and the collectives that gather them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.joint_gather import Part
from thinwire.collectives.moves import Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Lane
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.memory.layout import FlatLayout, Run
from thinwire.sharding.memory.local import set_local
from thinwire.sharding.params.seeds import Seeds

__all__ = ["BufferGathers", "FlatBuffer", "GatherLink", "piece_of"]


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
        self._husks = [_husk(slot.shape, self.full.dtype, self.full.device) for slot in self.layout.slots]
        self._single_husks = [husk for husk in self._husks if husk.numel() == 1]
        self._storage, self._nbytes = self.full.untyped_storage(), self.full.nbytes
        self._master_runs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def master_runs(self, position: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of the elements of the P shard that masters of this rank belong to, and views of these masters; none if
        the P shard itself holds them.

        Args:
            position: Position of this rank along the shard axis.
        """
        if position not in self._master_runs:
            runs = self.shares[position] if self.master is not None else ()
            of_shard = [self.shard[run.start : run.start + run.length] for run in runs]
            of_master = list(self.master.split([run.length for run in runs])) if self.master is not None else []
            self._master_runs[position] = of_shard, of_master
        return self._master_runs[position]

    def restore(self) -> None:
        """Allocate the gathered storage; its contents are undefined until the unit is gathered."""
        self._storage.resize_(self._nbytes)

    def release(self) -> None:
        """Free the gathered storage."""
        self._storage.resize_(0)

    def show(self, *, whole: bool) -> None:
        """Point the module's parameters at the gathered buffer, or at husks."""
        if not whole:
            for husk in self._single_husks:  # a husk of one element does not refuse writes
                husk.copy_(_poison(husk.dtype, husk.device))
        set_local(self.parameters, self._views if whole else self._husks)


def _husk(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What a freed parameter of this shape points at. Parameters share it, except one that can be written to."""
    if math.prod(shape) == 1:
        return _poison(dtype, device).clone().expand(shape)
    return _shared_husk(tuple(shape), dtype, device)


@functools.cache
def _shared_husk(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return _poison(dtype, device).expand(shape)


@functools.cache
def _poison(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A NaN, 0-D; zero in dtypes that have none."""
    with torch.inference_mode(False):
        return torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)


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
        at_least: Bytes until which buffers that are gathered at the same time travel as one.
    """

    lanes: Lanes
    params: AxisGroup
    secondary: AxisGroup | None
    codec: Codec | None
    seeds: Seeds
    at_least: int = 0


class BufferGathers:
    """Builds the collectives that gather the buffers of one unit.

    Args:
        unit: Number of the unit.
        buffers: Its flat buffers.
        link: Lanes, groups and codec for gathering.
    """

    def __init__(self, unit: int, buffers: Sequence[FlatBuffer], link: GatherLink) -> None:
        self._unit, self._buffers, self._link = unit, tuple(buffers), link
        params, secondary = link.params, link.secondary
        sharded = params.size > 1
        for buffer in buffers if sharded else ():
            buffer.restore()  # collectives are built from views, which need allocated memory
        self._parts: dict[tuple[int, bool], Part] = {}  # parts of joint gathers without a codec, made once
        self._from_shard = [_gather(params, buffer, buffer.shard) for buffer in buffers] if sharded else []
        self._from_secondary = [
            _gather(secondary, buffer, buffer.secondary)
            for buffer in buffers
            if secondary is not None and buffer.secondary is not None
        ]
        for buffer in buffers if sharded else ():
            buffer.release()

    def single(self, number: int, *, from_secondary: bool, exact: bool) -> Moves:
        """The gather of one buffer by itself.

        Args:
            number: Number of the buffer.
            from_secondary: Whether to gather from the secondary shard.
            exact: Whether to gather without a codec, whatever the plan says.
        """
        buffer, codec = self._buffers[number], self._link.codec
        if from_secondary:
            return self._from_secondary[number]
        if codec is None or exact or not buffer.layout.encoded:
            return self._from_shard[number]
        # Built for each gather, so that a unit keeps no memory for messages between gathers.
        return _gather(self._link.params, buffer, buffer.shard, codec, self._seed())

    def part(self, number: int, *, from_secondary: bool, encoded: bool) -> Part:
        """One buffer as a part of a joint gather.

        Args:
            number: Number of the buffer.
            from_secondary: Whether to gather from the secondary shard.
            encoded: Whether the gather has a codec.
        """
        key = number, from_secondary
        if key not in self._parts:
            buffer = self._buffers[number]
            own = buffer.secondary if from_secondary else buffer.shard
            assert own is not None
            self._parts[key] = Part(buffer.full, own)
        return replace(self._parts[key], seed=self._seed()) if encoded else self._parts[key]

    def _seed(self) -> int:
        return self._link.seeds.of_unit(Lane.GATHER, self._unit)


def piece_of(full: torch.Tensor, group: AxisGroup) -> torch.Tensor:
    return full.view(group.size, -1)[group.index]


def _gather(
    group: AxisGroup, buffer: FlatBuffer, source: torch.Tensor, codec: Codec | None = None, seed: int | None = None
) -> Moves:
    """Gather the whole buffer from the pieces that the ranks of the group hold. It uses the same memory every time, so
    that without a codec the collective is built only once."""

    def place_own() -> None:
        piece_of(buffer.full, group).copy_(source)

    return all_gather(group, buffer.full, codec=codec, seed=seed).after(place_own)
