"""Costs of expert and context parallelism: what neighbouring ranks exchange inside a block, while computation waits."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.cost import ModelPart, Rates, Work
from thinwire.cost.rates import wire_bytes_per_value
from thinwire.program import Kind, Scope
from thinwire.program.wire import ITEMSIZE
from thinwire.sim.axes import HopCalls, TensorParallelRates
from thinwire.spec import CodecSpec, ModelSpec, Plan

__all__ = ["NeighbourRates", "exchanged_values", "neighbour_rates"]

EXCHANGES = 2
"""Exchanges of the experts of a block in a forward, and as many in a backward: of tokens to their experts, and of what
these make of them."""

GATHERED = 2
"""What attention gathers in a forward, and reduces in a backward: keys and values."""


def neighbour_rates(rates: Rates, plan: Plan, model: ModelSpec) -> Rates:
    """The rates, of which those of computation include exchanges with neighbours, if the plan has any.

    Args:
        rates: Rates of a rank by itself.
        plan: The plan; ``ep`` and ``cp`` matter.
        model: Dimensions of the model.
    """
    if plan.ep == plan.cp == 1:
        return rates
    calls = HopCalls(rates)
    return NeighbourRates(rates, calls, 1, model.hidden, ITEMSIZE[plan.compute_dtype], model.kv_hidden)


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


@dataclass(frozen=True)
class NeighbourRates(TensorParallelRates):
    """Rates under expert and context parallelism; everything but computation is as without.

    Attributes:
        kv_hidden: Width of the keys, and of the values.
    """

    kv_hidden: int = 0

    def experts(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Seconds of the exchanges of tokens in one pass over a part."""
        values = exchanged_values(part, plan, seq, self.hidden)
        return EXCHANGES * self._seconds(plan, plan.wire.ep, plan.ep, values, Kind.REDUCE_SCATTER) if values else 0.0

    def context(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Seconds of gathering keys and values, or of reducing their gradients, in one pass over a part."""
        if plan.cp == 1 or not part.attention_width:
            return 0.0
        values = plan.micro_batch * seq / plan.cp * self.kv_hidden * (plan.cp - 1)
        return GATHERED * self._seconds(plan, plan.wire.cp, plan.cp, values, Kind.ALL_GATHER)

    def summing(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Seconds of all exchanges in one pass over a part."""
        return self.experts(part, plan, seq) + self.context(part, plan, seq)

    def forward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Seconds of the forward of this rank's tokens, including its exchanges."""
        return self.rates.forward(part, plan, seq) / plan.cp + self.summing(part, plan, seq)

    def backward(self, part: ModelPart, plan: Plan, seq: int) -> float:
        """Likewise."""
        return self.rates.backward(part, plan, seq) / plan.cp + self.summing(part, plan, seq)

    def _seconds(self, plan: Plan, codec: CodecSpec, ways: int, values: float, kind: Kind) -> float:
        """Seconds in which a rank sends ``values`` values to the others of a group of ``ways`` neighbours. Each of them
        gets equally many; those on other nodes over the network."""
        group = plan.mesh.group(ways)
        assert group is not None, "a rule of plans"
        sent = values * (self.itemsize if codec.is_none else wire_bytes_per_value(codec, plan.compute_dtype))
        inside = sent * (group.local - 1) / (ways - 1)
        seconds = 0.0
        for scope, ranks, share in ((Scope.INSIDE, group.local, inside), (Scope.ACROSS, group.nodes, sent - inside)):
            if ranks > 1:
                seconds += self.rates.hop(kind, scope, ranks, round(share), encoded=not codec.is_none)
        if codec.is_none:
            return seconds
        return seconds + self.rates.codec(Work(codec, plan.compute_dtype, encoded=values, decoded=values))
