"""What tensor, pipeline, expert and context parallelism add to a step.

These are exchanges inside a block while computation waits, idle stages, and messages between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from thinwire.cost import CollectiveTimes, ModelPart, Rates, Work, alike
from thinwire.cost.rates import wire_bytes_per_value
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE, used_codec
from thinwire.sim.workload import Workload, part_seconds
from thinwire.spec import CodecSpec, Factor, ModelSpec, Plan
from thinwire.spec.cut import STAGES_OF_A_RANK

SUMS = 2
"""Number of sums over tensor-parallel ranks in the forward of a block: after attention and after the feed-forward. The
backward has as many (Megatron-LM, arXiv 1909.08053, section 3). Sequence parallelism cuts each all-reduce into its two
halves, and changes neither the bytes nor how many values are encoded (arXiv 2205.05198, section 4.2.2)."""

EXCHANGES = 2
"""Exchanges of the experts of a block in a forward, and as many in a backward: of tokens to their experts, and of what
these make of them."""

GATHERED = 2
"""What attention gathers in a forward, and reduces in a backward: keys and values."""


@dataclass(frozen=True)
class AxisCosts:
    """What sharing a model takes beside the computation of each rank.

    Ranks that share tensors, experts or sequences exchange in each pass over a part of the model, as much in a forward
    as in a backward. Stages of a pipeline idle and wait for messages.

    Attributes:
        plan: The plan; its axes, their codecs and the batch matter.
        model: Dimensions of the model.
        seq: Tokens per sequence.
        rates: Seconds of hops and codecs.
        calls: Seconds of collectives.
        crosses: Whether the next stage of a pipeline is on another node.
        sharers: Number of tensor-parallel ranks that each send a part of a message between stages, which the receiving
            ones gather; ``None``: as in thinwire, whose ranks keep a sequence as the plan splits it.
    """

    plan: Plan
    model: ModelSpec
    seq: int
    rates: Rates
    calls: CollectiveTimes
    crosses: bool = False
    sharers: int | None = None

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
        plan, codec = self.plan, used_codec(self.plan, "tp")
        values, mesh = plan.micro_batch * self.seq * self.model.hidden, Factor(local=plan.tp)
        if codec.is_none:
            return self.calls.seconds(Kind.ALL_REDUCE, values * ITEMSIZE[plan.compute_dtype], mesh)
        dtype = plan.compute_dtype
        transfer = self.calls.seconds(Kind.ALL_REDUCE, values * wire_bytes_per_value(codec, dtype), mesh)
        # The reduce-scatter encodes the whole vector, the all-gather a rank's share; the parts of others are decoded.
        others = values * (plan.tp - 1) / plan.tp
        return transfer + self.rates.codec(Work(codec, dtype, encoded=values + values / plan.tp, decoded=2 * others))

    def experts(self, part: ModelPart) -> float:
        """Seconds of sending tokens to their experts, and what these make of them back."""
        values = exchanged_values(part, self.plan, self.seq, self.model.hidden)
        if not values:
            return 0.0
        return EXCHANGES * self._sent(used_codec(self.plan, "ep"), self.plan.ep, values, Kind.REDUCE_SCATTER)

    def context(self, part: ModelPart) -> float:
        """Seconds of gathering keys and values, or of reducing their gradients."""
        plan = self.plan
        if plan.cp == 1 or not part.attention_width:
            return 0.0
        values = plan.micro_batch * self.seq / plan.cp * self.model.kv_hidden * (plan.cp - 1)
        return GATHERED * self._sent(used_codec(plan, "cp"), plan.cp, values, Kind.ALL_GATHER)

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

    # -- pipelines ---------------------------------------------------------------------------------------------------

    def idle(self, forward: float, backward: float) -> float:
        """Seconds per step that a pipeline stage idles while the pipeline fills and drains.

        This is the time of ``pp - 1`` micro-batches under 1F1B. Under the interleaved schedule, each of them passes
        through only one of a rank's chunks (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
        """
        plan = self.plan
        if plan.pp == 1:
            return 0.0
        again = forward if plan.recompute else 0.0
        chunks = STAGES_OF_A_RANK[plan.pipeline_schedule]
        return (plan.pp - 1) * ((forward + backward + again) / chunks + 2 * self.message)

    @property
    def awaited(self) -> float:
        """Seconds per step that a stage waits for messages while the pipeline is full.

        Torch's schedules wait for every message, in both directions and for each chunk.
        """
        plan = self.plan
        return 2 * STAGES_OF_A_RANK[plan.pipeline_schedule] * plan.micro_batches * self.message if plan.pp > 1 else 0.0

    @cached_property
    def message(self) -> float:
        """Seconds to send a micro-batch's activations, or their gradients, to the next stage."""
        plan, codec, dtype = self.plan, used_codec(self.plan, "pp"), self.plan.compute_dtype
        values = plan.micro_batch * self.seq * self.model.hidden
        part = values / (self.sharers or (plan.tp if plan.sequence_parallel else 1))
        pair = Factor(nodes=2) if self.crosses else Factor(local=2)
        # The nodes of a stage are adjacent, so the distance to the next stage is a stage's number of nodes.
        seconds = self.calls.seconds(Kind.BROADCAST, part * wire_bytes_per_value(codec, dtype), pair, plan.mesh.nodes)
        if not codec.is_none:
            seconds += self.rates.codec(Work(codec, dtype, encoded=part, decoded=part))
        if self.sharers is None:
            return seconds
        return seconds + self.calls.seconds(Kind.ALL_GATHER, values * ITEMSIZE[dtype], Factor(local=self.sharers))


def exchanged_values(part: ModelPart, plan: Plan, seq: int, hidden: int) -> float:
    """Values that a rank sends to others in one exchange of a part's experts, if tokens choose all equally often."""
    if part.routed is None or plan.ep == 1:
        return 0.0
    rows = plan.micro_batch * seq / plan.cp * part.routed.active
    return rows * hidden * (plan.ep - 1) / plan.ep


def pass_seconds(plan: Plan, workload: Workload, rates: Rates) -> tuple[float, float]:
    """Seconds of a forward and of a backward through all parts of a workload, exchanges included."""
    each = dict(zip((part.work for part in workload.parts), workload.exchanges, strict=False))
    passes = [
        (count, *part_seconds(rates, part, plan, workload.seq, each.get(part.work, 0.0)))
        for count, part in alike(workload.parts)
    ]
    return sum(count * forward for count, forward, _ in passes), sum(count * backward for count, _, backward in passes)
