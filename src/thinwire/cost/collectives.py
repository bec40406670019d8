"""Seconds of whole collectives: one interface, whatever they follow from.

:class:`LibraryCollectives` has published links, :class:`HopCollectives` the hops that rates know; a profile has
measured ones (``cost/measured.py``). thinwire's own collectives have two hops, which ``cost/operations.py`` prices one
by one; those of other engines are one library call over the whole group, as a ring or a tree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

from thinwire.cost.operations import CodedHop, PricedStage, codec_seconds, coded_hops, moves
from thinwire.cost.rates import Efficiency, Rates, wire_bytes_per_value
from thinwire.program import Axis, Kind, Lane, Operation, Scope, UnitInfo, axis_shape, axis_stride
from thinwire.program.stages import Stage
from thinwire.spec import ClusterSpec, Fabric, Factor, Plan


class CollectiveTimes(ABC):
    """Seconds of collectives, every group of the cluster at once: AMSP's ``t(o, v, p0 x p1)``."""

    @abstractmethod
    def seconds(self, kind: Kind, size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one collective.

        Args:
            kind: All-gather, reduce-scatter, all-reduce or broadcast.
            size: Bytes of the whole vector.
            mesh: Shape of the group.
            stride: Distance from one node of the group to the next, in nodes.
        """

    def broadcasts(self, size: float, owners: int, mesh: Factor, stride: int = 1) -> float:
        """Seconds of grouped broadcasts, of one part of a vector from each of ``owners`` ranks; by default as long as
        an all-gather of the same vector."""
        del owners
        return self.seconds(Kind.ALL_GATHER, size, mesh, stride)

    def spine_load(self, mesh: Factor, stride: int) -> float:
        """Busy time of the spine over busy time of a node's network cards; by default 0, as nothing is known of it."""
        del mesh, stride
        return 0.0


@final
class HopCollectives(CollectiveTimes):
    """Collectives inside a node, and between pairs of ranks, like the hops of a program."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def seconds(self, kind: Kind, size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one collective inside a node, or of one with a single rank on each node. An all-reduce is a
        reduce-scatter, then an all-gather; a broadcast goes to one other rank."""
        if mesh.ranks == 1:
            return 0.0
        scope = Scope.ACROSS if mesh.nodes > 1 else Scope.INSIDE
        sent = round(size if kind is Kind.BROADCAST else size * (mesh.ranks - 1) / mesh.ranks)
        reduces = kind in (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        kinds = [Kind.REDUCE_SCATTER] if reduces else []
        kinds += [Kind.ALL_GATHER] if kind is not Kind.REDUCE_SCATTER else []
        return sum(self._rates.hop(hop, scope, mesh.ranks, sent, encoded=False, stride=stride) for hop in kinds)


@final
class LibraryCollectives(CollectiveTimes):
    """Ring collectives over a sub-mesh, every group of the cluster at once.

    Args:
        cluster: Cluster that provides the links.
        efficiency: Share of the links' nominal rates that software reaches.
        contention: Whether groups that cross nodes at the same time share a node's network cards. AMSP's model
            ignores this contention.
        group: Of a cluster of unlike nodes, the number of the group of a member; ``None``: the slowest.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        efficiency: Efficiency | None = None,
        *,
        contention: bool = True,
        group: int | None = None,
    ) -> None:
        self._cluster, self._efficiency, self._contention = cluster, efficiency or Efficiency(), contention
        self._fabric = Fabric(cluster, group)
        inside = None if group is None else cluster.groups[group].inside
        self._inside = inside or cluster.links.inside

    def spine_load(self, mesh: Factor, stride: int) -> float:
        """Busy time of the spine over busy time of a node's network cards; 0 if the group does not cross the spine."""
        return self._fabric.route(mesh.nodes, stride).load

    def seconds(self, kind: Kind, size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one collective as a ring; an all-reduce may also be a tree."""
        ranks = mesh.ranks
        if ranks == 1:
            return 0.0
        links, share, route = self._cluster.links, self._efficiency, self._fabric.route(mesh.nodes, stride)
        inside = links.inside.bandwidth * share.inside
        if mesh.nodes == 1:
            bandwidth, latency = self._inside.bandwidth * share.inside, (ranks - 1) * self._inside.latency
        else:
            # R / local groups cross each node's cards at the same time (NIC contention).
            sharing = self._cluster.gpus_per_node / mesh.local if self._contention else 1
            across = route.bandwidth * share.nic / sharing
            bandwidth = across if mesh.local == 1 else min(inside, across)
            # A ring enters and leaves each node once.
            latency = (ranks - mesh.nodes) * links.inside.latency + (mesh.nodes - 1) * route.latency
        if kind is Kind.BROADCAST:
            return latency + 8 * size / bandwidth
        ring = latency + 8 * size * (ranks - 1) / ranks / bandwidth
        if kind is not Kind.ALL_REDUCE:
            return ring
        # If latency dominates, NCCL uses chains inside nodes and a tree across them.
        hops = math.log2(mesh.nodes) * route.latency + (mesh.local - 1) * links.inside.latency
        return 2 * min(ring, hops + 8 * size / bandwidth)

    def broadcasts(self, size: float, owners: int, mesh: Factor, stride: int = 1) -> float:
        """Seconds of grouped broadcasts, of one part of a vector from each of ``owners`` ranks.

        Each has the latency of its ring, but they share the links like an all-gather: a rank does not receive its own
        part.
        """
        latency = self.seconds(Kind.BROADCAST, 0, mesh, stride)
        sending = self.seconds(Kind.BROADCAST, size, mesh, stride) - latency
        return owners * latency + sending * (1 - 1 / mesh.ranks if owners > 1 else 1)


def library_moves(
    plan: Plan,
    operation: Operation,
    units: Sequence[UnitInfo],
    rates: Rates,
    collectives: CollectiveTimes,
    *,
    whole_sync: bool,
    calls: int = 1,
) -> list[PricedStage]:
    """Price the stages of an operation in an engine that makes one library call for it.

    Reductions with codecs keep thinwire's two hops, as in the paper on ZeRO++, where the second hop is the reason for
    the codec.

    Args:
        plan: Plan with the codecs.
        operation: Operation of the plan's program.
        units: Units of the program.
        rates: Seconds of codecs, and the slowdown between computation and transfers.
        collectives: Seconds of library calls.
        whole_sync: Whether gradients are synchronized by one all-reduce over all ranks that hold them, after which
            each rank keeps its share (AMSP's select and drop), instead of a reduce-scatter and an all-reduce of shares.
        calls: Number of calls that the engine splits the operation into; each has the latency of its group.

    Returns:
        The stages in order; stages that take no time are left out.
    """
    coded = coded_hops(plan, operation)
    gradients = operation.lane in (Lane.REDUCE, Lane.SYNC)
    if not coded or operation.lane is Lane.CONTROL or (gradients and not coded[0].encoding.codec.is_none):
        return moves(plan, operation, rates)
    if whole_sync and gradients and operation.axis is Axis.REPLICA and plan.optimizer != plan.params:
        return []  # included in the all-reduce that replaces the reduce-scatter
    local, nodes = axis_shape(plan, operation.axis)
    mesh, stride = Factor(local=local, nodes=nodes), axis_stride(plan, operation.axis)
    values = _whole(coded, operation, mesh.ranks)
    per_value = wire_bytes_per_value(coded[0].encoding.codec, coded[0].encoding.dtype)
    if whole_sync and gradients and operation.axis is Axis.SHARD:
        mesh = plan.params.quotient(plan.mesh)
        seconds = calls * collectives.seconds(Kind.ALL_REDUCE, values * per_value / calls, mesh, stride)
    elif operation.kind is Kind.BROADCAST:
        buffers = (buffer for unit in operation.units for buffer in units[unit].buffers)
        owned = [sum(shares) for shares in zip(*(buffer.shares for buffer in buffers), strict=True)]
        values, owners = float(sum(owned)), sum(1 for numel in owned if numel)
        seconds = collectives.broadcasts(values * per_value, owners, mesh, stride)
    else:
        seconds = calls * collectives.seconds(operation.kind, values * per_value / calls, mesh, stride)
    scope = Scope.ACROSS if mesh.nodes > 1 else Scope.INSIDE
    encoded = not coded[0].encoding.codec.is_none
    beside = rates.beside(operation.kind, scope, mesh.ranks, round(values * per_value), encoded=encoded)
    priced = [
        PricedStage(Stage.ENCODE, None, codec_seconds(rates, coded[0], encoded=values / mesh.ranks)),
        PricedStage(Stage.CALL, scope, seconds, beside, collectives.spine_load(mesh, stride)),
        PricedStage(Stage.DECODE, None, codec_seconds(rates, coded[0], decoded=values)),
    ]
    return [stage for stage in priced if stage.seconds]


def _whole(coded: Sequence[CodedHop], operation: Operation, ranks: int) -> float:
    """Number of values in the whole vector, computed from the number that one rank sends."""
    sent = sum(step.values for step in coded)
    return sent * ranks / (ranks - 1) / (2 if operation.kind is Kind.ALL_REDUCE else 1)
