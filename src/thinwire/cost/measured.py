"""How long the parts of a step take according to a profile.

Seconds are interpolated between measured sizes, and scaled from the nearest measurement elsewhere.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from thinwire.cost.blocks import ModelPart
from thinwire.cost.collectives import CollectiveTimes
from thinwire.cost.rates import ALONE, HOST_UPDATE_BYTES, Basis, Beside, Rates, Work, declared_seconds
from thinwire.errors import SpecError
from thinwire.program import Even, Kind, MessageSizes, Scope, hops
from thinwire.spec import Factor, ModelSpec, Plan
from thinwire.spec.profile import CodecRow, CollectiveRow, ComputeRow, OverlapRow, Profile, profiled_kind

Quartile = Literal["seconds", "low", "high"]

_Row = TypeVar("_Row", CollectiveRow, CodecRow)

_Key = TypeVar("_Key", bound=tuple[object, ...])

_Shape = tuple[str, int, int]
"""Name of a collective, ranks inside a node, and nodes."""


@dataclass(frozen=True, slots=True)
class _Measured:
    """A figure that was measured at a few sizes, in ascending order."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def seconds(self, size: float) -> float:
        """The figure at a size, in seconds.

        Between two sizes, seconds follow a power law. Beyond them, they follow the latency and the bandwidth of the two
        nearest sizes (alpha-beta).
        """
        if size <= 0:
            return 0.0
        sizes, seconds = self.sizes, self.values
        if len(sizes) == 1:
            return seconds[0] * max(1.0, size / sizes[0])
        if size < sizes[0]:
            return max(_straight(sizes[:2], seconds[:2], size), 0.5 * seconds[0])
        if size > sizes[-1]:
            return max(_straight(sizes[-2:], seconds[-2:], size), seconds[-1] * size / sizes[-1] * 0.5)
        high = max(1, bisect_left(sizes, size))
        return float(seconds[high - 1] * (seconds[high] / seconds[high - 1]) ** self._between(high, size))

    def share(self, size: float) -> float:
        """The figure at a size, a share: linear in the logarithm of the size, and that of the nearest beyond them."""
        high = bisect_left(self.sizes, size)
        if high in (0, len(self.sizes)):
            return self.values[min(high, len(self.sizes) - 1)]
        low = self.values[high - 1]
        return low + self._between(high, size) * (self.values[high] - low)

    def _between(self, high: int, size: float) -> float:
        """How far a size is between two measured ones, on a scale of logarithms."""
        return math.log(size / self.sizes[high - 1]) / math.log(self.sizes[high] / self.sizes[high - 1])

    def covers(self, size: float) -> bool:
        """Whether a size lies within the measured range."""
        return self.sizes[0] <= size <= self.sizes[-1]


