"""Exhaustive search: every valid plan is estimated, the best are simulated until none that is left can win.

An estimate is what a plan's busiest resource has to do, so no step is shorter. Plans are simulated in the order of
their estimates, and the search ends when the best simulated time is within the model's resolution of the next estimate:
no plan of the whole space is better by more than that. Where tensor and pipeline parallelism may be chosen, cuts of the
model are gone through one by one, and batches that compute and stand still for longer than the best plan so far takes
need no other estimate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from thinwire.cost import Memory, NominalRates, Pricer
from thinwire.cost.memory import largest_memory
from thinwire.plan.candidates import AxisSeconds, Candidate
from thinwire.plan.drafts import Drafts, PlanDraft, axis_rates, fits, stage_message
from thinwire.plan.rules import UNCUT, knobs
from thinwire.plan.training_job import TrainingJob
from thinwire.sim import simulate
from thinwire.sim.axes import TensorParallelRates, idle_seconds, message_seconds
from thinwire.spec import ClusterSpec, Plan

__all__ = ["CLASSICS", "RESOLUTION", "Search", "Searched", "candidate", "elsewhere", "search"]

CLASSICS = ("zero1", "zero2", "zero3", "mics", "zeropp")
"""Presets that every table shows, so that one sees what is gained."""

RESOLUTION = 0.01
"""The search is complete when no plan that was not simulated can be better by more."""

MOST_BLOCKS = 1200
"""Blocks that are simulated at most, over all plans: about a third of a second. Beyond that the answer says that others
might still win."""


@dataclass(frozen=True)
class Searched:
    """What a search found.

    Attributes:
        candidates: simulated plans that fit, best first; ties within the job's own go to fewer knobs.
        classics: the classic systems, each with its best micro-batch and recomputation; some may not fit. None where
            the batch has no work for so many data-parallel ranks.
        cuts: combinations of tensor and pipeline parallelism; 1 is plain data parallelism.
        considered: plans that were estimated.
        fitting: of these, how many fit into memory; those that compute for too long by themselves are not asked.
        simulated: how many were simulated.
        complete: whether no plan that was not simulated can be better.
    """

    candidates: tuple[Candidate, ...]
    classics: tuple[Candidate, ...]
    cuts: int
    considered: int
    fitting: int
    simulated: int
    complete: bool


def search(job: TrainingJob, *, top: int = 10) -> Searched:
    """The best plans for a job.

    Args:
        job: model, cluster, batch and what is allowed.
        top: how many to simulate at least, where so many fit.
    """
    return Search(job).run(top)


def candidate(job: TrainingJob, plan: Plan, label: str | None = None) -> Candidate:
    """A plan as it stands, priced.

    Args:
        job: what it is for.
        plan: with its micro-batch, micro-batches and recomputation.
        label: what to call it.
    """
    workload, rates = job.workload(plan), axis_rates(job, plan)
    simulated = simulate(plan, workload, rates, micro_batches=plan.micro_batches)
    axes = AxisSeconds()
    if isinstance(rates, TensorParallelRates):
        passes = 3 if plan.recompute else 2
        sums = sum(rates.summing(part, plan, job.seq) for part in workload.parts)
        axes = replace(axes, sums=plan.micro_batches * passes * sums)
    if plan.pp > 1:
        message = stage_message(job, plan)
        idle = idle_seconds(plan, workload, rates, message)
        axes = replace(axes, idle=idle, messages=message_seconds(plan, message))
        simulated = replace(simulated, seconds=simulated.seconds + axes.idle + axes.messages)
    needed = _memory(job, plan)
    return Candidate(plan, simulated, needed, needed.total <= job.cluster.memory, label, axes)


def elsewhere(job: TrainingJob, cluster: ClusterSpec, **changes: Any) -> TrainingJob:
    """A job on another cluster, with other changes: published figures become that cluster's, a profile stays."""
    nominal = isinstance(job.rates, NominalRates)
    rates = NominalRates(cluster, job.compute_dtype) if nominal else job.rates
    return replace(job, cluster=cluster, rates=rates, **changes)


def _memory(job: TrainingJob, plan: Plan) -> Memory:
    return largest_memory(job.model, plan, seq=job.seq, overhead=job.overhead, touched_only=job.on_host)


