"""Ranks along one axis of the mesh: a subgroup inside the node and a subgroup across nodes."""

from __future__ import annotations

import torch

from thinwire.collectives.group import Meter, Subgroup
from thinwire.program import Axis, Lane, Scope, axis_index, axis_members
from thinwire.spec import Plan

__all__ = ["AxisGroup"]


class AxisGroup:
    """One axis of the mesh on one lane.

    Attributes:
        inside: the members on this node.
        across: the members with this rank's place on the other nodes.
        size: ranks of the axis.
        index: this rank's position, local-major: which piece of a vector is its own.
    """

    def __init__(self, plan: Plan, axis: Axis, lane: Lane, rank: int, device: torch.device, meter: Meter) -> None:
        members = axis_members(plan, axis, rank)
        self.inside = Subgroup(members.inside, lane, Scope.INSIDE, device, meter)
        self.across = Subgroup(members.across, lane, Scope.ACROSS, device, meter)
        self.size = members.size
        self.index = axis_index(plan, axis, rank)

    def columns(self, pieces: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Pieces by local index: ``columns[l][n]`` belongs to local rank ``l`` of node ``n``."""
        nodes = self.across.size
        return [pieces[i : i + nodes] for i in range(0, len(pieces), nodes)]