def _straight(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    return seconds[0] + max(slope, 0.0) * (size - sizes[0])


class ProfiledRates(Rates):
    """Rates of the cluster that was profiled.

    Args:
        profile: The measurements.
        model: The model that computes; parts whose shapes were not measured are scaled by their FLOPs.
        dtype: Compute dtype.
        quartile: Which measured seconds to use: medians (``"seconds"``), or lower or upper quartiles.

    Attributes:
        transfers_extrapolated: Whether any transfer or codec so far lies outside the measured range.
        handling: What the runtime takes, as measured; in older profiles, a step only waits for all ranks.

    Raises:
        SpecError: The profile lacks a part of the model that every plan computes.
    """

    noise = 0.04

    def __init__(self, profile: Profile, model: ModelSpec, dtype: str, quartile: Quartile = "seconds") -> None:
        self.profile, self.quartile, self._model, self._dtype = profile, quartile, model, dtype
        self.transfers_extrapolated = False
        self.handling = profile.handling.with_(step=profile.step_seconds + profile.handling.step)
        self._lines = _by_shape(profile.collectives, lambda row: getattr(row, quartile))
        # Seconds by which a transfer holds computation up, over its own.
        self._loads = _by_shape(profile.collectives, lambda row: profile.crowding * row.processor / row.seconds)
        self._codecs: dict[tuple[str, str, str], _Measured] = _by_size(
            profile.codecs,
            lambda row: (row.codec, row.dtype, row.work),
            lambda row: row.numel,
            lambda row: getattr(row, quartile),
        )
        self._compute = {part: _of_model(profile, part, model, dtype) for part in ("block", "head", "embedding")}
        self._beside = _slowdowns(profile, model.hidden, self._lines)

    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """Interpolated between measured sizes.

        If no group of this size was measured, seconds are scaled from the nearest size. Only groups of neighbouring
        nodes were measured; all groups are taken to be as fast.
        """
        del stride
        name = profiled_kind(kind, encoded=encoded)
        nearest = _nearest(self._lines, name, scope, ranks)
        line, measured = self._lines[nearest], nearest[1] * nearest[2]
        self.transfers_extrapolated |= (nearest[0], measured) != (name, ranks) or not line.covers(sent)
        # Each link carries the same bytes in a group of another size; latency grows with the number of rounds.
        rounds = 1.0 if measured == ranks else math.log2(ranks) / math.log2(measured)
        return line.seconds(sent) * max(1.0, rounds)

    def codec(self, work: Work) -> float:
        """Interpolated; a codec that was not measured takes as long as the slowest measured codec of its family."""
        way = "feedback" if work.feedback else "encode"
        return self._one_way(work, way, work.encoded) + self._one_way(work, "decode", work.decoded)

    def _one_way(self, work: Work, way: str, values: float) -> float:
        if not values:
            return 0.0
        name = str(work.codec)
        line = self._codecs.get((name, work.dtype, way))
        if line is None and work.dtype == "float16":
            # A profile measures one dtype of two bytes, and codecs widen values of either before anything else.
            line = self._codecs.get((name, "bfloat16", way))
        if line is None:
            self.transfers_extrapolated = True
            return self._of_family(work, way, values)
        self.transfers_extrapolated |= values > 4 * line.sizes[-1]
        return line.seconds(values)

    def _of_family(self, work: Work, way: str, values: float) -> float:
        """As the slowest measured codec of the same family, or else of any. About a codec of another package, built-in
        ones say nothing: without its family, it has the speed that it declares."""
        name, plugin = str(work.codec), work.codec.plugin is not None
        lines = [(key[0], line) for key, line in self._codecs.items() if key[2] == way]
        family = [
            line
            for other, line in lines
            if (other.partition(":")[0] == work.codec.family if plugin else other[:3] == name[:3])
        ]
        if plugin and not family:
            return declared_seconds(work.codec, work.dtype, values)
        if not lines:
            raise SpecError(
                "profile", f"it has no codec, and the plan uses {name}; measure again with a larger --budget"
            )
        return max(line.seconds(values) for line in family or [line for _, line in lines])

    def _row(self, part: ModelPart, plan: Plan, seq: int) -> ComputeRow:
        """The measurement of a part whose batch is nearest to a plan's."""

        def distance(row: ComputeRow) -> float:
            return abs(math.log(row.seq / seq)) + abs(math.log(row.micro_batch / plan.micro_batch))

        return min(self._compute.get(part.kind, self._compute["block"]), key=distance)

    def computing(self, part: ModelPart, plan: Plan, seq: int) -> tuple[float, float]:
        """As measured for a part of this shape; parts of other shapes are scaled by their FLOPs."""
        if part.kind == "rest" and not part.matrix_flops:
            return 0.0, 0.0
        row = self._row(part, plan, seq)
        if part.kind == "embedding":
            work, measured = plan.micro_batch * seq * self._model.hidden, float(row.micro_batch * row.seq * row.hidden)
        else:
            work, measured = part.forward_flops(plan.micro_batch * seq, seq), row.flops
        return row.forward * work / measured, row.backward * work / measured

    def computing_basis(self, part: ModelPart, plan: Plan, seq: int) -> Basis:
        """Measured here, unless the part is taken from one of another shape or dtype."""
        if part.kind in ("embedding", "rest"):
            return "measured here"
        row = self._row(part, plan, seq)
        flops = part.forward_flops(plan.micro_batch * seq, seq)
        same = row.dtype == plan.compute_dtype and math.isclose(flops, row.flops, rel_tol=0.02)
        return "measured here" if same else "extrapolated"

    def update(self, numel: int) -> float:
        """Proportional to the number of elements."""
        return numel * self.profile.update_seconds

    def host_update(self, numel: int) -> float:
        """Proportional to the number of elements; in a profile from before this was measured, or of ranks without
        accelerators, as other updates where copies tell nothing else."""
        profile = self.profile
        if profile.host_update_seconds or not profile.up_seconds or profile.backend == "gloo":
            return numel * (profile.host_update_seconds or profile.update_seconds)
        return numel * HOST_UPDATE_BYTES * (profile.up_seconds + profile.down_seconds) / 4

    def host_copy(self, nbytes: int, *, down: bool) -> float:
        """Proportional to the bytes; in a profile from before this was measured, as other copies, which move 6 bytes of
        an element."""
        measured = self.profile.down_seconds if down else self.profile.up_seconds
        return nbytes * (measured or self.profile.touch_seconds / 6)

    def touch(self, numel: float) -> float:
        """Proportional to the number of elements."""
        return numel * self.profile.touch_seconds

    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """As measured on these links; ``ALONE`` if nothing was measured on them.

        The share of the processor that the transfer takes was measured together with the transfer itself.
        """
        slowdown = self._beside.get(scope, ALONE)
        if not self.profile.crowding:
            return slowdown
        nearest = _nearest(self._lines, profiled_kind(kind, encoded=encoded), scope, ranks)
        # The factor by which computation slows down is the same loss, measured less exactly: it must not count twice.
        return replace(slowdown, compute=1.0, load=self._loads[nearest].share(sent))

    @property
    def on_processors(self) -> bool:
        """Whether gloo carried the messages."""
        return self.profile.backend == "gloo"

    @property
    def of_others(self) -> ProfiledRates:
        """With computation as the profile says that other frameworks perform it."""
        return ProfiledRates(self.profile.of_others(), self._model, self._dtype, self.quartile)


class ProfiledCollectives(CollectiveTimes):
    """Measured collectives by operator, size and shape of group, every group of the cluster at once.

    Args:
        rates: Rates from the profile of the cluster.
    """

    def __init__(self, rates: ProfiledRates) -> None:
        self._rates = rates
        self._lines = _by_shape(rates.profile.collectives, lambda row: getattr(row, rates.quartile))

    def seconds(self, kind: Kind, size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one collective, from the rows of its operator and its shape of group.

        If a profile with a small budget lacks the shape, the collective takes as long as its hops one after another.
        Only groups of neighbouring nodes were measured, so that ``stride`` makes no difference.

        Raises:
            SpecError: The profile has no collective over the links that the group uses.
        """
        del stride
        if mesh.ranks == 1 or not size:
            return 0.0
        shares = Even(math.ceil(size / mesh.ranks), mesh.ranks)
        steps = hops(kind, mesh.local, mesh.nodes, shares, 0, MessageSizes.plain(1))
        line = self._lines.get((str(kind), mesh.local, mesh.nodes))
        if line is None:
            return sum(self._rates.hop(step.kind, step.scope, step.ranks, step.sent, encoded=False) for step in steps)
        return line.seconds(sum(step.sent for step in steps))


class MeasuredLibrary(CollectiveTimes):
    """Library calls over a whole group at the rates of a profile.

    A profile that was made with ``--library`` has timed them. For others, calls follow from thinwire's own: a ring over
    all ranks enters and leaves each node once. What crosses a node's link in it takes as long as the same bytes of all
    ranks of the node together; the other rounds add the latency of a small message inside the node. gloo reduces and
    scatters by an all-reduce, of which each rank keeps its share, and adds on the processor.

    Args:
        rates: Rates of the profiled cluster.
    """

    def __init__(self, rates: ProfiledRates) -> None:
        self._rates = rates
        self._lines = _by_shape(rates.profile.library, lambda row: getattr(row, rates.quartile))
        self._whole_sums = rates.profile.backend == "gloo"

    def seconds(self, kind: Kind, size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one call, whatever the distance from one node of the group to the next."""
        del stride
        ranks = mesh.ranks
        if ranks == 1 or not size:
            return 0.0
        line = self._lines.get((str(kind), mesh.local, mesh.nodes))
        if line is not None:
            return line.seconds(size * (ranks - 1) / ranks * (2 if kind is Kind.ALL_REDUCE else 1))
        if self._whole_sums and kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            return 2 * self._ring(Kind.ALL_GATHER, size, mesh) + self._rates.touch(size / 2)
        if kind is Kind.ALL_REDUCE:
            return self._ring(Kind.REDUCE_SCATTER, size, mesh) + self._ring(Kind.ALL_GATHER, size, mesh)
        return self._ring(kind, size, mesh)

    def _ring(self, operator: Kind, size: float, mesh: Factor) -> float:
        ranks, sent = mesh.ranks, size * (mesh.ranks - 1) / mesh.ranks
        if mesh.nodes == 1:
            return self._rates.hop(operator, Scope.INSIDE, ranks, round(sent), encoded=False)
        # R / local groups cross each node's cards at the same time; the profile's rows have all R ranks send.
        across = self._rates.hop(operator, Scope.ACROSS, mesh.nodes, round(sent / mesh.local), encoded=False)
        if mesh.local == 1:
            return across
        # The ranks of a node pass everything on to each other at the same time.
        inside = self._rates.hop(operator, Scope.INSIDE, mesh.local, round(sent), encoded=False)
        return max(across, inside)


def _by_shape(rows: Sequence[CollectiveRow], value_of: Callable[[CollectiveRow], float]) -> dict[_Shape, _Measured]:
    """A figure of collectives that all groups made at once against bytes that a rank sends, by shape."""
    measured = [row for row in rows if row.groups == "all"]
    return _by_size(measured, lambda row: (row.kind, row.local, row.nodes), lambda row: row.sent, value_of)


def _nearest(known: Mapping[_Shape, _Measured], name: str, scope: Scope, ranks: int) -> _Shape:
    """The shape of the measurement nearest to a collective, by its name in the profile.

    Raises:
        SpecError: The profile has no collective over these links.
    """

    def shape(count: int) -> tuple[int, int]:
        return (count, 1) if scope is Scope.INSIDE else (1, count)

    for measured_name in (name, "all_gather", "all_to_all", "reduce_scatter"):
        sizes = {local * nodes for kind, local, nodes in known if kind == measured_name}
        counts = [count for count in sizes if (measured_name, *shape(count)) in known]
        if counts:
            return measured_name, *shape(min(counts, key=lambda count: (abs(math.log(count / ranks)), count)))
    raise SpecError(
        "profile",
        f"it has no collective {scope} nodes, which this plan needs; measure again with a larger --budget",
    )


def _slowdowns(profile: Profile, hidden: int, lines: Mapping[_Shape, _Measured]) -> dict[Scope, Beside]:
    """How transfers and computation slow each other down, by links.

    What a transfer takes at least depends only on the scheduler, so it is the median of all rows. How much computation
    is held up depends on the model, so only the rows of the nearest width count.
    """
    rows = profile.overlap
    losses = [_loss(row, profile, lines) for row in rows if row.delay is not None]
    losses = losses or [_loss(row, profile, lines) for row in rows]
    if not losses:
        return {}
    factor, delay = (statistics.median(values) for values in zip(*losses, strict=True))

    def distance(row: OverlapRow) -> float:
        return abs(math.log((row.hidden or 1) / hidden))

    slowdowns = {}
    for scope in Scope:
        scope_rows = [row for row in rows if row.scope == str(scope)]
        with_width = [row for row in scope_rows if row.hidden is not None]
        if with_width:
            nearest = min(map(distance, with_width))
            scope_rows = [row for row in with_width if distance(row) == nearest]
        if scope_rows:
            slowdowns[scope] = Beside(statistics.median(row.compute for row in scope_rows), factor, delay)
    return slowdowns


def _loss(row: OverlapRow, profile: Profile, lines: Mapping[_Shape, _Measured]) -> tuple[float, float]:
    """The factor of a row's transfers, and the seconds that they take at least.

    A row without the latter was measured with transfers of one size, whose slowdown is taken for the wait that it was.
    """
    if row.delay is not None:
        return row.transfer, row.delay
    scope = Scope(row.scope)
    ranks = profile.gpus_per_node if scope is Scope.INSIDE else profile.nodes
    line = lines[_nearest(lines, "all_gather", scope, ranks)]
    return 1.0, math.sqrt(row.transfer**2 - 1) * line.seconds(row.sent)


def _by_size(
    rows: Sequence[_Row],
    key_of: Callable[[_Row], _Key],
    size_of: Callable[[_Row], int],
    value_of: Callable[[_Row], float],
) -> dict[_Key, _Measured]:
    """A figure of rows against their sizes, by key."""
    by_key: dict[_Key, dict[int, float]] = {}
    for row in rows:
        by_key.setdefault(key_of(row), {})[size_of(row)] = value_of(row)
    return {key: _Measured(*zip(*sorted(points.items()), strict=True)) for key, points in by_key.items()}


def _of_model(profile: Profile, part: str, model: ModelSpec, dtype: str) -> list[ComputeRow]:
    """The rows of a part, in order, whose dtype, then width, and then other dimensions are nearest to the model's."""
    rows = [row for row in profile.compute if row.part == part]
    if not rows:
        raise SpecError(
            "profile", f"it has no measurement of a model's {part}; measure again with --model {model.name or 'NAME'}"
        )

    def distance(row: ComputeRow) -> tuple[bool, float, float]:
        width, *others = (
            abs(math.log(getattr(row, key) / getattr(model, key)))
            for key in ("hidden", "vocab", "ffn", "heads", "kv_heads")
        )
        return row.dtype != dtype, width, sum(others)

    nearest = min(map(distance, rows))
    return [row for row in rows if distance(row) == nearest]
