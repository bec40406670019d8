"""Costs of tensor and pipeline parallelism: collectives between the halves of a block, idle stages, and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from thinwire.cost import Basis, ModelPart, Rates, Work, alike
from thinwire.cost.rates import Beside, wire_bytes_per_value
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.sim.step import Workload
from thinwire.spec import Factor, Plan
from thinwire.spec.pipeline import STAGES_OF_A_RANK
from thinwire.spec.profile import Handling

__all__ = [
    "Calls", "HopCalls", "StageLink", "TensorParallelRates", "idle_of", "idle_seconds", "message_seconds",
    "pass_seconds", "sent_seconds",
]  # fmt: skip

CALLS = 2
"""Number of sums over tensor-parallel ranks in the forward of a block: after attention and after the feed-forward. The
backward has as many (Megatron-LM, arXiv 1909.08053, section 3)."""


class Calls(Protocol):
    """Seconds of collectives over a sub-mesh, such as :class:`~thinwire.cost.FlatCollectives`."""

    def seconds(self, kind: Literal["AG", "RS", "AR", "BC"], size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one collective on a vector of ``size`` bytes."""
        ...


@dataclass(frozen=True)
class HopCalls:
    """Prices collectives inside a node, and between pairs of ranks, like the hops of a program.

    Attributes:
        rates: Seconds of hops, published or measured.
    """

    rates: Rates

    def seconds(self, kind: Literal["AG", "RS", "AR", "BC"], size: float, mesh: Factor, stride: int = 1) -> float:
        """Seconds of one collective inside a node, or of one with a single rank on each node.

        Args:
            kind: All-gather, reduce-scatter, all-reduce (a reduce-scatter, then an all-gather), or a broadcast to one
                other rank.
            size: Bytes of the whole vector.
            mesh: Shape of the group.
            stride: Distance from one node of the group to the next, in nodes.
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
    """Seconds per step that a pipeline stage idles while the pipeline fills and drains.

    This is the time of ``pp - 1`` micro-batches under 1F1B. Under the interleaved schedule, each of them passes through
    only one of a rank's chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Args:
        plan: The plan; the number of stages and the schedule matter.
        workload: Workload of one rank.
        rates: Seconds of the workload's parts.
        message: Seconds to send a micro-batch's activations, or their gradients, to the next stage.
    """
    forward, backward = pass_seconds(plan, alike(workload.parts), rates, workload.seq)
    return idle_of(plan, forward, backward, message)


def pass_seconds(plan: Plan, counted: Sequence[tuple[int, ModelPart]], rates: Rates, seq: int) -> tuple[float, float]:
    """Seconds of a forward and of a backward through parts that are given with their numbers."""
    forward = sum(count * rates.forward(part, plan, seq) for count, part in counted)
    return forward, sum(count * rates.backward(part, plan, seq) for count, part in counted)


def idle_of(plan: Plan, forward: float, backward: float, message: float) -> float:
    """The same as :func:`idle_seconds`, from the seconds of a forward and of a backward through all parts."""
    again = forward if plan.recompute else 0.0
    return (plan.pp - 1) * ((forward + backward + again) / STAGES_OF_A_RANK[plan.schedule] + 2 * message)


def message_seconds(plan: Plan, message: float) -> float:
    """Seconds per step that a stage waits for messages while the pipeline is full.

    Torch's schedules wait for every message, in both directions and for each chunk.

    Args:
        plan: The plan; micro-batches and schedule matter.
        message: Seconds of one message.
    """
    return 2 * STAGES_OF_A_RANK[plan.schedule] * plan.micro_batches * message if plan.pp > 1 else 0.0


@dataclass(frozen=True)
class StageLink:
    """The connection from a pipeline stage to the next one.

    Attributes:
        hidden: Width of the residual stream.
        crosses: Whether the next stage is on another node.
        sharers: Number of tensor-parallel ranks that each send a part.
        gathered: Whether the receiving ranks gather the parts; otherwise the sequence stays split between them.
    """

    hidden: int
    crosses: bool
    sharers: int = 1
    gathered: bool = True


def sent_seconds(plan: Plan, seq: int, rates: Rates, flat: Calls, link: StageLink) -> float:
    """Seconds to send a micro-batch's activations, or their gradients, to the next stage.

    Args:
        plan: Plan with the codec of the pipeline.
        seq: Tokens per sequence.
        rates: Seconds of the codec.
        flat: Seconds of library calls.
        link: Connection between the stages.
    """
    codec, dtype = plan.wire.pp, plan.compute_dtype
    values = plan.micro_batch * seq * link.hidden
    part = values / link.sharers
    pair = Factor(nodes=2) if link.crosses else Factor(local=2)
    # The nodes of a stage are adjacent, so the distance to the next stage is a stage's number of nodes.
    seconds = flat.seconds("BC", part * wire_bytes_per_value(codec, dtype), pair, plan.mesh.nodes)
    if not codec.is_none:
        seconds += rates.codec(Work(codec, dtype, encoded=part, decoded=part))
    if not link.gathered:
        return seconds
    return seconds + flat.seconds("AG", values * ITEMSIZE[dtype], Factor(local=link.sharers))


@dataclass(frozen=True)
class TensorParallelRates:
    """Rates under tensor parallelism: computation includes the sums over ``tp`` ranks.

    Attributes:
        rates: Rates without tensor parallelism.
        flat: Seconds of collectives.
        tp: Number of tensor-parallel ranks, all on one node.
        hidden: Width of the residual stream.
        itemsize: Bytes per activation value.
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
        # The reduce-scatter encodes the whole vector, the all-gather a rank's share; the parts of others are decoded.
        others = values * (self.tp - 1) / self.tp
        coding = self.rates.codec(Work(codec, dtype, encoded=values + values / self.tp, decoded=2 * others))
        return CALLS * (transfer + coding)

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Seconds of the forward, including its sums."""
        return self.rates.forward(part, plan, seq) + self.summing(part, plan, seq)

    def backward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Likewise."""
        return self.rates.backward(part, plan, seq) + self.summing(part, plan, seq)

    # Everything else is unchanged by tensor parallelism.

    def computing_basis(self, part: ModelPart, plan: Plan, seq: int) -> Basis:
        """What the seconds of a part rest on."""
        return self.rates.computing_basis(part, plan, seq)

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
    def handling(self) -> Handling:
        """As without."""
        return self.rates.handling

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
