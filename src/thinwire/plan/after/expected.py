"""What a plan is expected to do, figure by figure, with the names under which a run measures the same."""

from __future__ import annotations

import itertools
from typing import Final, Literal

from thinwire.plan.priced import PricedPlan, provenance
from thinwire.plan.training_job import TrainingJob
from thinwire.program import AnyLane, Axis, HostLane, Lane, Scope, axis_index
from thinwire.sim.step import lane_operations, lane_work
from thinwire.spec import Plan
from thinwire.spec.expectation import Expectation, Figure
from thinwire.spec.models.model import block_parameters

STEP: Final = "step"
COMPUTATION: Final = "computation"
"""Own work of a rank: what a step takes beside waiting."""
MEMORY: Final = "memory of a rank"
WAITING, TRANSFERS, CODECS = "waiting for ", "transfers of ", "codecs of "
"""What the names of a lane's figures begin with."""

_MOST_PASSES: Final = 256
"""Most micro-batches, over all unlike ranks, whose bytes are counted: some seconds of a large model's."""


def expectation(job: TrainingJob, priced: PricedPlan) -> Expectation:
    """The figures of a plan that was priced."""
    return Expectation(
        plan=priced.plan.fingerprint(),
        model=job.model.name or "unnamed",
        block_parameters=block_parameters(job.model, job.model.experts or 0),
        seq=job.seq,
        tokens_per_step=job.tokens_per_step,
        rests_on=provenance(job, priced).step,
        figures=(*times(job, priced), *_bytes(job, priced), _figure(MEMORY, "B", priced.memory.total)),
    )


def times(job: TrainingJob, priced: PricedPlan) -> list[Figure]:
    """The figures in seconds."""
    lanes: tuple[AnyLane, ...] = (*Lane,) if priced.plan.residence.on_device else (*Lane, *HostLane)
    waiting = {str(lane): priced.simulated.exposed[lane] for lane in lanes}
    # While the pipeline fills and drains, a stage waits for messages too: a run cannot tell the two apart.
    waiting |= {"tp": priced.axes.sums, "pp": priced.axes.messages + priced.axes.idle, "ep": priced.axes.experts}
    own = max(0.0, priced.seconds - sum(waiting.values()))
    figures = [_figure(STEP, "s", priced.seconds), _figure(COMPUTATION, "s", own)]
    figures += [_figure(f"{WAITING}{kind}", "s", seconds) for kind, seconds in waiting.items()]
    return figures + [_figure(name, "s", seconds) for name, seconds in lane_seconds(job, priced.plan).items()]


def lane_seconds(job: TrainingJob, plan: Plan) -> dict[str, float]:
    """Seconds of transfers and of codecs of every lane in a step, without slowdown, by the names of their figures."""
    seconds: dict[str, float] = {}
    for lane, (moving, coding) in lane_work(plan, job.workload(plan), job.rates).items():
        seconds |= {f"{TRANSFERS}{lane}": moving, f"{CODECS}{lane}": coding}
    return seconds


def _bytes(job: TrainingJob, priced: PricedPlan) -> list[Figure]:
    """Bytes of a rank, in the mean over ranks; none if there are too many unlike ranks to count."""
    plan, sent = priced.plan, dict.fromkeys(itertools.product(Lane, Scope), 0.0)
    # Shares of unequal sizes make ranks unlike: one holder of each share counts.
    holders = range(plan.world) if plan.partition == "inter" else range(1)
    positions = [position for position in holders if axis_index(plan, Axis.REPLICA, position) == 0]
    if len(positions) > 1 and len(positions) * plan.micro_batches > _MOST_PASSES:
        return []
    for position in positions:
        units = job.units(plan, axis_index(plan, Axis.PARAMS, position))
        for lane, operation, often in lane_operations(plan, units, clip=job.clip, position=position):
            for hop in operation.hops:
                sent[lane, hop.scope] += often * hop.sent / len(positions)
    return [_figure(f"{lane} {scope}", "B", amount) for (lane, scope), amount in sent.items()]


def _figure(name: str, unit: Literal["s", "B"], amount: float) -> Figure:
    return Figure(name=name, unit=unit, amount=float(amount))
