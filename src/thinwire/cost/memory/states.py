"""What lives from step to step: model states, rounding errors, and what islands agreed on.

Model states are counted as the runtime keeps them: ``P`` in the compute dtype, ``G`` in the accumulate dtype, fp32
masters and AdamW's two moments. If whole tensors are assigned to ranks, the largest share counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thinwire.program import (
    LEAVING,
    SLOTS,
    Axis,
    Even,
    Event,
    HostLane,
    Phase,
    UnitInfo,
    axis_shape,
    buckets,
    gradient_bytes,
    lower,
    together,
)
from thinwire.program.wire import ITEMSIZE, change_encodings, reduction_codecs
from thinwire.spec import Plan
from thinwire.spec.plan_parts.residence import Residence


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of model states per parameter; ``OS`` holds the master parameter and the moments."""

    params: int
    grads: int
    optimizer: int

    @classmethod
    def of(cls, plan: Plan) -> States:
        """The states of thinwire's runtime with AdamW. fp32 parameters serve as their own masters."""
        alike = plan.params == plan.optimizer and not plan.residence.has_masters
        master = 0 if plan.compute_dtype == "float32" and alike else 4
        return cls(ITEMSIZE[plan.compute_dtype], ITEMSIZE[plan.accumulate_dtype], master + 8)


AMSP_STATES = States(2, 2, 12)
"""States as AMSP counts them (section 3), with bf16 gradients."""


class ModelStates(NamedTuple):
    """Bytes of a rank's model states; ``G`` with the gradients of the optimizer's share, and ``host`` those of all on
    the host."""

    params: int
    grads: int
    optimizer: int
    secondary: int
    host: int = 0

    @property
    def on_device(self) -> int:
        """Bytes of all of them on the device."""
        return self.params + self.grads + self.optimizer + self.secondary

    def streamed(self, residence: Residence, slot: int, visiting: tuple[int, int]) -> ModelStates:
        """The same with what lives on the host there.

        Args:
            residence: What lives on the host.
            slot: Bytes that come to the device for the update of the largest batch of units.
            visiting: Bytes of parameters that are on the device at once for new values, and of gradients in a backward.
        """
        params = self.params * residence.streams_params
        optimizer = self.optimizer * residence.streams_states
        grads = self.grads * residence.streams_gradients
        kept = self._replace(
            params=self.params - params + min(visiting[0], params),
            optimizer=self.optimizer - optimizer,
            grads=self.grads - grads,
            host=params + optimizer + grads,
        )
        # Slots hold both; they are counted where the larger part of them is.
        slots = min(SLOTS * slot, optimizer + grads)
        name = "optimizer" if residence.streams_states else "grads"
        kept = kept._replace(**{name: getattr(kept, name) + slots})
        return kept._replace(grads=kept.grads + min(visiting[1], grads))

    @classmethod
    def of(cls, states: States, plan: Plan, numel: int, share: int) -> ModelStates:
        """The states of thinwire's runtime.

        With one micro-batch and whole parameters, no ``G`` shard is made beside the gradients of the optimizer's share:
        gradients go straight from autograd to the reduction.

        Args:
            states: Bytes per parameter.
            plan: The plan; its factors and the number of micro-batches matter.
            numel: Trained elements of all units.
            share: Elements on the rank that owns the most.
        """
        apart = not plan.grads_like_optimizer and (plan.params.ranks > 1 or plan.micro_batches > 1)
        return cls(
            states.params * numel // plan.params.ranks,
            states.grads * (share + (numel // plan.grads.ranks if apart else 0)),
            states.optimizer * share,
            states.params * numel // plan.secondary.ranks if plan.secondary else 0,
        )


def largest_batch(plan: Plan, units: Sequence[UnitInfo]) -> int:
    """Bytes that come to the device for the update of the largest batch of units."""
    return max(
        (op.size for op in lower(plan, units).starts(Event(Phase.STEP, -1, 0)) if op.lane is HostLane.UP), default=0
    )


def visiting(plan: Plan, units: Sequence[UnitInfo]) -> tuple[int, int]:
    """Bytes of what lives on the host and is on the device at once: parameters with new values, and gradients in a
    backward, which are those of a bucket that is filling up, of reductions under way, and of copies to the host."""
    shard = max((sum(b.itemsize * sum(b.shares) for b in unit.buffers if b.trainable) for unit in units), default=0)
    order = [unit for unit in reversed(range(len(units))) if units[unit].trainable]
    several = plan.micro_batches > 1 and not plan.grads_like_optimizer
    sizes = {}
    for unit in order:
        shards = [sum(buffer.shares) for buffer in units[unit].buffers if buffer.trainable]
        shares = [max(buffer.shares) for buffer in units[unit].buffers if buffer.trainable]
        sizes[unit] = gradient_bytes(plan) * (sum(shares) + (sum(shards) if several else 0))
    together = [sum(sizes[unit] for unit in bucket) for bucket in buckets(plan, units, order)]
    gradients = max(together, default=0) * (2 if len(together) > 1 else 1) + LEAVING * max(sizes.values(), default=0)
    return (LEAVING + 1) * shard, gradients


def frozen_bytes(plan: Plan, units: Sequence[UnitInfo]) -> tuple[int, int]:
    """Bytes that a rank keeps of parameters that are not trained: in its ``P`` shard, and in its secondary shard."""
    frozen = [buffer for unit in units for buffer in unit.buffers if not buffer.trainable]
    of, second = plan.params.ranks, plan.secondary
    kept = sum(buffer.kept(of, of) for buffer in frozen)
    return kept, 0 if second is None else sum(buffer.kept(second.ranks, of) for buffer in frozen)


def largest_owned(units: Sequence[UnitInfo]) -> int:
    """Number of elements on the rank that owns the most."""
    trained = [buffer.shares for unit in units for buffer in unit.buffers if buffer.trainable]
    if not trained:
        return 0
    shares = together(trained)
    return shares[0] if isinstance(shares, Even) else max(shares)


def island_bytes(plan: Plan, share: int) -> int:
    """Bytes of what a rank keeps for exchanges with other islands, in fp32, and of the largest exchange under way: the
    change and its mean, and the new values where ranks of an island keep parts for each other."""
    islands = plan.islands
    if islands is None or islands.count == 1:
        return 0
    replicas = plan.world // plan.optimizer.ranks
    piece = -(-share // replicas)
    kept = piece * (1 + (islands.outer.momentum > 0))
    if islands.error_feedback and not change_encodings(plan).gather.codec.is_none:
        kept += piece if islands.count == 2 else piece + piece // islands.count
    under_way = 2 * piece + (share if replicas > 1 else 0)
    if islands.sends_visible:
        kept += piece
        under_way += piece  # two bf16 values for each
    return 4 * (kept + -(-under_way // islands.fragments))


def feedback_bytes(plan: Plan, padded: int) -> int:
    """Bytes of fp32 rounding errors: one for each value that the last hop of a reduction sends, and for each value of a
    rank's piece of the sums that more than two replicas gather."""
    if not plan.wire.error_feedback:
        return 0
    shard, total = padded // plan.params.ranks, 0
    for axis, numel in ((Axis.PARAMS, padded), (Axis.SHARD, shard), (Axis.REPLICA, padded // plan.optimizer.ranks)):
        local, nodes = axis_shape(plan, axis)
        intra, inter = reduction_codecs(plan, axis)
        codec = inter if nodes > 1 else intra
        if local * nodes > 1 and not codec.is_lossless:
            total += 4 * (numel // local if nodes > 1 else numel)
            if axis is Axis.REPLICA and local * nodes > 2:
                total += 4 * (numel // (local * nodes))
    return total
