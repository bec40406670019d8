"""The collectives that gather a unit's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.codecs import Codec
from thinwire.collectives.all_gather import all_gather
from thinwire.collectives.joint_gather import Part, StoredPart, stored_gather
from thinwire.collectives.memory import allocate
from thinwire.collectives.moves import Move, Moves
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Lane
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.seeds import Seeds


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
        stored: Codec of P shards that are kept encoded.
        at_least: Bytes until which buffers that are gathered at the same time travel as one.
        from_host: Whether P shards live on the host.
    """

    lanes: Lanes
    params: AxisGroup
    secondary: AxisGroup | None
    codec: Codec | None
    seeds: Seeds
    stored: Codec | None = None
    at_least: int = 0
    from_host: bool = False

    @property
    def gathers(self) -> bool:
        """Whether all units are gathered before they are used."""
        return self.params.size > 1 or self.from_host


class BufferGathers:
    """Builds the collectives that gather the buffers of one unit.

    Attributes:
        keeps_messages: Whether gathers with the codec keep what they receive, from which later ones fill the buffers.
    """

    def __init__(self, unit: int, buffers: Sequence[FlatBuffer], link: GatherLink) -> None:
        self._unit, self._buffers, self._link = unit, tuple(buffers), link
        self.keeps_messages = False
        self._kept: dict[int, Moves] = {}  # by buffer, what fills it from what is kept of its gather
        params, secondary, self._seeds = link.params, link.secondary, link.seeds
        for buffer in buffers:
            buffer.restore()  # collectives are built from views, which need allocated memory
        self._parts: dict[tuple[int, bool], Part] = {}  # parts of joint gathers without a codec, made once
        # What is kept encoded travels in messages, for which a unit keeps no memory between gathers.
        self._as_they_are: dict[tuple[int, bool], Moves] = {}
        for number, buffer in enumerate(buffers):
            if buffer.stored is None and buffer.gathered:
                self._as_they_are[number, False] = _gather(params, buffer, buffer.shard)
                if secondary is not None and buffer.secondary is not None:
                    self._as_they_are[number, True] = _gather(secondary, buffer, buffer.secondary)
        for buffer in buffers:
            buffer.release()

    def single(self, number: int, *, from_secondary: bool, exact: bool) -> Moves:
        """The gather of one buffer by itself; if ``exact``, without a codec, whatever the plan says."""
        buffer, codec = self._buffers[number], self._link.codec
        if from_secondary and buffer.stored is None:
            return self._as_they_are[number, True]
        if number in self._kept and not exact:
            return self._kept[number]
        if buffer.stored is not None:
            part = self.stored_part(number, from_secondary=from_secondary)
            moves = self.stored([part], from_secondary=from_secondary)
        elif codec is None or exact or not buffer.layout.encoded:
            return self._keep_copy(number) if self.keeps_messages and not exact else self._as_they_are[number, False]
        else:
            # Built for each gather, so that a unit keeps no memory for messages between gathers.
            seed = self._seeds.of_unit(Lane.GATHER, self._unit)
            moves = _gather(self._link.params, buffer, buffer.shard, codec, seed)
        if self.keeps_messages:
            self._kept[number] = Moves([moves[-1]])  # the last move decodes all messages
        return moves

    def forget_messages(self) -> None:
        """Keep nothing any more."""
        self.keeps_messages = False
        self._kept.clear()

    def _keep_copy(self, number: int) -> Moves:
        """The gather of a buffer without a codec, of which a copy is kept."""
        full, moves = self._buffers[number].full, self._as_they_are[number, False]
        kept = allocate(full.numel(), full.dtype, full.device)

        def keep() -> None:
            kept.copy_(full)

        def fill() -> None:
            full.copy_(kept)

        self._kept[number] = Moves([Move(moves[-1].stage, fill)])
        return moves.then(keep)

    def stored(self, parts: Sequence[StoredPart], *, from_secondary: bool) -> Moves:
        """The gather of buffers that are kept encoded; parts of any units."""
        group, codec = self._link.secondary if from_secondary else self._link.params, self._link.stored
        assert group is not None
        assert codec is not None
        return stored_gather(group, parts, codec=codec)

    def stored_part(self, number: int, *, from_secondary: bool) -> StoredPart:
        """One buffer as a part of a gather of what is kept encoded. The secondary shard gets its messages where those
        of all P shards pass by."""
        buffer, second = self._buffers[number], self._link.secondary
        message = buffer.shard.view(1, -1)
        if second is None or buffer.secondary is None:
            return StoredPart(buffer.full, message)
        kept = buffer.secondary.view(-1, buffer.shard.numel())
        if from_secondary:
            return StoredPart(buffer.full, kept)
        return StoredPart(buffer.full, message, kept, second.index * len(kept))

    def part(self, number: int, *, from_secondary: bool, encoded: bool) -> Part:
        """One buffer as a part of a joint gather, which has a codec if ``encoded``."""
        key = number, from_secondary
        if key not in self._parts:
            buffer = self._buffers[number]
            own = buffer.secondary if from_secondary else buffer.shard
            if self._link.from_host and not from_secondary:
                own = own_place(self._link.params, buffer)
            assert own is not None
            self._parts[key] = Part(buffer.full, own)
        if not encoded:
            return self._parts[key]
        return replace(self._parts[key], seed=self._seeds.of_unit(Lane.GATHER, self._unit))


def _gather(
    group: AxisGroup, buffer: FlatBuffer, source: torch.Tensor, codec: Codec | None = None, seed: int | None = None
) -> Moves:
    """Gather the whole buffer from the pieces that the ranks of the group hold. It uses the same memory every time, so
    that without a codec the collective is built only once."""

    def place_own() -> None:
        own_place(group, buffer).copy_(source, non_blocking=True)

    # As bytes without a codec: NCCL does not know every dtype of frozen weights.
    whole = buffer.full if codec is not None else buffer.full.view(torch.uint8)
    return all_gather(group, whole, codec=codec, seed=seed).after(place_own)


def own_place(group: AxisGroup, buffer: FlatBuffer) -> torch.Tensor:
    """This rank's piece of a gathered buffer."""
    return buffer.full.view(group.size, -1)[group.index]
