"""What tensor, pipeline, expert and context parallelism add to a step.

These are exchanges inside a block while computation waits, idle stages, and messages between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from thinwire.cost import CollectiveTimes, ModelPart, Rates, Work, alike
from thinwire.cost.rates import wire_bytes_per_value
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.sim.step import Simulated, Workload, part_seconds
from thinwire.spec import CodecSpec, Factor, ModelSpec, Plan
from thinwire.spec.plan_parts.pipeline import STAGES_OF_A_RANK

__all__ = [
    "AxisCosts", "StageLink", "exchanged_values", "bubble_of", "bubble_seconds", "message_seconds", "pass_seconds",
    "sent_seconds", "with_stages",
]  # fmt: skip

SUMS = 2
"""Number of sums over tensor-parallel ranks in the forward of a block: after attention and after the feed-forward. The
backward has as many (Megatron-LM, arXiv 1909.08053, section 3)."""

EXCHANGES = 2
"""Exchanges of the experts of a block in a forward, and as many in a backward: of tokens to their experts, and of what
these make of them."""

GATHERED = 2
"""What attention gathers in a forward, and reduces in a backward: keys and values."""


@dataclass(frozen=True)
class AxisCosts:
    """Seconds that ranks which share tensors, experts or sequences exchange in one pass over a part of the model, as
    many in a forward as in a backward.

    Attributes:
        plan: The plan; ``tp``, ``ep``, ``cp``, their codecs and the micro-batch matter.
        model: Dimensions of the model.
        seq: Tokens per sequence.
        rates: Seconds of hops and codecs.
        calls: Seconds of collectives.
    """

    plan: Plan
    model: ModelSpec
    seq: int
    rates: Rates
    calls: CollectiveTimes

    def exchanges(self, parts: Sequence[ModelPart]) -> tuple[float, ...]:
        """Seconds of all exchanges of each part; empty if the plan has no such ranks."""
        if self.plan.tp == self.plan.ep == self.plan.cp == 1:
            return ()
        return tuple(self.sums(part) + self.experts(part) + self.context(part) for part in parts)

    def sums(self, part: ModelPart) -> float:
        """Seconds of the sums over tensor-parallel ranks, all of which are on one node."""
        if self.plan.tp == 1 or part.kind != "block" or not part.attention_width:
            return 0.0
        return SUMS * self._sum

    @cached_property
    def _sum(self) -> float:
        plan, codec = self.plan, self.plan.wire.tp
        values, mesh = plan.micro_batch * self.seq * self.model.hidden, Factor(local=plan.tp)
        if codec.is_none:
            return self.calls.seconds("AR", values * ITEMSIZE[plan.compute_dtype], mesh)
        dtype = plan.compute_dtype
        transfer = self.calls.seconds("AR", values * wire_bytes_per_value(codec, dtype), mesh)
        # The reduce-scatter encodes the whole vector, the all-gather a rank's share; the parts of others are decoded.
        others = values * (plan.tp - 1) / plan.tp
        return transfer + self.rates.codec(Work(codec, dtype, encoded=values + values / plan.tp, decoded=2 * others))

    def experts(self, part: ModelPart) -> float:
        """Seconds of sending tokens to their experts, and what these make of them back."""
        values = exchanged_values(part, self.plan, self.seq, self.model.hidden)
        if not values:
            return 0.0
        return EXCHANGES * self._sent(self.plan.wire.ep, self.plan.ep, values, Kind.REDUCE_SCATTER)

    def context(self, part: ModelPart) -> float:
        """Seconds of gathering keys and values, or of reducing their gradients."""
        plan = self.plan
        if plan.cp == 1 or not part.attention_width:
            return 0.0
        values = plan.micro_batch * self.seq / plan.cp * self.model.kv_hidden * (plan.cp - 1)
        return GATHERED * self._sent(plan.wire.cp, plan.cp, values, Kind.ALL_GATHER)

    def _sent(self, codec: CodecSpec, ways: int, values: float, kind: Kind) -> float:
        """Seconds in which a rank sends ``values`` values to the others of a group of ``ways`` neighbours. Each of them
        gets equally many; those on other nodes over the network."""
        dtype, group = self.plan.compute_dtype, self.plan.mesh.group(ways)
        assert group is not None, "a rule of plans"
        sent = values * (ITEMSIZE[dtype] if codec.is_none else wire_bytes_per_value(codec, dtype))
        inside = sent * (group.local - 1) / (ways - 1)
        seconds = 0.0
        for scope, ranks, share in ((Scope.INSIDE, group.local, inside), (Scope.ACROSS, group.nodes, sent - inside)):
            if ranks > 1:
                seconds += self.rates.hop(kind, scope, ranks, round(share), encoded=not codec.is_none)
        return seconds if codec.is_none else seconds + self.rates.codec(Work(codec, dtype, values, values))


def exchanged_values(part: ModelPart, plan: Plan, seq: int, hidden: int) -> float:
    """Values that a rank sends to others in one exchange of the experts of a part, if tokens choose all equally often.

    Args:
        part: The part.
        plan: The plan.
        seq: Tokens per sequence.
        hidden: Width of the residual stream.
    """
    if part.routed is None or plan.ep == 1:
        return 0.0
    rows = plan.micro_batch * seq / plan.cp * part.routed.active
    return rows * hidden * (plan.ep - 1) / plan.ep


# -- pipelines ---------------------------------------------------------------------------------------------------


def bubble_seconds(plan: Plan, workload: Workload, rates: Rates, message: float) -> float:
    """Seconds per step that a pipeline stage idles while the pipeline fills and drains.

    This is the time of ``pp - 1`` micro-batches under 1F1B. Under the interleaved schedule, each of them passes through
    only one of a rank's chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Args:
        plan: The plan; the number of stages and the schedule matter.
        workload: Workload of one rank.
        rates: Seconds of the workload's parts.
        message: Seconds to send a micro-batch's activations, or their gradients, to the next stage.
    """
    each = dict(zip((part.work for part in workload.parts), workload.exchanges, strict=False))
    counted = [(count, part, each.get(part.work, 0.0)) for count, part in alike(workload.parts)]
    return bubble_of(plan, *pass_seconds(plan, counted, rates, workload.seq), message)


def pass_seconds(
    plan: Plan, counted: Sequence[tuple[int, ModelPart, float]], rates: Rates, seq: int
) -> tuple[float, float]:
    """Seconds of a forward and of a backward through parts, given with their numbers and the seconds of exchanges."""
    each = [(count, *part_seconds(rates, part, plan, seq, exchange)) for count, part, exchange in counted]
    return sum(count * forward for count, forward, _ in each), sum(count * backward for count, _, backward in each)


def bubble_of(plan: Plan, forward: float, backward: float, message: float) -> float:
    """The same as :func:`bubble_seconds`, from the seconds of a forward and of a backward through all parts."""
    again = forward if plan.recompute else 0.0
    return (plan.pp - 1) * ((forward + backward + again) / STAGES_OF_A_RANK[plan.pipeline_schedule] + 2 * message)


def message_seconds(plan: Plan, message: float) -> float:
    """Seconds per step that a stage waits for messages while the pipeline is full.

    Torch's schedules wait for every message, in both directions and for each chunk.

    Args:
        plan: The plan; micro-batches and schedule matter.
        message: Seconds of one message.
    """
    return 2 * STAGES_OF_A_RANK[plan.pipeline_schedule] * plan.micro_batches * message if plan.pp > 1 else 0.0


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


def sent_seconds(plan: Plan, seq: int, rates: Rates, calls: CollectiveTimes, link: StageLink) -> float:
    """Seconds to send a micro-batch's activations, or their gradients, to the next stage.

    Args:
        plan: Plan with the codec of the pipeline.
        seq: Tokens per sequence.
        rates: Seconds of the codec.
        calls: Seconds of collectives.
        link: Connection between the stages.
    """
    codec, dtype = plan.wire.pp, plan.compute_dtype
    values = plan.micro_batch * seq * link.hidden
    part = values / link.sharers
    pair = Factor(nodes=2) if link.crosses else Factor(local=2)
    # The nodes of a stage are adjacent, so the distance to the next stage is a stage's number of nodes.
    seconds = calls.seconds("BC", part * wire_bytes_per_value(codec, dtype), pair, plan.mesh.nodes)
    if not codec.is_none:
        seconds += rates.codec(Work(codec, dtype, encoded=part, decoded=part))
    if not link.gathered:
        return seconds
    return seconds + calls.seconds("AG", values * ITEMSIZE[dtype], Factor(local=link.sharers))


def with_stages(
    step: Simulated, plan: Plan, workload: Workload, rates: Rates, calls: CollectiveTimes, link: StageLink
) -> Simulated:
    """A step with the seconds in which stages idle while the pipeline fills and drains."""
    if plan.pp == 1:
        return step
    message = sent_seconds(plan, workload.seq, rates, calls, link)
    return replace(step, seconds=step.seconds + bubble_seconds(plan, workload, rates, message))
