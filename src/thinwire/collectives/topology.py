"""Ranks along one axis of the mesh: subgroups inside the node and across nodes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.collectives.group import Meter, Subgroup
from thinwire.collectives.moves import TRANSFERS, Stage
from thinwire.program import Axis, Lane, axis_index, axis_members
from thinwire.spec import Plan

__all__ = ["AxisGroup"]

_STAGES = {
    Lane.GATHER: (Stage.GATHER_ACROSS, Stage.GATHER_INSIDE),
    Lane.REDUCE: (Stage.SCATTER_INSIDE, Stage.SCATTER_ACROSS),
    Lane.SYNC: TRANSFERS,
    Lane.SPREAD: (Stage.GATHER_ACROSS, Stage.GATHER_INSIDE),
    Lane.CONTROL: (Stage.GATHER_ACROSS, Stage.GATHER_INSIDE),
}


class AxisGroup:
    """One axis of the mesh on one lane.

    Attributes:
        size: ranks of the axis.
        index: this rank's position, local-major: which piece of a vector is its own.
        local: ranks of the axis inside a node.
        nodes: nodes it spans.
        local_index: this rank's position inside its node.
    """

    def __init__(
        self,
        plan: Plan,
        axis: Axis,
        lane: Lane,
        rank: int,
        device: torch.device,
        meter: Meter,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        members = axis_members(plan, axis, rank)
        self.size = members.size
        self.index = axis_index(plan, axis, rank)
        self.local, self.nodes = len(members.inside), len(members.across)
        self.local_index = members.inside.index(rank)
        self._subgroups = {
            stage: Subgroup(getattr(members, stage.scope), lane, stage, device, meter)
            for stage in stages or _STAGES[lane]
        }

    def at(self, stage: Stage) -> Subgroup:
        """The ranks that one hop joins: this rank's neighbours in the node, or its peers on the other nodes."""
        return self._subgroups[stage]
