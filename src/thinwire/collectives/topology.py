"""Ranks along one axis of the mesh: subgroups inside the node and across nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from thinwire.collectives.group import Meter, Subgroup
from thinwire.program import Axis, Lane, axis_index, axis_members
from thinwire.program.stages import TRANSFERS, Stage
from thinwire.spec import Plan

_STAGES = {
    Lane.GATHER: (Stage.GATHER_ACROSS, Stage.GATHER_INSIDE),
    Lane.REDUCE: (Stage.SCATTER_INSIDE, Stage.SCATTER_ACROSS),
    Lane.SYNC: TRANSFERS,
    Lane.SPREAD: (Stage.GATHER_ACROSS, Stage.GATHER_INSIDE),
    Lane.CONTROL: (Stage.GATHER_ACROSS, Stage.GATHER_INSIDE),
    Lane.OUTER: TRANSFERS,
}


@dataclass(frozen=True)
class DataRanks:
    """The data-parallel ranks of a model, each of which trains on its own data.

    Attributes:
        ranks: Global rank at each position of the plan's mesh. Without tensor and pipeline parallelism and islands,
            these are all ranks of the job, in the order of the plan's ``placement``.
        channel: Distinguishes models whose lanes connect the same ranks: the stages of a pipeline that one rank holds.
        island: Number of the island that these ranks are.
        islands: Global ranks of every island, by position like ``ranks``; empty without islands.
    """

    ranks: tuple[int, ...]
    channel: int = 0
    island: int = 0
    islands: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, plan: Plan, ranks: Sequence[int], rank: int, channel: int = 0) -> DataRanks:
        """The data-parallel ranks of the island that a rank is in; islands lie one after another.

        Args:
            plan: The plan.
            ranks: Global ranks of all islands. If there are more or fewer than the plan has, they are one island.
            rank: Index of this rank among them.
            channel: See the class.
        """
        if plan.job_islands == 1 or len(ranks) != plan.data_ranks:
            return cls(tuple(ranks), channel)
        islands = tuple(tuple(ranks[i : i + plan.world]) for i in range(0, len(ranks), plan.world))
        island = rank // plan.world
        return cls(islands[island], channel, island, islands)

    @property
    def everyone(self) -> tuple[int, ...]:
        """Global ranks of all islands that train the same model or the same part of it."""
        return tuple(rank for island in self.islands for rank in island) or self.ranks

    def placed(self, placement: Sequence[int]) -> DataRanks:
        """The same ranks at other positions: position ``i`` gets the rank that position ``placement[i]`` had."""

        def moved(ranks: Sequence[int]) -> tuple[int, ...]:
            return tuple(ranks[position] for position in placement)

        return replace(self, ranks=moved(self.ranks), islands=tuple(moved(island) for island in self.islands))


class AxisGroup:
    """One axis of the mesh on one lane: ranks of several nodes, equally many on each.

    Args:
        index: Local-major index of this rank on the axis.
        local: Number of ranks of the axis inside a node.
        nodes: Number of nodes that the axis spans.
        hops: By stage, the ranks that one hop joins: this rank's neighbours in the node, or its peers on other nodes.

    Attributes:
        size: Number of ranks of the axis.
        index: Index of this rank, which is also the index of its piece of a vector.
        local_index: Index of this rank among those of its node.
        columns: By place inside the node, the members that gather their pieces across nodes.
    """

    def __init__(self, index: int, local: int, nodes: int, hops: Mapping[Stage, Subgroup]) -> None:
        self.index, self.local, self.nodes, self.hops = index, local, nodes, hops
        self.size, self.local_index = local * nodes, index // nodes
        self.columns = [range(first, first + nodes) for first in range(0, self.size, nodes)]

    @classmethod
    def of(
        cls,
        plan: Plan,
        axis: Axis,
        lane: Lane,
        position: int,
        device: torch.device | None,
        meter: Meter,
        stages: Sequence[Stage] | None = None,
        data: DataRanks | None = None,
    ) -> AxisGroup:
        """An axis of a plan.

        Args:
            plan: The plan.
            axis: The axis.
            lane: Lane that uses it.
            position: Position of this rank in the mesh. With a ``placement``, it differs from the global rank. Along
                ``ISLANDS``, positions go on from one island to the next.
            device: Device of the tensors; ``None`` if the host exchanges its own, whatever device the model is on.
            meter: Counts the bytes.
            stages: Stages of the lane that exchange something; all of its transfers by default.
            data: Global ranks by position; all ranks of the job by default.
        """
        members = axis_members(plan, axis, position)
        data = data or DataRanks(tuple(range(plan.world)))
        ranks = data.everyone if axis is Axis.ISLANDS else data.ranks

        def joined(stage: Stage) -> Subgroup:
            places = getattr(members, stage.scope)
            return Subgroup(tuple(ranks[place] for place in places), lane, stage, device, meter, data.channel)

        hops = {stage: joined(stage) for stage in stages or _STAGES[lane]}
        return cls(axis_index(plan, axis, position), len(members.inside), len(members.across), hops)
