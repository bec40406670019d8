"""Candidates: plans with their predicted steps and memory, each simulated once for a search and its what-ifs."""

from __future__ import annotations

from dataclasses import replace

from thinwire.cost import Memory, Pricer, Rates, views_of
from thinwire.cost.memory import largest_memory
from thinwire.plan.batches import stage_message
from thinwire.plan.candidates import AxisSeconds, Candidate
from thinwire.plan.training_job import TrainingJob
from thinwire.sim.axes import idle_seconds, message_seconds
from thinwire.sim.step import PLAYED, Played, play, with_exchanges
from thinwire.spec import ModelSpec, Plan

__all__ = ["Simulations", "candidate"]


class Simulations:
    """Steps and memory that were predicted.

    Steps do not depend on the memory of a cluster, and those of more than three micro-batches follow from three.
    What-ifs with another memory or batch therefore find most of their steps here.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[Plan, Rates, ModelSpec, int, bool], Played] = {}
        self._memory: dict[tuple[Plan, ModelSpec, int, int, int], Memory] = {}
        self._pricers: dict[tuple[Rates, str], Pricer] = {}

    def candidate(self, job: TrainingJob, plan: Plan, label: str | None = None) -> Candidate:
        """Predict the step time and the memory of one plan; arguments as of :func:`candidate`.

        Of unlike nodes, the slowest decide.
        """
        views = (replace(job, rates=rates) for rates in views_of(job.rates))
        return max((self._candidate(view, plan, label) for view in views), key=lambda seen: seen.seconds)

    def _candidate(self, job: TrainingJob, plan: Plan, label: str | None) -> Candidate:
        workload, rates = job.workload(plan), job.rates
        simulated = self._played(job, plan).step(plan.micro_batches)
        if plan.num_islands > 1:
            simulated = with_exchanges(plan, workload.units, rates, simulated)
        axes = AxisSeconds()
        if workload.exchanges:
            costs, passes = job.axes(plan), plan.micro_batches * (3 if plan.recompute else 2)
            sums, experts, context = (
                passes * sum(map(of_part, workload.parts)) for of_part in (costs.sums, costs.experts, costs.context)
            )
            axes = AxisSeconds(sums=sums, experts=experts, context=context)
        if plan.pp > 1:
            message = stage_message(job, plan)
            idle = idle_seconds(plan, workload, rates, message)
            axes = replace(axes, idle=idle, messages=message_seconds(plan, message))
            simulated = replace(simulated, seconds=simulated.seconds + axes.idle + axes.messages)
        needed = self.memory(job, plan)
        return Candidate(plan, simulated, needed, needed.total <= job.cluster.memory, label, axes)

    def _played(self, job: TrainingJob, plan: Plan) -> Played:
        count = min(plan.micro_batches, PLAYED + 1)
        key = plan.model_copy(update={"micro_batches": count}), job.rates, job.model, job.seq, job.clip
        if key not in self._steps:
            self._steps[key] = play(plan, job.workload(plan), job.rates, micro_batches=plan.micro_batches)
        return self._steps[key]

    def memory(self, job: TrainingJob, plan: Plan) -> Memory:
        """Bytes on the rank that needs the most memory."""
        key = plan, job.model, job.seq, job.overhead, job.loss_chunk
        if key not in self._memory:
            self._memory[key] = largest_memory(
                job.model, plan, seq=job.seq, overhead=job.overhead, loss_chunk=job.loss_chunk
            )
        return self._memory[key]

    def pricer(self, job: TrainingJob) -> Pricer:
        """Prices of collectives at the job's rates."""
        key = job.rates, job.compute_dtype
        if key not in self._pricers:
            self._pricers[key] = Pricer(job.rates, job.compute_dtype, job.compute_dtype)
        return self._pricers[key]


def candidate(job: TrainingJob, plan: Plan, label: str | None = None) -> Candidate:
    """Predict the step time and the memory of one plan.

    Args:
        job: The job that the plan is for.
        plan: The plan, including micro-batch, micro-batches and recomputation.
        label: Name of the plan in tables.
    """
    return Simulations().candidate(job, plan, label)
