"""The sums that the planner takes in closed form, for tests that hold them to a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.cost import Pricer, Traffic, UnitKind
from thinwire.cost.estimate import Busy
from thinwire.program import UnitInfo, default_trace
from thinwire.program.batches import buckets
from thinwire.spec import Plan


def closed_form(pricer: Pricer, plan: Plan, infos: Sequence[UnitInfo]) -> Busy:
    """Seconds of all transfers and codecs of a step of two micro-batches, but for the exchanges of control values."""
    trace, wire = default_trace(infos), plan.wire
    kinds = [UnitKind(1, sum(b.numel for b in unit.buffers), index in trace.tail) for index, unit in enumerate(infos)]
    traffic = Traffic.of(plan.mesh, plan.params, plan.grads, plan.optimizer, plan.secondary)
    codecs = wire.reduce_intra, wire.reduce_inter
    total = pricer.spread(traffic, kinds, wire.spread).plus(pricer.scattered(traffic, kinds, *codecs), 2)
    for gathers in pricer.gathers(traffic, kinds, wire.gather):
        total = total.plus(gathers, 2)
    for bucket in buckets(plan, infos, trace.reduction_order):
        numel = sum(infos[unit].buffers[0].numel // plan.params.ranks for unit in bucket)
        total = total.plus(pricer.sharded(traffic, numel, *codecs), 2 if traffic.every_micro_batch else 1)
        total = total.plus(pricer.synced(traffic, numel, *codecs))
    return total
