"""How long the parts of a step take, from a profile: interpolated between sizes, scaled where nothing was measured."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from thinwire.cost.anatomy import ModelPart
from thinwire.cost.rates import ALONE, Beside, Work
from thinwire.errors import SpecError
from thinwire.program import Kind, Scope
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.profile import CodecRow, CollectiveRow, ComputeRow, OverlapRow, Profile

__all__ = ["ProfiledRates"]

Quartile = Literal["seconds", "low", "high"]

_Row = TypeVar("_Row", CollectiveRow, CodecRow)

_Key = tuple[object, ...]
"""Of what was measured at several sizes."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Seconds against size, measured at some sizes.

    Between two, seconds follow a power law; beyond them, latency and bandwidth of the nearest two (alpha-beta).
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, size: float) -> float:
        """Seconds for a size."""
        if size <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * max(1.0, size / sizes[0])
        if size < sizes[0]:
            return max(_straight(sizes[:2], seconds[:2], size), 0.5 * seconds[0])
        if size > sizes[-1]:
            return max(_straight(sizes[-2:], seconds[-2:], size), seconds[-1] * size / sizes[-1] * 0.5)
        high = max(1, bisect_left(sizes, size))
        share = math.log(size / sizes[high - 1]) / math.log(sizes[high] / sizes[high - 1])
        return float(seconds[high - 1] * (seconds[high] / seconds[high - 1]) ** share)

    def covers(self, size: float) -> bool:
        """Whether a size lies among the measured ones."""
        return self.sizes[0] <= size <= self.sizes[-1]


@dataclass(frozen=True, slots=True)
class _Loads:
    """Share of the processor that transfers take, measured at some sizes; between two, it follows the logarithm."""

    sizes: tuple[float, ...]
    loads: tuple[float, ...]

    def at(self, size: float) -> float:
        """The share that a transfer of a size takes."""
        sizes, loads = self.sizes, self.loads
        high = bisect_left(sizes, size)
        if high in (0, len(sizes)):
            return loads[min(high, len(sizes) - 1)]
        share = math.log(size / sizes[high - 1]) / math.log(sizes[high] / sizes[high - 1])
        return loads[high - 1] + share * (loads[high] - loads[high - 1])


