"""Error feedback: what codecs rounded away from this rank's messages, added to later ones.

Errors belong to elements of gradients, whichever bucket carries them. Buckets change where units run in another order
than before, as from the first step to the second, or where others are trained; errors then move to the new buckets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from thinwire.collectives.all_reduce import Feedback, feedback_spans
from thinwire.collectives.messages import Residual
from thinwire.collectives.reduce_scatter import HopCodecs, residual_span
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Span, padded
from thinwire.sharding.grads.buckets import Bucket, cut
from thinwire.sharding.grads.unit_gradient import UnitGradient
from thinwire.spec import Plan

_SUM = "replica-sum"
"""What keys of errors of the sums begin with, which an all-reduce gathers; those of other messages, with the axis."""

_Pieces: TypeAlias = Mapping[tuple[UnitGradient, int], Sequence[tuple[int, int, int]]]
"""By gradient and owner, the runs of the owner's share whose errors a tensor holds: first element in the share, first
element in the tensor, length."""


class ErrorFeedback:
    """Rounding errors of this rank's messages, by bucket. Only plans with ``wire.error_feedback`` ask for them.

    Attributes:
        lost: Rounding errors, fp32, by reduction, chunk by chunk. Every rank has the same reductions, but sizes may
            differ. Those of an element are in one entry.
        settle: Waits until no message that writes errors is on its way.
    """

    def __init__(
        self, plan: Plan, gradients: Mapping[int, Sequence[UnitGradient]], groups: Mapping[Axis, AxisGroup]
    ) -> None:
        self._plan, self._gradients, self._groups = plan, gradients, groups
        self.lost: dict[str, torch.Tensor] = {}
        self.settle: Callable[[], object] = lambda: None

    def of_scatter(self, axis: Axis, bucket: Bucket, number: int, codecs: HopCodecs) -> Residual | None:
        """Rounding errors so far of the last hop of a chunk's reduce-scatter; ``None`` with lossless codecs."""
        return self._residual(str(axis), bucket, number) if self._loses(self._groups[axis], codecs) else None

    def of_sync(self, bucket: Bucket, number: int, codecs: HopCodecs) -> Feedback | None:
        """Rounding errors so far of a chunk's all-reduce over the replicas; ``None`` with lossless codecs."""
        group = self._groups[Axis.REPLICA]
        if not self._loses(group, codecs):
            return None
        sums = self._residual(_SUM, bucket, number) if group.size > 2 else None
        return Feedback(self._residual(str(Axis.REPLICA), bucket, number), sums)

    def _loses(self, group: AxisGroup, codecs: HopCodecs) -> bool:
        """Whether the last hop along an axis rounds."""
        codec = codecs.across if group.nodes > 1 else codecs.inside
        return codec is not None and not codec.spec.is_lossless

    def _residual(self, what: str, bucket: Bucket, number: int) -> Residual | None:
        """Rounding errors of a chunk."""
        numels = [end - begin for begin, end in self._spans(what, bucket)]
        key = _key(what, bucket.gradients)
        lost = self.lost.get(key)
        if lost is None or lost.numel() != sum(numels):
            lost = self.lost[key] = self._moved(what, bucket)
        if not numels[number]:
            return None
        begin = sum(numels[:number])
        return Residual(lost[begin : begin + numels[number]], self._plan.wire.error_feedback)

    def _spans(self, what: str, bucket: Bucket) -> list[Span]:
        """The elements of each chunk whose errors this rank keeps: those that its messages encode."""
        group = self._groups[Axis.REPLICA if what == _SUM else Axis(what)]
        if group is not self._groups[Axis.REPLICA]:
            return [residual_span(group, chunk.sizes) for chunk in bucket.chunks]
        return [feedback_spans(group, padded(chunk.sizes[0], group.size))[what == _SUM] for chunk in bucket.chunks]

    # -- from bucket to bucket ---------------------------------------------------------------------------------

    def _moved(self, what: str, bucket: Bucket) -> torch.Tensor:
        """The errors of a new bucket's gradients, out of the buckets that have carried these; what else was in them
        stays by itself, unit by unit. Errors of what another rank encodes from now on are given up."""
        made, pieces, mine = self._none(what, bucket), self._pieces(what, bucket), set(bucket.gradients)
        for key in [key for key in self.lost if key.partition("/")[0] == what]:
            parts = self._gradients_of(key)
            if mine.isdisjoint(parts):
                continue
            self.settle()
            lost, earlier = self.lost.pop(key), self._cut(what, parts)
            if lost.numel() != self._numel(what, earlier):
                continue  # loaded from a run that trained other parameters of these units
            held = self._pieces(what, earlier)
            _move(lost, held, made, pieces)
            for unit in dict.fromkeys(part.unit for part in parts if part not in mine):
                alone = self._cut(what, [part for part in parts if part.unit == unit])
                target = self.lost.setdefault(_key(what, alone.gradients), self._none(what, alone))
                _move(lost, held, target, self._pieces(what, alone))
        return made

    def _gradients_of(self, key: str) -> list[UnitGradient]:
        """The gradients of an entry. Units may have got others since, which come last."""
        counts = Counter(key.partition("/")[2].split("-"))
        units = [(int(unit), count) for unit, count in counts.items() if unit.isdecimal()]
        return [
            part
            for unit, count in units
            for part in [part for part in self._gradients.get(unit, ()) if part.layout.encoded][:count]
        ]

    def _numel(self, what: str, bucket: Bucket) -> int:
        return sum(end - begin for begin, end in self._spans(what, bucket))

    def _none(self, what: str, bucket: Bucket) -> torch.Tensor:
        return torch.zeros(self._numel(what, bucket), dtype=torch.float32, device=bucket.chunks[0].device)

    def _cut(self, what: str, parts: Sequence[UnitGradient]) -> Bucket:
        axis = Axis.REPLICA if what == _SUM else Axis(what)
        return cut(axis, parts, self._groups, self._plan.bucket_chunks)

    def _pieces(self, what: str, bucket: Bucket) -> _Pieces:
        pieces: dict[tuple[UnitGradient, int], list[tuple[int, int, int]]] = defaultdict(list)
        at = 0
        for chunk, (low, high) in zip(bucket.chunks, self._spans(what, bucket), strict=True):
            place = 0  # in the chunk, which holds the pieces of its owners one after the other
            for owner in range(len(chunk.sizes)):
                for gradient, spans in chunk.spans.items():
                    begin, end = spans[owner]
                    first, last = max(place, low), min(place + end - begin, high)
                    if first < last:
                        pieces[gradient, owner].append((begin + first - place, at + first - low, last - first))
                    place += end - begin
            at += high - low
        return pieces


def _key(what: str, gradients: Sequence[UnitGradient]) -> str:
    return f"{what}/{'-'.join(str(part.unit) for part in gradients)}"


def _move(source: torch.Tensor, from_: _Pieces, target: torch.Tensor, to: _Pieces) -> None:
    """Add errors to those of the same elements in another tensor."""
    for place, runs in to.items():
        for begin, at, numel in runs:
            for earlier, before, count in from_.get(place, ()):
                first, last = max(begin, earlier), min(begin + numel, earlier + count)
                if first < last:
                    errors = source[before + first - earlier : before + last - earlier]
                    target[at + first - begin : at + last - begin].add_(errors)
