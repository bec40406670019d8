"""What :func:`thinwire.shard` makes of a model, and what stays the same while it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from thinwire.collectives.group import Meter
from thinwire.collectives.topology import AxisGroup
from thinwire.program import Axis, Lane
from thinwire.sharding.encoding import PlanCodecs
from thinwire.sharding.fragments import OwnedFragment, own_fragments
from thinwire.sharding.gradient import UnitGradient
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.memory.local import LocalPart, Slice
from thinwire.sharding.seeds import Seeds
from thinwire.sharding.unit import Unit
from thinwire.spec import Plan

__all__ = ["ShardedModel"]


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A model in units, on this rank.

    Attributes:
        model: the root module.
        plan: the plan.
        part: what of a larger model it is.
        alone: whether it is a model by itself.
        rank: this rank among the data-parallel ones.
        position: this rank's place in the plan's mesh; another number than ``rank`` where the plan has a ``placement``.
        units: the units, by number.
        gradients: by unit, for units with trainable parameters: one for each trainable buffer, in their order.
        arena: fp32, 1-D; all owned gradients are carved from it.
        slices: by parameter, the slice that tensor parallelism has left on this rank; ``None`` where it has all of it.
        lanes: where communication runs.
        axes: the groups, by axis and lane.
        meter: counts the bytes that this rank sends.
        codecs: what encodes messages.
        seeds: for codecs that round at random; they count the steps.
    """

    model: nn.Module
    plan: Plan
    part: LocalPart
    alone: bool
    rank: int
    position: int
    units: tuple[Unit, ...]
    gradients: Mapping[int, Sequence[UnitGradient]]
    arena: torch.Tensor
    slices: Mapping[str, Slice | None]
    lanes: Lanes
    axes: Mapping[tuple[Axis, Lane], AxisGroup]
    meter: Meter
    codecs: PlanCodecs
    seeds: Seeds

    def fragments(self) -> list[OwnedFragment]:
        """The pieces of parameters that this rank updates."""
        shard = self.axes[Axis.PARAMS, Lane.REDUCE].index
        return own_fragments(self.units, self.gradients, shard, self.axes[Axis.SHARD, Lane.REDUCE].index)
