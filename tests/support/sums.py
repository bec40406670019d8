"""The sums that the planner takes in closed form, for tests that hold them to a simulation."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.cost import Pricer, ProcessGroups
from thinwire.cost.estimate import Busy
from thinwire.program import UnitInfo, default_trace
from thinwire.program.batches import buckets
from thinwire.spec import Plan


def closed_form(pricer: Pricer, plan: Plan, infos: Sequence[UnitInfo]) -> Busy:
    """Seconds of all transfers and codecs of a step of two micro-batches, but for the exchanges of control values."""
    trace, wire = default_trace(infos), plan.wire
    groups = ProcessGroups.of(plan)
    codecs, total = (wire.reduce_intra, wire.reduce_inter), Busy()
    for index, unit in enumerate(infos):
        numel = sum(buffer.numel for buffer in unit.buffers)
        total = total.plus(pricer.spread(groups, numel, wire.spread))
        total = total.plus(pricer.scattered(groups, numel, *codecs), 2)
        total = total.plus(pricer.gathered(groups, numel, wire.gather), 2)
        if index not in trace.tail:
            total = total.plus(pricer.gathered_again(groups, numel, wire.gather), 2)
    for bucket in buckets(plan, infos, trace.reduction_order):
        numel = sum(infos[unit].buffers[0].numel // plan.params.ranks for unit in bucket)
        total = total.plus(pricer.sharded(groups, numel, *codecs), 2 if groups.every_micro_batch else 1)
        total = total.plus(pricer.synced(groups, numel, *codecs))
    return total
