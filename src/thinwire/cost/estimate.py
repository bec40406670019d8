"""Busy seconds of every resource in the parts of a step, in closed form, from which the search bounds steps.

Blocks are alike, so the sums price one unit of each kind instead of lowering a program, and they price every collective
once for each codec that it may use. A test compares them with the simulator's sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from thinwire.cost.operations import CodedHop, PricedStage, moves_of
from thinwire.cost.rates import Rates
from thinwire.program import Axis, Even, Hop, Kind, MessageSizes, Scope, axis_shape, axis_stride, hops
from thinwire.program.wire import Encoding, ReductionEncodings, shortening
from thinwire.spec import CodecSpec, Factor, Plan

_NONE = CodecSpec()


class Busy(NamedTuple):
    """Seconds of work by resource, each alone on its resource.

    Attributes:
        codec: Seconds of the processor: encoding, decoding, copies, and preparing operations.
        inside: Seconds of the links inside a node.
        across: Seconds of a node's network cards.
        spine: Seconds of the spine, for transfers that cross it.
        between: Seconds of all transfers between nodes, one after another. Each takes as long as the slower of cards
            and spine.
        sending: Seconds of the processor that transfers use; computation stops for as long.
    """

    codec: float = 0.0
    inside: float = 0.0
    across: float = 0.0
    spine: float = 0.0
    between: float = 0.0
    sending: float = 0.0

    @property
    def total(self) -> float:
        """Seconds if no two operations overlap."""
        return self.codec + self.inside + self.between

    def plus(self, other: Busy, count: float = 1.0) -> Busy:
        """The sum of this and ``count`` times ``other``."""
        return Busy(*[mine + count * others for mine, others in zip(self, other, strict=True)])


class GroupShape(NamedTuple):
    """Shape of a group of ranks, light enough for a key.

    Attributes:
        local: Ranks inside a node.
        nodes: Nodes that the group spans.
        stride: Distance from one of these nodes to the next.
    """

    local: int
    nodes: int
    stride: int = 1

    @property
    def ranks(self) -> int:
        return self.local * self.nodes


class ProcessGroups(NamedTuple):
    """The groups over which a plan communicates; ``None`` where a plan does not.

    Attributes:
        params: Group of ``P``: gathers, and a reduce-scatter in each micro-batch.
        secondary: Group from which the backward gathers instead.
        shard: Group between ``P`` and ``OS``: a reduce-scatter, and the spread.
        replica: Group of ranks with the same ``OS`` shard: the all-reduce of a step.
        every_micro_batch: Whether the reduce-scatter over ``shard`` runs in every micro-batch, that is, whether ``G``
            is cut like ``OS``.
    """

    params: GroupShape | None
    secondary: GroupShape | None
    shard: GroupShape | None
    replica: GroupShape | None
    every_micro_batch: bool

    @classmethod
    def of(cls, plan: Plan, *, strided: bool = True) -> ProcessGroups:
        """The groups that a plan's factors imply; ``strided`` says whether the distance between nodes matters."""

        def group(axis: Axis) -> GroupShape | None:
            shape = GroupShape(*axis_shape(plan, axis), axis_stride(plan, axis) if strided else 1)
            return shape if shape.ranks > 1 else None

        params, secondary, shard, replica = map(group, (Axis.PARAMS, Axis.SECONDARY, Axis.SHARD, Axis.REPLICA))
        return cls(params, secondary, shard, replica, plan.grads_like_optimizer)


def _busy(move: PricedStage) -> Busy:
    """Busy seconds of one move. The slower of cards and spine is busy for the whole move, the other for a share."""
    if move.scope is None:
        return Busy(codec=move.seconds)
    sending = move.seconds * move.beside.load
    if move.scope is Scope.INSIDE:
        return Busy(inside=move.seconds, sending=sending)
    share = move.seconds / max(1.0, move.spine_load)
    return Busy(across=share, spine=share * move.spine_load, between=move.seconds, sending=sending)


