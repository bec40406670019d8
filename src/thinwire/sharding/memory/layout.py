"""The layout of a unit's parameters in flat buffers, and the part that each rank holds.

Terms, from the largest to the smallest:

- a *flat buffer* holds a unit's parameters of one dtype and ``requires_grad`` one after the other, padded;
- a *P shard* is one of ``s_p`` equal slices of it;
- a *share* is the part of a P shard that one optimizer rank owns: one of several equal slices (``intra``), or whole
  fragments assigned by size (``inter``). A share is a tuple of runs in coordinates of the P shard;
- a *fragment* is the part of one parameter inside one share. The optimizer works on fragments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from thinwire.program import Axis, axis_extent, deal, flat_numel, slot_offsets
from thinwire.spec import CodecSpec, Plan


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer: elements ``[offset, offset + numel)``, row by row."""

    name: str
    shape: torch.Size
    offset: int

    @cached_property
    def numel(self) -> int:
        """Number of elements in the parameter."""
        return math.prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements from one index to the next, for each dimension."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, start + length)`` of a P shard."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """The part of one parameter that one optimizer rank owns.

    Attributes:
        slot: Slot of the parameter.
        offset: First element, relative to the parameter.
        length: Number of elements.
        position: First element, relative to the share with its runs laid end to end.
    """

    slot: Slot
    offset: int
    length: int
    position: int

    @property
    def whole(self) -> bool:
        """Whether the fragment is the entire parameter."""
        return self.length == self.slot.numel


@dataclass(frozen=True)
class FlatLayout:
    """One flat buffer of a unit.

    Attributes:
        slots: Slots of the buffer's parameters, in order.
        numel: Padded length in elements; a multiple of the world size times the alignment.
        num_shards: Number of P shards (``s_p``).
        dtype: Compute dtype.
        trainable: Whether the buffer has gradients.
        encoded: Whether the plan's codecs apply to the buffer; false for buffers without floating-point values and for
            excluded parameters.
        stored: Codec of whose messages ranks keep one for each P shard, instead of values; ``None`` if they keep
            values.
    """

    slots: tuple[Slot, ...]
    numel: int
    num_shards: int
    dtype: torch.dtype
    trainable: bool
    encoded: bool
    stored: CodecSpec | None = None

    @cached_property
    def gaps(self) -> tuple[slice, ...]:
        """The padding: elements between parameters, and behind the last. They are zero."""
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [*(slot.offset for slot in self.slots[1:]), self.numel]
        return tuple(slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    @property
    def shard_numel(self) -> int:
        """Number of elements in one P shard."""
        return self.numel // self.num_shards

    @cached_property
    def slot_by_name(self) -> dict[str, Slot]:
        """Slots by parameter name."""
        return {slot.name: slot for slot in self.slots}

    def pieces(self, shard: int) -> list[tuple[Slot, int, Run]]:
        """The parts of parameters in a P shard: ``(slot, offset within the parameter, run in the shard)``."""
        begin, end = shard * self.shard_numel, (shard + 1) * self.shard_numel
        parts = []
        for slot in self.slots:
            first, last = max(slot.offset, begin), min(slot.offset + slot.numel, end)
            if first < last:
                parts.append((slot, first - slot.offset, Run(first - begin, last - first)))
        return parts

    def fragments(self, shard: int, share: Sequence[Run]) -> tuple[Fragment, ...]:
        """The fragments of a share of a P shard."""
        fragments = []
        position = 0
        pieces = self.pieces(shard)
        for run in share:
            for slot, offset, piece in pieces:
                first, last = max(piece.start, run.start), min(piece.start + piece.length, run.start + run.length)
                if first < last:
                    inside = position + first - run.start
                    fragments.append(Fragment(slot, offset + first - piece.start, last - first, inside))
            position += run.length
        return tuple(fragments)


def lay_out(
    parameters: Sequence[tuple[str, torch.Size]],
    plan: Plan,
    dtype: torch.dtype,
    *,
    trainable: bool,
    encoded: bool = True,
    stored: CodecSpec | None = None,
) -> FlatLayout:
    """Lay parameters one after the other and pad, so that each of them and every shard of every factor is aligned to 16
    bytes, and shards of a factor are equal. With ``stored``, each parameter and each P shard begins with a block."""
    block = None if stored is None else stored.block
    offsets = slot_offsets([math.prod(shape) for _, shape in parameters], dtype.itemsize, block)
    slots = tuple(Slot(name, shape, offset) for (name, shape), offset in zip(parameters, offsets, strict=True))
    numel = flat_numel(slots[-1].offset + slots[-1].numel, plan, dtype.itemsize, block)
    return FlatLayout(slots, numel, plan.params.ranks, dtype, trainable, encoded, stored)


def even_shares(layout: FlatLayout, plan: Plan) -> tuple[tuple[Run, ...], ...]:
    """Intra-tensor partition: equal flat slices of a P shard, by position along the shard axis."""
    inner, outer = axis_extent(plan, Axis.SHARD)
    count = outer.ranks // inner.ranks
    length = layout.shard_numel // count
    return tuple((Run(i * length, length),) for i in range(count))


def deal_shares(layouts: Sequence[FlatLayout], plan: Plan, shard: int) -> list[tuple[tuple[Run, ...], ...]]:
    """Inter-tensor partition: assign whole fragments of one P shard of all trained buffers of the model greedily,
    largest first, to the rank that holds the fewest elements so far.

    Returns:
        For each buffer, the shares by position along the shard axis; each a tuple of runs in ascending order.
    """
    inner, outer = axis_extent(plan, Axis.SHARD)
    count = outer.ranks // inner.ranks
    items = [(buffer, run) for buffer, layout in enumerate(layouts) for _, _, run in layout.pieces(shard)]
    dealt: list[list[list[Run]]] = [[[] for _ in range(count)] for _ in layouts]
    for (buffer, run), owner in zip(items, deal([run.length for _, run in items], count), strict=True):
        dealt[buffer][owner].append(run)
    return [tuple(_merged(runs) for runs in shares) for shares in dealt]


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs in ascending order, with adjacent runs merged."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        if joined and joined[-1].start + joined[-1].length == run.start:
            joined[-1] = Run(joined[-1].start, joined[-1].length + run.length)
        else:
            joined.append(run)
    return tuple(joined)
