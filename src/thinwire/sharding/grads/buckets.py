"""Buckets of gradients, the chunks that they are cut into, and copies between chunks and the gradients in them.

The *pieces* of a bucket are what its owners get of the sum: the optimizer ranks of a reduce-scatter, or this rank alone
if the bucket is all-reduced. A piece holds its owner's share of each gradient, one after the other. A chunk is the same
span of every piece, so it holds a part of some of the gradients.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from thinwire.collectives.memory import allocate
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Span, chunk_spans
from thinwire.sharding.grads.unit_gradient import UnitGradient

_Part: TypeAlias = tuple[UnitGradient, tuple[Span, ...], torch.Tensor]
"""A gradient, what a chunk holds of it by owner, and the tensor that holds it."""


@dataclass(frozen=True, slots=True)
class BucketChunk:
    """One chunk of a bucket.

    Attributes:
        spans: Gradients with elements in the chunk, in order, and for each, by owner, the elements of its share, with
            the share's runs laid end to end.
        sizes: Number of elements by owner.
        begin: First element of the chunk in each piece.
        device: Device of the gradients.
        is_even: Whether every gradient is a table with a row for each owner, of which the chunk has some columns.
    """

    spans: Mapping[UnitGradient, tuple[Span, ...]]
    sizes: tuple[int, ...]
    begin: int
    device: torch.device
    is_even: bool

    def packed(
        self, sources: Mapping[UnitGradient, torch.Tensor], dtype: torch.dtype, *, pad: int = 0, scratch: bool = False
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The chunk of the ``sources`` in wire dtype, owner by owner, and ``pad`` zeros. ``scratch`` says that the
        vector will be overwritten, while the sources must keep their values.

        Returns:
            The vector, and the function that fills it; ``None`` if the source itself is the vector.
        """
        parts = [(gradient, spans, sources[gradient]) for gradient, spans in self.spans.items()]
        if len(parts) == 1 and self.is_even and not pad and not scratch:
            ((_, spans, source),) = parts
            if source.dtype == dtype and sum(self.sizes) == source.numel():
                return source, None
            if source.dtype == dtype and len(self.sizes) == 1:
                return source[slice(*spans[0])], None
        vector = allocate(sum(self.sizes) + pad, dtype, self.device)

        def fill() -> None:
            if self.is_even and parts:  # a rank may own nothing of a bucket
                self._fill_rows(vector[: sum(self.sizes)], parts)
            else:
                self._fill_runs(vector, parts)
            if pad:
                vector[-pad:].zero_()

        return vector, fill

    def _fill_rows(self, vector: torch.Tensor, parts: Sequence[_Part]) -> None:
        """Equal shares: every gradient is a table with a row for each owner."""
        owners = len(self.sizes)
        pieces = []
        for _, spans, source in parts:
            rows, (begin, end) = source.view(owners, -1), spans[0]
            pieces.append(rows if end - begin == rows.shape[1] else rows[:, begin:end])
        table = vector.view(owners, -1)
        if all(piece.dtype == vector.dtype for piece in pieces):
            torch.cat(pieces, 1, out=table)
        else:
            columns = table.split([piece.shape[1] for piece in pieces], 1)
            torch._foreach_copy_(list(columns), pieces)

    def _fill_runs(self, vector: torch.Tensor, parts: Sequence[_Part]) -> None:
        """Whole fragments of parameters: each owner's runs, one after another."""
        position = 0
        for owner in range(len(self.sizes)):
            for gradient, spans, source in parts:
                begin, end = spans[owner]
                at = 0  # in the share
                for run in gradient.shares[owner]:
                    first, last = max(begin - at, 0), min(end - at, run.length)
                    at += run.length
                    if first < last:
                        vector[position : position + last - first].copy_(source[run.start + first : run.start + last])
                        position += last - first

    def deliver(
        self, owner: int, values: torch.Tensor, targets: Mapping[UnitGradient, torch.Tensor], adds: Sequence[bool]
    ) -> None:
        """Write an owner's part of the chunk, fp32, to its shares (``targets``), or add it where ``adds`` says so by
        gradient in the chunk, with one rounding after the fp32 addition."""
        spans = [of_owners[owner] for of_owners in self.spans.values()]
        parts = values.split([end - begin for begin, end in spans])
        places = [targets[gradient][begin:end] for gradient, (begin, end) in zip(self.spans, spans, strict=True)]
        for write, adding in ((torch._foreach_add_, True), (torch._foreach_copy_, False)):
            chosen = [number for number, add in enumerate(adds) if add is adding]
            if chosen:
                write([places[number] for number in chosen], [parts[number] for number in chosen])


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced as one vector.

    Attributes:
        gradients: The gradients in order.
        numels: Number of elements of each owner's piece.
        chunks: The chunks.
        chunks_of: Number of chunks with elements of each gradient.
    """

    gradients: tuple[UnitGradient, ...]
    numels: tuple[int, ...]
    chunks: tuple[BucketChunk, ...]
    chunks_of: Mapping[UnitGradient, int]

    def place_of_sums(
        self, number: int, owner: int, targets: Mapping[UnitGradient, torch.Tensor], adds: Sequence[bool]
    ) -> tuple[torch.Tensor, bool, Callable[[], None] | None]:
        """Where a reduction of a chunk puts the sums of an owner, fp32; see :meth:`BucketChunk.deliver`.

        Returns:
            The place; whether the reduction adds to what is there; and the function that delivers the sums afterwards,
            ``None`` if the place is the share itself.
        """
        chunk, only = self.chunks[number], targets.get(self.gradients[0]) if len(self.gradients) == 1 else None
        if only is not None and only.dtype == torch.float32:
            return only[chunk.begin : chunk.begin + chunk.sizes[owner]], any(adds), None
        sums = allocate(chunk.sizes[owner], torch.float32, chunk.device)
        return sums, False, lambda: chunk.deliver(owner, sums, targets, adds)


def cut(axis: Axis, gradients: Sequence[UnitGradient], groups: Mapping[Axis, AxisGroup], chunks: int) -> Bucket:
    """Cut a bucket of gradients into at most so many chunks, for a reduction along an axis."""
    if axis is Axis.PARAMS:
        pieces = [[part.layout.shard_numel for part in gradients]] * groups[axis].size
        spans, is_even = chunk_spans(sum(pieces[0]), chunks, 1), True
    else:
        pieces = [list(piece) for piece in zip(*(part.share_sizes for part in gradients), strict=True)]
        # All ranks have as many chunks, and the replicas divide each among them.
        spans = chunk_spans(max(map(sum, pieces)), chunks, groups[Axis.REPLICA].size)
        is_even = axis is Axis.REPLICA or all(part.even for part in gradients)
    if axis is Axis.REPLICA:
        pieces = [[part.owned.memory.numel() for part in gradients]]
    numels = tuple(map(sum, pieces))
    offsets = [tuple(itertools.accumulate(piece, initial=0)) for piece in pieces]
    cut_chunks = []
    for begin, end in spans:
        inside = {}
        for number, gradient in enumerate(gradients):
            of_owners = tuple(_clipped(begin, end, at[number], at[number + 1]) for at in offsets)
            if any(first < last for first, last in of_owners):
                inside[gradient] = of_owners
        sizes = tuple(max(0, min(end, numel) - begin) for numel in numels)
        cut_chunks.append(BucketChunk(inside, sizes, begin, gradients[0].owned.device, is_even))
    chunks_of = Counter(gradient for chunk in cut_chunks for gradient in chunk.spans)
    return Bucket(tuple(gradients), numels, tuple(cut_chunks), chunks_of)


def _clipped(begin: int, end: int, first: int, last: int) -> Span:
    """The part of ``[first, last)`` inside ``[begin, end)``, counted from ``first``; empty spans begin at 0."""
    begin, end = max(begin, first) - first, min(end, last) - first
    return (begin, end) if begin < end else (0, 0)