class Pricer:
    """Prices single collectives over even pieces, and caches the results.

    Args:
        rates: Seconds of codecs and transfers.
        dtype: Dtype of parameters, and of gradients on the wire.
    """

    def __init__(self, rates: Rates, dtype: str) -> None:
        self._rates, self._dtype = rates, dtype
        self.gather = cache(self._gather)
        self.reduction = cache(self._reduction)

    def _gather(self, mesh: GroupShape | None, numel: int, codec: CodecSpec) -> Busy:
        """Busy seconds of an all-gather (or a grouped broadcast) of ``numel`` elements in total."""
        if mesh is None or mesh.ranks == 1:
            return Busy()
        codec = shortening(codec, self._dtype)
        encoding = Encoding(codec, self._dtype)
        sizes = MessageSizes(encoding.slot, encoding.slot, encoding.slot, encoded=not codec.is_none)
        return self._price(Kind.ALL_GATHER, mesh, numel, sizes, lambda hop: encoding)

    def _reduction(self, kind: Kind, mesh: GroupShape | None, numel: int, intra: CodecSpec, inter: CodecSpec) -> Busy:
        """Busy seconds of a reduce-scatter or an all-reduce of ``numel`` elements."""
        if mesh is None:
            return Busy()
        encodings = ReductionEncodings.of(mesh.local, mesh.nodes, intra, inter, self._dtype)

        def encoding(hop: Hop) -> Encoding:
            if hop.kind is not Kind.REDUCE_SCATTER:
                return encodings.gather
            return encodings.inside if hop.scope is Scope.INSIDE else encodings.across

        return self._price(kind, mesh, numel, encodings.sizes(), encoding)

    def _price(
        self, kind: Kind, mesh: GroupShape, numel: int, sizes: MessageSizes, encoding: Callable[[Hop], Encoding]
    ) -> Busy:
        pieces = Even(math.ceil(numel / mesh.ranks), mesh.ranks)
        collective_hops = hops(kind, mesh.local, mesh.nodes, pieces, 0, sizes, mesh.stride)
        total = Busy()
        for move in moves_of([CodedHop(hop, encoding(hop)) for hop in collective_hops], self._rates):
            total = total.plus(_busy(move))
        return total

    # -- parts of a step -------------------------------------------------------------------------------------------

    def gathered(self, groups: ProcessGroups, numel: int, codec: CodecSpec) -> Busy:
        """Busy seconds of gathering a unit of ``numel`` elements for its forward."""
        return self.gather(groups.params, numel, codec)

    def gathered_again(self, groups: ProcessGroups, numel: int, codec: CodecSpec) -> Busy:
        """Busy seconds of gathering a unit for its backward, from the secondary shard if there is one."""
        if groups.secondary is None:
            return self.gathered(groups, numel, codec)
        return self.gather(groups.secondary, numel, _NONE)

    def scattered(self, groups: ProcessGroups, numel: int, intra: CodecSpec, inter: CodecSpec) -> Busy:
        """Busy seconds of reducing a unit over the ranks of ``P``."""
        return self.reduction(Kind.REDUCE_SCATTER, groups.params, numel, intra, inter)

    def sharded(self, groups: ProcessGroups, numel: int, intra: CodecSpec, inter: CodecSpec) -> Busy:
        """Busy seconds of reducing a bucket of ``numel`` elements to the owners of optimizer states, packing
        included."""
        if groups.shard is None:
            return Busy()
        packing = self._rates.touch(numel + numel / groups.shard.ranks)
        return self.reduction(Kind.REDUCE_SCATTER, groups.shard, numel, intra, inter).plus(Busy(codec=packing))

    def synced(self, groups: ProcessGroups, numel: int, intra: CodecSpec, inter: CodecSpec) -> Busy:
        """Busy seconds of adding up a bucket of ``numel`` elements over replicas, packing included."""
        if groups.replica is None:
            return Busy()
        share = numel // (groups.shard.ranks if groups.shard is not None else 1)
        packing = Busy(codec=self._rates.touch(2 * share))
        return self.reduction(Kind.ALL_REDUCE, groups.replica, share, intra, inter).plus(packing)

    def spread(self, groups: ProcessGroups, numel: int, codec: CodecSpec) -> Busy:
        """Busy seconds of distributing the updated parameters of a unit."""
        shards = groups.params.ranks if groups.params else 1
        return self.gather(groups.shard, numel // shards, codec)

    def control(self, mesh: Factor, nbytes: int) -> float:
        """Seconds of an exchange of ``nbytes`` bytes of every rank of a mesh."""
        steps = hops(Kind.ALL_GATHER, mesh.local, mesh.nodes, Even(nbytes, mesh.ranks), 0, MessageSizes.plain(1))
        plain = Encoding(_NONE, self._dtype)
        return sum(
            move.seconds for move in moves_of([CodedHop(hop, plain) for hop in steps], self._rates) if move.scope
        )