def _straight(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return seconds[0] + max(slope, 0.0) * (size - sizes[0])


class ProfiledRates:
    """Rates of the cluster that was profiled.

    Args:
        profile: what was measured.
        model: whose parts are computed; parts of other shapes are scaled by their FLOPs.
        dtype: compute dtype.
        quartile: which figures: the medians, or the lower or upper quartiles.

    Raises:
        SpecError: if the profile lacks what every plan needs.
    """

    def __init__(self, profile: Profile, model: ModelSpec, dtype: str, quartile: Quartile = "seconds") -> None:
        self.profile, self._model, self._dtype = profile, model, dtype
        self._outside = False
        together = [row for row in profile.collectives if row.groups == "all"]
        self._collectives = _lines(
            together, lambda row: (row.kind, row.local, row.nodes), lambda row: row.sent, quartile
        )
        self._loads = _loads(together, profile.crowding)
        self._codecs = _lines(
            profile.codecs, lambda row: (row.codec, row.dtype, row.work), lambda row: row.numel, quartile
        )
        self._compute = {part: _nearest(profile, part, model, dtype) for part in ("block", "head", "embedding")}
        self._beside = self._meetings(profile.overlap)

    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """Interpolated; groups of a size that was not measured are scaled from the nearest one that was, and all groups
        are taken to be as fast as those of neighbouring nodes, which were."""
        del stride
        line, (_, measured) = self._line(_name(kind, encoded=encoded), scope, ranks)
        self._outside |= measured != ranks or not line.covers(sent)
        # A rank sends as many bytes a link as before; latency grows with the rounds.
        return line.at(sent) if measured == ranks else line.at(sent) * max(1.0, math.log2(ranks) / math.log2(measured))

    def spine_load(self, kind: Kind, scope: Scope, ranks: int, stride: int) -> float:
        """A profile knows of no spine."""
        del kind, scope, ranks, stride
        return 0.0

    def _line(self, name: str, scope: Scope, ranks: int) -> tuple[_Line, tuple[_Key, int]]:
        """What was measured nearest to a collective, under which key, and over how many ranks."""

        def shape(count: int) -> tuple[int, int]:
            return (count, 1) if scope is Scope.INSIDE else (1, count)

        counts = sorted({key[1] * key[2] for key in self._collectives if shape(key[1] * key[2]) == key[1:]})  # type: ignore[operator]
        for other in (name, "all_gather", "all_to_all", "reduce_scatter"):
            found = [count for count in counts if (other, *shape(count)) in self._collectives]
            if found:
                nearest = min(found, key=lambda count: (abs(math.log(count / ranks)), count))
                self._outside |= other != name
                key = (other, *shape(nearest))
                return self._collectives[key], (key, nearest)
        raise SpecError(
            "profile",
            [f"it has no collective {scope} nodes, which this plan needs; measure again with a larger --budget"],
        )

    def codec(self, work: Work) -> float:
        """Interpolated; a codec that was not measured takes as long as the slowest of its family that was."""
        way = "feedback" if work.feedback else "encode"
        return self._one_way(work, way, work.encoded) + self._one_way(work, "decode", work.decoded)

    def _one_way(self, work: Work, way: str, values: float) -> float:
        if not values:
            return 0.0
        line = self._codecs.get((str(work.codec), work.dtype, way))
        if line is None:
            self._outside = True
            family = [
                line
                for (name, _, known), line in self._codecs.items()
                if known == way and str(name)[:3] == str(work.codec)[:3]
            ]
            family = family or [line for (_, _, known), line in self._codecs.items() if known == way]
            if not family:
                raise SpecError(
                    "profile", [f"it has no codec, and the plan uses {work.codec}; measure with a larger --budget"]
                )
            return max(line.at(values) for line in family)
        self._outside |= values > 4 * line.sizes[-1]
        return line.at(values)

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """As measured for a part of this shape, or scaled by FLOPs."""
        return self._part(part, plan, seq, "forward")

    def backward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Likewise."""
        return self._part(part, plan, seq, "backward")

    def _part(self, part: ModelPart, plan: Plan, seq: int, way: Literal["forward", "backward"]) -> float:
        if part.kind == "rest" and not part.matrix_flops:
            return 0.0
        row = self._compute[part.kind if part.kind in self._compute else "block"]
        seconds: float = getattr(row, way)
        if part.kind == "embedding":
            return seconds * plan.micro_batch * seq * self._model.hidden / (row.micro_batch * row.seq * row.hidden)
        flops = part.forward_flops(plan.micro_batch * seq, seq)
        self._outside |= not math.isclose(flops, row.flops, rel_tol=0.02)
        return seconds * flops / row.flops

    def update(self, numel: int) -> float:
        """Linear in the elements."""
        return numel * self.profile.update_seconds

    def touch(self, numel: float) -> float:
        """Linear in the elements."""
        return numel * self.profile.touch_seconds

    @property
    def step(self) -> float:
        """As measured."""
        return self.profile.step_seconds

    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """As measured on these links; ``ALONE`` where nothing was. How much of the processor it takes was measured
        with the transfer itself."""
        found = self._beside.get(scope, ALONE)
        if not self.profile.crowding:
            return found
        _, (key, _) = self._line(_name(kind, encoded=encoded), scope, ranks)
        # What else a meeting showed of computation's losses is the same share, told less exactly.
        return replace(found, compute=1.0, load=self._loads[key].at(sent))

    def _meetings(self, rows: Sequence[OverlapRow]) -> dict[Scope, Beside]:
        """What transfers and computation do to each other, by links.

        How late a transfer is depends on the scheduler alone: the median of all rows. How much computation is held up
        depends on the model: the rows of the nearest width.
        """
        losses = [self._loss(row) for row in rows if row.delay is not None] or [self._loss(row) for row in rows]
        if not losses:
            return {}
        factor, delay = (statistics.median(values) for values in zip(*losses, strict=True))
        found = {}
        for scope in Scope:
            here = [row for row in rows if row.scope == str(scope)]
            noted = [row for row in here if row.hidden is not None]
            nearest = min((self._distance(row) for row in noted), default=None)
            here = here if nearest is None else [row for row in noted if self._distance(row) == nearest]
            if here:
                found[scope] = Beside(statistics.median(row.compute for row in here), factor, delay)
        return found

    def _loss(self, row: OverlapRow) -> tuple[float, float]:
        """Factor and delay of a row; a factor of transfers of one size is taken for the delay that it was."""
        if row.delay is not None:
            return row.transfer, row.delay
        scope = Scope(row.scope)
        ranks = self.profile.gpus_per_node if scope is Scope.INSIDE else self.profile.nodes
        line, _ = self._line("all_gather", scope, ranks)
        return 1.0, (row.transfer - 1) * line.at(row.sent)

    def _distance(self, row: OverlapRow) -> float:
        return abs(math.log((row.hidden or 1) / self._model.hidden))

    @property
    def least_slowing(self) -> float:
        """As measured; 1 where it was not, or where transfers have loads instead."""
        if self.profile.crowding:
            return 1.0
        return min((beside.compute for beside in self._beside.values()), default=1.0)

    @property
    def extrapolated(self) -> bool:
        """Whether any answer so far lies outside of what was measured."""
        return self._outside


def _name(kind: Kind, *, encoded: bool) -> str:
    """Under which a hop was measured: messages that are summed only when they are decoded are just exchanged."""
    return "all_to_all" if encoded and kind is Kind.REDUCE_SCATTER else str(kind)


def _loads(rows: Sequence[CollectiveRow], crowding: float) -> dict[_Key, _Loads]:
    """Shares of the processor: of its seconds, what holds computation up, over those that the transfer takes."""
    by_key: dict[_Key, dict[int, float]] = {}
    for row in rows:
        by_key.setdefault((row.kind, row.local, row.nodes), {})[row.sent] = crowding * row.processor / row.seconds
    return {
        key: _Loads(tuple(map(float, sorted(points))), tuple(points[size] for size in sorted(points)))
        for key, points in by_key.items()
    }


def _lines(
    rows: Sequence[_Row],
    key_of: Callable[[_Row], _Key],
    size_of: Callable[[_Row], int],
    quartile: Quartile,
) -> dict[_Key, _Line]:
    by_key: dict[_Key, dict[int, float]] = {}
    for row in rows:
        by_key.setdefault(key_of(row), {})[size_of(row)] = getattr(row, quartile)
    return {
        key: _Line(tuple(map(float, sorted(points))), tuple(points[size] for size in sorted(points)))
        for key, points in by_key.items()
    }


def _nearest(profile: Profile, part: str, model: ModelSpec, dtype: str) -> ComputeRow:
    """The row of a part whose shape is nearest to the model's."""
    rows = [row for row in profile.compute if row.part == part]
    if not rows:
        raise SpecError("profile", [f"it has no {part} computed; measure again, with --model {model.name or 'NAME'}"])
    return min(
        rows, key=lambda row: (row.dtype != dtype, abs(math.log(row.hidden / model.hidden)), row.vocab != model.vocab)
    )
