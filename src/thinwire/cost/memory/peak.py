"""Peak memory of one rank during a step, in bytes, by content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.cost.memory.activations import GPU_LOSS_CHUNK, exchange_bytes, held_activations, loss_bytes, message_bytes
from thinwire.cost.memory.stages import PipelineShare, demanding_stages, held_units, stage_model, stages
from thinwire.cost.memory.states import (
    ModelStates,
    States,
    feedback_bytes,
    frozen_bytes,
    island_bytes,
    largest_batch,
    largest_owned,
    visiting,
)
from thinwire.cost.memory.workspace import Workspace
from thinwire.program import UnitInfo
from thinwire.spec import ModelSpec, Plan

OVERHEAD = 1_500 << 20
"""Bytes of GPU memory that hold no tensors: contexts, communicators, libraries, fragmentation. A profile measures
them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's memory, by content.

    Attributes:
        params: Bytes of the ``P`` shard.
        grads: Bytes of the ``G`` shard.
        optimizer: Bytes of the ``OS`` shard.
        secondary: Bytes of the secondary parameter shard.
        gathered: Bytes of the units that are gathered at once.
        buffers: Bytes of gradients in flight, encoded messages and sums.
        feedback: Bytes of rounding errors that error feedback keeps.
        islands: Bytes of what islands agreed on, of the outer momentum, and of an exchange under way.
        activations: Bytes of activations kept from forward to backward.
        logits: Bytes of logits, their gradients and the loss.
        overhead: Bytes in use without a model.
        host: Bytes of the host's memory, for states that live there.
    """

    params: int
    grads: int
    optimizer: int
    secondary: int
    gathered: int
    buffers: int
    feedback: int
    islands: int
    activations: int
    logits: int
    overhead: int
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, int]:
        """Bytes of the device by name of the attribute."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "host"}


def memory(
    model: ModelSpec,
    plan: Plan,
    units: Sequence[UnitInfo],
    *,
    seq: int,
    states: States | None = None,
    overhead: int = OVERHEAD,
    loss_chunk: int = GPU_LOSS_CHUNK,
    share: int | None = None,
    stage: PipelineShare | None = None,
) -> Memory:
    """Peak memory of one rank under a plan.

    Args:
        model: Dimensions of the model, or of the rank's part of it in a pipeline.
        plan: The plan; factors, dtypes, micro-batch and recomputation matter.
        units: Units of the model.
        seq: Tokens per sequence.
        states: Bytes per parameter of another system; default: those of thinwire's runtime.
        overhead: Bytes in use without a model.
        loss_chunk: Most logits of which the loss has fp32 copies at once.
        share: Number of elements on the rank that owns the most; default: computed from ``units``.
        stage: The rank's share of thinwire's own pipeline or tensor parallelism. The default describes any system: as
            many micro-batches in flight as on the first rank, the logits of the last, and no buffers for messages.
    """
    rest, own = ([unit for unit in units if unit.experts is shared] for shared in (False, True))
    share = largest_owned(rest) if share is None else share
    held = [_held(plan, rest, share, states)]
    if own:  # experts are sharded by a plan of their own
        of_experts = plan.for_experts()
        held.append(_held(of_experts, own, largest_owned(own), None))
    exchanges = exchange_bytes(model, plan, seq) if own else 0
    of_states, gathered, buffers, feedback = zip(*held, strict=True)
    kept = ModelStates(*(sum(sizes) for sizes in zip(*of_states, strict=True)))
    return Memory(
        **kept._asdict(),
        gathered=sum(gathered),
        buffers=sum(buffers) + message_bytes(model, plan, seq, stage) + exchanges,
        feedback=sum(feedback),
        islands=island_bytes(plan, share),
        activations=held_activations(model, plan, seq, stage),
        logits=loss_bytes(model, plan, seq, loss_chunk) if stage is None or stage.last else 0,
        overhead=overhead,
    )


def _held(
    plan: Plan, units: Sequence[UnitInfo], share: int, states: States | None
) -> tuple[ModelStates, int, int, int]:
    """Bytes of the model states of some units; of what is gathered at once, of buffers, and of rounding errors."""
    workspace = Workspace(units)
    numel = sum(buffer.numel for unit in units for buffer in unit.buffers if buffer.trainable)
    kept = ModelStates.of(states or States.of(plan), plan, numel, share)
    frozen, of_secondary = frozen_bytes(plan, units)
    kept = kept._replace(params=kept.params + frozen, secondary=kept.secondary + of_secondary)
    if not plan.residence.on_device:
        kept = kept.streamed(plan.residence, largest_batch(plan, units), visiting(plan, units))
    if states is not None:  # other systems keep a shard of gradients and nothing else of them
        kept = kept._replace(grads=states.grads * (numel // plan.grads.ranks))
    return kept, workspace.gathered(plan), workspace.buffers(plan), feedback_bytes(plan, numel)


def largest_memory(
    model: ModelSpec, plan: Plan, *, seq: int, overhead: int, loss_chunk: int = GPU_LOSS_CHUNK
) -> Memory:
    """Peak memory of the rank that needs the most, under thinwire's own tensor and pipeline parallelism; arguments as
    of :func:`memory`, for the whole model."""

    def needed(stage: PipelineShare) -> Memory:
        part = stage_model(model, stage.blocks)
        held = held_units(part, plan, stage)
        return memory(part, plan, held, seq=seq, overhead=overhead, loss_chunk=loss_chunk, stage=stage)

    return max(map(needed, demanding_stages(stages(model.layers, plan))), key=lambda needed: needed.total)
