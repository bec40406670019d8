"""The description of a sharded model on one rank. It never changes, except that the runtime counts its steps, and that
frozen parameters may become trained ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from thinwire.collectives.group import Meter
from thinwire.collectives.topology import AxisGroup
from thinwire.errors import UsageError
from thinwire.program import Axis, Lane
from thinwire.sharding.grads.unit_gradient import OwnedFragment, UnitGradient, fragments_of
from thinwire.sharding.lanes.lanes import Lanes
from thinwire.sharding.memory.local import LocalPart, Slice
from thinwire.sharding.params.flat_buffer import FlatBuffer
from thinwire.sharding.params.param_group import Unit
from thinwire.sharding.params.plan_codecs import PlanCodecs
from thinwire.sharding.params.seeds import Seeds, StepCounter
from thinwire.spec import Plan


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A model in units, on this rank.

    Attributes:
        part: Part of a larger model that this rank trains.
        is_whole_model: Whether the model is complete, rather than a part of a larger model.
        rank: Index of this rank among the data-parallel ranks.
        position: Position of this rank in the plan's mesh; differs from ``rank`` if the plan has a ``placement``.
        units: Units of the model, by number.
        gradients: Gradients by unit, for units with trainable parameters; one for each trainable buffer, in order.
        arenas: Memory of all owned gradients, 1-D, in the plan's ``accumulate_dtype``; on the host if they live there.
            Besides the first, one for each buffer that was frozen when the model was sharded, and is trained since.
        slices: By parameter, the slice that tensor parallelism leaves on this rank; ``None`` for a whole parameter.
        lanes: Lanes that communication runs on.
        axes: Groups of ranks, by axis and lane.
        world: All ranks, for numbers that stay on the device, so that the host waits for none; ``None`` where the host
            decides about a step.
        meter: Counts the bytes that this rank sends.
        steps: Counts the optimizer steps; the runtime writes it.
        seeds: Seeds for codecs that round at random.
    """

    model: nn.Module
    plan: Plan
    part: LocalPart
    is_whole_model: bool
    rank: int
    position: int
    units: tuple[Unit, ...]
    gradients: dict[int, list[UnitGradient]]
    arenas: list[torch.Tensor]
    device: torch.device
    slices: Mapping[str, Slice | None]
    lanes: Lanes
    axes: Mapping[tuple[Axis, Lane], AxisGroup]
    world: AxisGroup | None
    meter: Meter
    codecs: PlanCodecs
    steps: StepCounter
    seeds: Seeds

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides about a step, so that the host waits for no norm."""
        return self.world is not None

    @cached_property
    def fragments(self) -> list[OwnedFragment]:
        """The pieces of parameters that this rank updates."""
        owned = []
        for unit in self.units:
            trained = [buffer for buffer in unit.buffers if buffer.layout.trainable]
            for buffer, part in zip(trained, self.gradients.get(unit.index, ()), strict=True):
                owned += fragments_of(buffer, part, self.shard, self.share)
        return owned

    @property
    def buffers(self) -> Iterator[FlatBuffer]:
        """The flat buffers of all units."""
        return (buffer for unit in self.units for buffer in unit.buffers)

    @property
    def shard(self) -> int:
        """Index of the P shard that this rank holds."""
        return self.axes[Axis.PARAMS, Lane.REDUCE].index

    @property
    def share(self) -> int:
        """Index of the share of its P shard that this rank updates."""
        return self.axes[Axis.SHARD, Lane.REDUCE].index

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of those that update the same share, and speaks for them."""
        return self.axes[Axis.REPLICA, Lane.SYNC].index == 0


def unknown_progress(setting: str) -> UsageError:
    """The error of a step under a plan with this setting, whose user has not reported how far training is."""
    return UsageError(
        f"{setting} needs to know how far training is: call thinwire.progress(model, share) before each step, with the "
        "share of training that is done, 0 to 1"
    )
