"""What tensor and pipeline parallelism add to a step: collectives between the halves of a block, and idle stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from thinwire.cost import ModelPart, Rates, Work
from thinwire.cost.rates import Beside, wire_bytes_per_value
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.sim.step import Workload
from thinwire.spec import Factor, Plan
from thinwire.spec.pipeline import STAGES_OF_A_RANK

__all__ = ["Calls", "HopCalls", "StageLink", "TensorParallelRates", "idle_seconds", "message_seconds", "sent_seconds"]

CALLS = 2
"""Sums over the tensor-parallel ranks in the forward of a block, behind attention and behind the feed-forward; the
backward has as many (Megatron-LM, arXiv 1909.08053, section 3)."""


class Calls(Protocol):
    """Times of collectives over a sub-mesh, such as :class:`~thinwire.cost.FlatCollectives`."""

    def seconds(self, kind: Literal["AG", "RS", "AR", "BC"], size: float, mesh: Factor, stride: int = 1) -> float:
        """Time of one collective on ``size`` bytes in all."""
        ...


@dataclass(frozen=True)
class HopCalls:
    """Collectives of groups inside a node, and of pairs, at the prices of a program's hops: published or measured.

    Attributes:
        rates: of hops.
    """

    rates: Rates

    def seconds(self, kind: Literal["AG", "RS", "AR", "BC"], size: float, mesh: Factor, stride: int = 1) -> float:
        """Time of one collective, inside a node or with one rank of each.

        Args:
            kind: all-gather, reduce-scatter, all-reduce (one behind the other) or a broadcast to one other rank.
            size: bytes of the whole vector.
            mesh: the group.
            stride: nodes from one of its nodes to the next.
        """
        if mesh.ranks == 1:
            return 0.0
        scope = Scope.ACROSS if mesh.nodes > 1 else Scope.INSIDE
        sent = round(size if kind == "BC" else size * (mesh.ranks - 1) / mesh.ranks)
        kinds = {"AR": (Kind.REDUCE_SCATTER, Kind.ALL_GATHER), "RS": (Kind.REDUCE_SCATTER,)}.get(
            kind, (Kind.ALL_GATHER,)
        )
        return sum(self.rates.hop(hop, scope, mesh.ranks, sent, encoded=False, stride=stride) for hop in kinds)


def idle_seconds(plan: Plan, workload: Workload, rates: Rates, message: float) -> float:
    """How long a pipeline stage stands still in a step, while the first micro-batch fills the pipeline and the last one
    drains it: ``pp - 1`` micro-batches (1F1B), through one of a rank's chunks each where they are interleaved
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Args:
        plan: with the number of stages and the schedule.
        workload: of one rank.
        rates: how long its parts take.
        message: seconds of sending a micro-batch's activations, or their gradients, to the next stage.
    """
    forward = sum(rates.forward(part, plan, workload.seq) for part in workload.parts)
    backward = sum(rates.backward(part, plan, workload.seq) for part in workload.parts)
    again = forward if plan.recompute else 0.0
    return (plan.pp - 1) * ((forward + backward + again) / STAGES_OF_A_RANK[plan.schedule] + 2 * message)


def message_seconds(plan: Plan, message: float) -> float:
    """How long a stage waits for messages while the pipeline is full: torch's schedules wait for every one, both ways
    and for each chunk.

    Args:
        plan: with micro-batches and schedule.
        message: seconds of one.
    """
    return 2 * STAGES_OF_A_RANK[plan.schedule] * plan.micro_batches * message if plan.pp > 1 else 0.0


@dataclass(frozen=True)
class StageLink:
    """How a pipeline stage hands activations to the next one.

    Attributes:
        hidden: width of the residual stream.
        crosses: whether the next stage is on another node.
        sharers: tensor-parallel ranks that send a part each.
        gathered: whether all of them gather the parts behind; else sequences stay cut between matrices.
    """

    hidden: int
    crosses: bool
    sharers: int = 1
    gathered: bool = True


def sent_seconds(plan: Plan, seq: int, rates: Rates, flat: Calls, link: StageLink) -> float:
    """Seconds of sending a micro-batch's activations, or their gradients, to the next stage.

    Args:
        plan: with the codec of the pipeline.
        seq: tokens of a sequence.
        rates: of the codec.
        flat: times of calls.
        link: between the stages.
    """
    codec, dtype = plan.wire.pp, plan.compute_dtype
    values = plan.micro_batch * seq * link.hidden
    part = values / link.sharers
    pair = Factor(nodes=2) if link.crosses else Factor(local=2)
    # A stage's nodes are neighbours, so that the next stage is as many nodes away as a stage has.
    seconds = flat.seconds("BC", part * wire_bytes_per_value(codec, dtype), pair, plan.mesh.nodes)
    if not codec.is_none:
        seconds += rates.codec(Work(codec, dtype, encoded=part, decoded=part))
    if not link.gathered:
        return seconds
    return seconds + flat.seconds("AG", values * ITEMSIZE[dtype], Factor(local=link.sharers))


@dataclass(frozen=True)
class TensorParallelRates:
    """Rates of ranks that share every block with ``tp - 1`` others: computation waits for their sums.

    Attributes:
        rates: without them.
        flat: times of collectives.
        tp: ranks of a group, inside a node.
        hidden: width of the residual stream.
        itemsize: bytes of an activation.
    """

    rates: Rates
    flat: Calls
    tp: int
    hidden: int
    itemsize: int

    def summing(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Seconds of the sums in one pass over a part."""
        if part.kind != "block" or not part.attention_width:
            return 0.0
        codec, values = plan.wire.tp, plan.micro_batch * seq * self.hidden
        if codec.is_none:
            return CALLS * self.flat.seconds("AR", values * self.itemsize, Factor(local=self.tp))
        dtype = plan.compute_dtype
        transfer = self.flat.seconds("AR", values * wire_bytes_per_value(codec, dtype), Factor(local=self.tp))
        # All of it is encoded for the reduce-scatter and a rank's share for the all-gather; the others' is decoded.
        others = values * (self.tp - 1) / self.tp
        coding = self.rates.codec(Work(codec, dtype, encoded=values + values / self.tp, decoded=2 * others))
        return CALLS * (transfer + coding)

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """With its sums."""
        return self.rates.forward(part, plan, seq) + self.summing(part, plan, seq)

    def backward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Likewise."""
        return self.rates.backward(part, plan, seq) + self.summing(part, plan, seq)

    # All else is as it was.

    def hop(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool, stride: int = 1) -> float:
        """As without."""
        return self.rates.hop(kind, scope, ranks, sent, encoded=encoded, stride=stride)

    def spine_load(self, kind: Kind, scope: Scope, ranks: int, stride: int) -> float:
        """As without."""
        return self.rates.spine_load(kind, scope, ranks, stride)

    def codec(self, work: Work) -> float:
        """As without."""
        return self.rates.codec(work)

    def update(self, numel: int) -> float:
        """As without."""
        return self.rates.update(numel)

    def touch(self, numel: float) -> float:
        """As without."""
        return self.rates.touch(numel)

    @property
    def step(self) -> float:
        """As without."""
        return self.rates.step

    def beside(self, kind: Kind, scope: Scope, ranks: int, sent: int, *, encoded: bool) -> Beside:
        """As without."""
        return self.rates.beside(kind, scope, ranks, sent, encoded=encoded)

    @property
    def least_slowing(self) -> float:
        """As without."""
        return self.rates.least_slowing

    @property
    def extrapolated(self) -> bool:
        """As without."""
        return self.rates.extrapolated