class Search:
    """The search, in parts: estimates, memory, simulation.

    Args:
        job: model, cluster, batch and what is allowed.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self._pricer = Pricer(job.rates, job.compute_dtype, job.compute_dtype)
        self._cuts = {cut: Drafts(job, cut, self._pricer) for cut in job.cuts}

    def run(self, top: int) -> Searched:
        """Estimate all, simulate the best."""
        drafts, simulated = self._promising()
        best = min((found.seconds for found in simulated.values() if found.fits), default=math.inf)
        complete, most = True, max(top, 16 + MOST_BLOCKS // self.job.model.layers)
        for draft in drafts:
            if len(simulated) >= top and draft.bound * (1 + RESOLUTION) > best:
                break
            if draft in simulated:
                continue
            if len(simulated) >= most:
                complete = False
                break
            if self._fits(draft):
                simulated[draft] = candidate(self.job, self.plan(draft))
                best = min(best, simulated[draft].seconds)
        # The plainest plans that may tie with the best.
        tying = (draft for draft in drafts if draft.bound <= best * (1 + self.job.tie) and draft not in simulated)
        # Whether one fits is asked last: thousands may tie, and what a plan needs takes longest to find out.
        plainest = filter(self._fits, sorted(tying, key=lambda draft: (draft.knobs, draft.bound)))
        for draft in list(itertools.islice(plainest, top)):
            simulated[draft] = candidate(self.job, self.plan(draft))
        return Searched(
            tuple(_ranked(list(simulated.values()), self.job.tie)),
            tuple(self.classics()),
            cuts=len(self._cuts),
            considered=self.considered,
            fitting=sum(part.fitting for part in self._cuts.values()),
            simulated=len(simulated),
            complete=complete,
        )

    def _promising(self) -> tuple[list[PlanDraft], dict[PlanDraft, Candidate]]:
        """Drafts by their estimates, and of every cut but the last the best, simulated: what takes longer than it in
        the cuts that follow need not be written down."""
        found: list[PlanDraft] = []
        simulated: dict[PlanDraft, Candidate] = {}
        best = math.inf
        for number, cut in enumerate(self._cuts.values(), start=1):
            drafts = sorted(cut.drafts(best * (1 + self.job.tie)), key=lambda draft: (draft.bound, draft.knobs))
            found += drafts
            first = next((draft for draft in drafts[:_TRIED] if self._fits(draft)), None)
            if number < len(self._cuts) and first is not None and first.bound < best:
                simulated[first] = candidate(self.job, self.plan(first))
                best = min(best, simulated[first].seconds)
        return sorted(found, key=lambda draft: (draft.bound, draft.knobs)), simulated

    def _fits(self, draft: PlanDraft) -> bool:
        """Whether a draft fits into memory with the messages of its codecs."""
        return self._needed(self.plan(draft)) <= self.job.cluster.memory

    def _needed(self, plan: Plan) -> int:
        return _memory(self.job, plan).total

    @property
    def considered(self) -> int:
        """Plans that were estimated so far."""
        return sum(part.considered for part in self._cuts.values())

    def drafts(self) -> Iterator[PlanDraft]:
        """Every valid plan that fits into memory without codecs, with its estimate."""
        for part in self._cuts.values():
            yield from part.drafts()

    def plan(self, draft: PlanDraft) -> Plan:
        """The plan of a draft, written out."""
        return self._cuts[draft.cut].plan(draft)

    def classics(self) -> Iterator[Candidate]:
        """Every classic system, all ranks data-parallel, with the micro-batch and recomputation that suit it best."""
        if not self.job.allows(UNCUT):
            return
        drafts = self._cuts.get(UNCUT) or Drafts(self.job, UNCUT, self._pricer)
        for name in CLASSICS:
            preset = Plan.preset(
                name,
                nodes=drafts.mesh.nodes,
                local=drafts.mesh.local,
                compute_dtype=self.job.compute_dtype,
                bucket_bytes=drafts.bucket_bytes,
            )
            yield self._best_batch(drafts, preset, name)

    def _best_batch(self, drafts: Drafts, plan: Plan, label: str) -> Candidate:
        """A plan with the micro-batch and recomputation that make it fastest, or smallest if nothing fits."""
        states = drafts.states((plan.params, plan.grads, plan.optimizer), plan.secondary)
        fitting = [batch for batch in drafts.batches if fits(states, batch, self.job.cluster.memory)]
        tried = sorted(fitting, key=lambda batch: batch.computing)[:2] if fitting else []
        if not tried:
            tried = [min(drafts.batches, key=lambda batch: max(batch.working))]
        found = [
            candidate(
                self.job,
                plan.with_(micro_batch=batch.micro_batch, micro_batches=batch.micro_batches, recompute=batch.recompute),
                label,
            )
            for batch in tried
        ]
        return min(found, key=lambda c: c.seconds)

    def smallest(self) -> Candidate:
        """The plan that needs least memory; where several do, the one with fewest ranks that hold the model together,
        and of these the one with least sharding."""
        plans = [drafts.plan(drafts.smallest()) for drafts in self._cuts.values()]
        return candidate(self.job, min(plans, key=self._needed))


_TRIED = 8
"""Drafts of a cut that are tried for one that fits with its codecs' messages, before the next cut's turn."""


def _ranked(found: list[Candidate], tie: float) -> list[Candidate]:
    """Best first; the first place goes to the plan with the fewest knobs among those that tie with the best."""
    by_time = sorted((c for c in found if c.fits), key=lambda c: (c.seconds, knobs(c.plan)))
    if not by_time:
        return []
    tied = [c for c in by_time if c.seconds <= by_time[0].seconds * (1 + tie)]
    first = min(tied, key=lambda c: (knobs(c.plan), c.seconds))
    return [first, *(c for c in by_time if c is not first)]
