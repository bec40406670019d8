"""What the best plan of a search gains by further knobs: chunks, input gradients, buckets, prefetching, retention.

Only the best plan is tried. These knobs shorten what computation does not hide, which rarely decides between two ways
of sharding. Each is tried where computation waits for what it shortens, and taken if the step is shorter by more than a
tie.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.cost import NominalRates
from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.training_job import TrainingJob
from thinwire.program import Lane
from thinwire.sim import Resource
from thinwire.spec import Plan

_CHUNKS = (2, 4, 8)
"""Numbers of chunks to try."""

_BUCKETS = (0.25, 4)
"""Sizes of buckets to try, over that of the plan."""

_SMALLEST_BUCKET = 1 << 20
"""Bytes of the smallest bucket to try."""

_MIB = 1 << 20

_SMALL_UNIT = 64 << 10
"""Bytes of units that stay whole where others stay as far as memory reaches."""

_MOST_OWNERS = 64
"""Most ranks to which whole tensors are dealt, on trial: the program lists what each of them owns."""

_FEEDBACK_BITS = 4
"""Gradients of this many bits or fewer have error feedback where it costs nothing."""


@dataclass(frozen=True)
class Refinement:
    """Tries further knobs.

    Attributes:
        job: The job that was searched for.
        simulations: What has been simulated for it.
    """

    job: TrainingJob
    simulations: Simulations

    def of(self, best: PricedPlan) -> PricedPlan:
        """The best plan with every knob that makes it faster by more than a tie, unless its links and its computation
        leave nothing to gain; and with error feedback where it is free."""
        if best.seconds > self._least(best) * (1 + self.job.tie):
            for refine in (self._in_chunks, self._under_input_gradients, self._in_buckets, self._further_ahead):
                best = refine(best)
        return self._fed_back(self._dealt_out(self._retaining(best)))

    def _least(self, best: PricedPlan) -> float:
        """A lower bound of the seconds of a step with the work of this one, whatever overlaps what.

        Computation takes longer beside transfers, or waits for them. At published rates, messages that are cut up take
        longer together than a whole one. Measured seconds need not grow that way, so that only computation counts.
        """
        busy = best.simulated.busy
        computing, bubble = busy[Resource.COMPUTE], best.axes.idle + best.axes.messages
        if not isinstance(self.job.rates, NominalRates):
            return computing + bubble
        computing += busy[Resource.CODEC]
        links = max(busy[Resource.INSIDE], busy[Resource.ACROSS], busy[Resource.SPINE])
        # Waiting for a transfer costs a second for each of its seconds; computing beside it costs at most that.
        beside = self.job.rates.slowing * min(computing, links)
        return max(computing + beside, links) + bubble

    def _waits(self, best: PricedPlan, *lanes: Lane) -> bool:
        """Whether computation waits for these lanes for longer than a tie."""
        return sum(best.simulated.exposed[lane] for lane in lanes) > self.job.tie * best.seconds

    def _price(self, plan: Plan) -> PricedPlan:
        return self.simulations.price(self.job, plan)

    def _faster(self, best: PricedPlan, plans: Iterable[Plan]) -> PricedPlan:
        """The fastest of the plans that fit, if it is faster than the best by more than a tie."""
        tried = (self._price(plan) for plan in plans)
        faster = [c for c in tried if c.fits and c.seconds * (1 + self.job.tie) < best.seconds]
        return min(faster, key=lambda c: c.seconds, default=best)

    def _in_chunks(self, best: PricedPlan) -> PricedPlan:
        """With reductions in chunks: they shorten a unit's reduction and the last bucket's at most."""
        return self._faster(best, [best.plan.with_(bucket_chunks=chunks) for chunks in _CHUNKS])

    def _under_input_gradients(self, best: PricedPlan) -> PricedPlan:
        """With reductions that start before the input gradient: those of the head alone, or of every linear layer,
        which are then units of their own."""
        if best.plan.tp > 1 or best.plan.ep > 1:
            return best
        first = {"overlap": {"input_gradient": True}}
        return self._faster(best, [best.plan.with_(**first, granularity=size) for size in ("block", "module")])

    def _in_buckets(self, best: PricedPlan) -> PricedPlan:
        """With smaller or larger buckets."""
        plan = best.plan
        if not self._waits(best, Lane.REDUCE, Lane.SYNC) or plan.optimizer == plan.params == plan.mesh:
            return best
        sizes = {max(_SMALLEST_BUCKET, int(plan.bucket_bytes * times)) for times in _BUCKETS}
        return self._faster(best, [plan.with_(bucket_bytes=size) for size in sorted(sizes - {plan.bucket_bytes})])

    def _further_ahead(self, best: PricedPlan) -> PricedPlan:
        """With gathers that start two units ahead."""
        if best.plan.params.ranks == 1 or not self._waits(best, Lane.GATHER):
            return best
        return self._faster(best, [best.plan.with_(prefetch=best.plan.prefetch + 1)])

    def _retaining(self, best: PricedPlan) -> PricedPlan:
        """With units that travel together, or that stay gathered as far as memory reaches: both spare gathers, whose
        bytes the choice between ways of sharding has counted."""
        plan = best.plan
        if plan.params.ranks == 1 or not self._waits(best, Lane.GATHER, Lane.REDUCE):
            return best
        live = best.memory.gathered + self.job.room - best.memory.total
        live -= live % _MIB
        if live <= 0:
            return best
        together = {"gather_bytes": plan.bucket_bytes, "reduce_bytes": plan.bucket_bytes}
        stays = {"reuse_bytes": self.job.cluster.memory, "live_bytes": live}
        small = sum(unit.nbytes for unit in self.job.units(plan) if unit.nbytes <= _SMALL_UNIT)
        if small * 8 <= live:
            stays["persist_bytes"] = _SMALL_UNIT
        changes = (together, stays, {**together, **stays})
        return self._faster(best, [plan.with_(**change) for change in changes])

    def _dealt_out(self, best: PricedPlan) -> PricedPlan:
        """With whole tensors dealt to the ranks that share the optimizer states."""
        plan = best.plan
        owners = plan.optimizer.ranks // plan.params.ranks
        if plan.ep > 1 or not 1 < owners <= _MOST_OWNERS or not self._waits(best, Lane.SPREAD, Lane.REDUCE):
            return best
        return self._faster(best, [plan.with_(partition="inter")])

    def _fed_back(self, best: PricedPlan) -> PricedPlan:
        """With error feedback, if gradients have few bits, it fits, and the step ties with the one without."""
        wire = best.plan.wire
        codecs = [codec for codec in (wire.reduce_intra, wire.reduce_inter) if not codec.is_lossless]
        if not any(codec.bits is not None and codec.bits <= _FEEDBACK_BITS for codec in codecs):
            return best
        fed = self._price(best.plan.with_(wire={"error_feedback": True}))
        return fed if fed.fits and fed.seconds <= best.seconds * (1 + self.job.tie) else best
