"""Exhaustive search: bound the step of every valid plan, then simulate the most promising ones.

The search simulates plans in the order of their :mod:`bounds <thinwire.plan.space.bounds>`. It ends when the best
simulated time is within the resolution of the next bound, or after a number of simulations; its result says by how much
any plan of the whole space can be faster than the first. If the job allows tensor and pipeline parallelism, the search
goes through the cuts of the model one by one. It drops a batch early if its computation and idle time alone exceed the
step of the best plan so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.cost import Memory, NominalRates
from thinwire.plan.experts import expert_candidates
from thinwire.plan.priced import Candidate, Simulations
from thinwire.plan.refine import Refinement
from thinwire.plan.rules import UNCUT, Cut, knobs
from thinwire.plan.space.drafts import DraftGroup, Drafts, PlanDraft
from thinwire.plan.space.promising import Promising
from thinwire.plan.space.state_bytes import fits
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import ClusterSpec, Plan

__all__ = ["CLASSICS", "RESOLUTION", "Search", "Searched", "elsewhere", "search"]

CLASSICS = ("zero1", "zero2", "zero3", "mics", "zeropp")
"""Presets that every table shows for comparison."""

RESOLUTION = 0.01
"""The search ends when no plan that was not simulated can be better than the best by more than this share."""

MOST_BLOCKS = 1200
"""Blocks to simulate at most, over all plans: about a third of a second. If the search stops here, the gap of its
result is wider."""


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        candidates: Simulated plans that fit into memory, best first. Among plans that tie, the one with the fewest
            knobs comes first.
        classics: The classic systems, each with its best micro-batch and recomputation. Some may not fit. Empty if the
            batch is too small for that many data-parallel ranks.
        cuts: Number of combinations of tensor and pipeline parallelism; 1 for plain data parallelism.
        considered: Number of valid plans.
        fitting: Number of these that fit into memory. Plans whose computation alone takes too long are not counted.
        simulated: Number of plans that were simulated.
        gap: Share of the first plan's step by which another choice of factors, codecs and batch can be faster, at most.
        complete: Whether the search came to its end; if not, it stopped at its number of simulations.
        simulations: What was simulated; what-ifs begin with it.
    """

    candidates: tuple[Candidate, ...]
    classics: tuple[Candidate, ...]
    cuts: int
    considered: int
    fitting: int
    simulated: int
    gap: float
    complete: bool
    simulations: Simulations = field(default_factory=Simulations, repr=False, compare=False)


def search(job: TrainingJob, *, top: int = 10, simulations: Simulations | None = None) -> Searched:
    """Find the best plans for a job.

    Args:
        job: Model, cluster, batch and the choices that are allowed.
        top: Number of plans to simulate at least, if that many fit.
        simulations: What is known of earlier searches for the same model; this search adds to it.
    """
    searching = Search(job, simulations)
    return replace(searching.run(top), classics=tuple(searching.classics()))


def elsewhere(job: TrainingJob, cluster: ClusterSpec, **changes: Any) -> TrainingJob:
    """The job on another cluster, with further changes. Published rates follow the cluster; a profile is kept."""
    rates = job.rates.on(cluster) if isinstance(job.rates, NominalRates) else job.rates
    return replace(job, cluster=cluster, rates=rates, **changes)


class Search:
    """A search in steps: bounds, memory, simulation.

    Args:
        job: Model, cluster, batch and the choices that are allowed.
        simulations: What is known of earlier searches for the same model.
    """

    def __init__(self, job: TrainingJob, simulations: Simulations | None = None) -> None:
        self.job = job
        self.simulations = simulations or Simulations()
        self._pricer = self.simulations.pricer(job)
        self._cuts = {cut: Drafts(job, cut, self._pricer) for cut in job.cuts}

    def _candidate(self, plan: Plan, label: str | None = None) -> Candidate:
        return self.simulations.candidate(self.job, plan, label)

    def run(self, top: int) -> Searched:
        """Bound all plans, and simulate the best; classic systems are left out."""
        promising, simulated = self._promising()
        best = min((priced.seconds for priced in simulated.values() if priced.fits), default=math.inf)
        most, least = max(top, 16 + MOST_BLOCKS // self.job.model.layers), math.inf
        for draft in promising.in_order():
            if draft in simulated:
                continue
            done = len(simulated) >= top and draft.bound * (1 + RESOLUTION) > best
            if done or len(simulated) >= most:
                least = draft.bound
                break
            if self._fits(draft):
                simulated[draft] = self._candidate(self.plan(draft))
                best = min(best, simulated[draft].seconds)
        # The plans with the fewest knobs among those that may tie with the best.
        # Memory is checked last: thousands of plans may tie, and computing the memory of a plan is the slowest step.
        tying = (draft for draft in promising.plainest(best * (1 + self.job.tie)) if draft not in simulated)
        for draft in list(itertools.islice(filter(self._fits, tying), top)):
            simulated[draft] = self._candidate(self.plan(draft))
        ranked = _ranked(
            [*simulated.values(), *_sharing_experts(self.job, self._cuts.get(UNCUT), self.simulations)], self.job.tie
        )
        if ranked:
            ranked[0] = Refinement(self.job, self.simulations).of(ranked[0])
        return Searched(
            tuple(ranked),
            (),
            cuts=len(self._cuts),
            considered=sum(part.considered for part in self._cuts.values()),
            fitting=sum(part.fitting for part in self._cuts.values()),
            simulated=len(simulated),
            complete=least == math.inf or least * (1 + RESOLUTION) > best,
            gap=max(0.0, 1 - min(least, best) / ranked[0].seconds) if ranked else 0.0,
            simulations=self.simulations,
        )

    def _promising(self) -> tuple[Promising, dict[PlanDraft, Candidate]]:
        """All drafts, and the simulated best of every cut but the last.

        That best time is a limit for the following cuts: drafts that take longer are not generated. Pipelines come
        first, which have the fewest plans, then the cuts that compute least, so that the limit is low early.
        """
        groups: dict[Cut, list[DraftGroup]] = {cut: [] for cut in self._cuts}
        simulated: dict[PlanDraft, Candidate] = {}
        best = math.inf
        # The order of the cuts alone would take longer. Plans that share experts may still fit, and count these.
        if self.job.model.experts is None and not self._may_fit():
            return Promising([]), simulated
        order = sorted(self._cuts, key=lambda cut: (cut.pp == 1, self._cuts[cut].least))
        for cut in order:
            groups[cut] = list(self._cuts[cut].groups(best * (1 + self.job.tie)))
            if cut == order[-1]:
                break
            drafts = itertools.islice(Promising(groups[cut]).in_order(), _TRIED)
            first = next((draft for draft in drafts if self._fits(draft)), None)
            if first is not None and first.bound < best:
                simulated[first] = self._candidate(self.plan(first))
                best = min(best, simulated[first].seconds)
        return Promising([group for of_cut in groups.values() for group in of_cut]), simulated

    def _fits(self, draft: PlanDraft) -> bool:
        """Whether a draft fits into memory, including the messages of its codecs."""
        return self.simulations.memory(self.job, self.plan(draft)).total <= self.job.cluster.memory

    def drafts(self) -> Iterator[PlanDraft]:
        """Every valid plan that fits into memory without codecs, with its estimate."""
        for part in self._cuts.values():
            yield from part.drafts()

    def plan(self, draft: PlanDraft) -> Plan:
        """The full plan of a draft."""
        return self._cuts[draft.cut].plan(draft)

    def classics(self) -> Iterator[Candidate]:
        """Every classic system with its best micro-batch and recomputation; all ranks are data-parallel."""
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
        """A plan with the batch that makes it fastest, or with the smallest batch if none fits."""
        states = drafts.states.of((plan.params, plan.grads, plan.optimizer), plan.secondary)
        fitting = [batch for batch in drafts.batches if fits(states, batch, self.job.cluster.memory)]
        tried = sorted(fitting, key=lambda batch: batch.computing)[:2] if fitting else []
        if not tried:
            tried = [min(drafts.batches, key=lambda batch: max(batch.working))]
        best: Candidate | None = None
        for batch in tried:
            if best is not None and batch.computing + batch.standing > best.seconds:
                break
            count, again = batch.micro_batches, batch.recompute
            batched = plan.with_(micro_batch=batch.micro_batch, micro_batches=count, recompute=again)
            priced = self._candidate(batched, label)
            best = priced if best is None or priced.seconds < best.seconds else best
        assert best is not None, "there is a batch"
        return best

    def smallest(self) -> tuple[Plan, Memory]:
        """The plan that needs the least memory, and that memory.

        Among several, it is the one with the fewest tensor-parallel ranks and stages, then the one with the least
        sharding.
        """
        _, draft = min((drafts.smallest() for drafts in self._cuts.values()), key=lambda found: found[0])
        plan = self.plan(draft)
        return plan, self.simulations.memory(self.job, plan)

    def _may_fit(self) -> bool:
        """Whether any plan fits, without the messages of codecs."""
        cuts = reversed(self._cuts.values())  # from the one with the most tensor-parallel ranks and stages
        return any(drafts.smallest()[0] <= self.job.cluster.memory for drafts in cuts)


def _sharing_experts(job: TrainingJob, drafts: Drafts | None, simulations: Simulations) -> list[Candidate]:
    """Plans whose ranks share experts, if the model has any; ``drafts`` are those without tensor and pipeline
    parallelism, if they are allowed."""
    if drafts is None or job.model.experts is None:
        return []
    return expert_candidates(job, simulations, drafts.bucket_bytes)


_TRIED = 8
"""Drafts of a cut to check at most for one that fits with its codecs' messages, before the search goes on."""


def _ranked(candidates: list[Candidate], tie: float) -> list[Candidate]:
    """Fitting candidates, fastest first; among those that tie with the fastest, the one with the fewest knobs leads."""
    by_time = sorted((c for c in candidates if c.fits), key=lambda c: (c.seconds, knobs(c.plan)))
    if not by_time:
        return []
    tied = [c for c in by_time if c.seconds <= by_time[0].seconds * (1 + tie)]
    first = min(tied, key=lambda c: (knobs(c.plan), c.seconds))
    return [first, *(c for c in by_time if c is not first)]
