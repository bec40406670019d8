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

from thinwire.cost import Memory
from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.refine import Refinement
from thinwire.plan.rules import UNCUT, complexity
from thinwire.plan.space.candidates import FACTORS, ByBound, Candidate, CandidateGroup, Candidates
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import ClusterSpec, Plan
from thinwire.spec.cut import Cut
from thinwire.spec.plan_parts.residence import Residence

CLASSICS = ("zero1", "zero2", "zero3", "mics", "zeropp")
"""Presets that every table shows for comparison."""

SHARDED = ("zero1", "zero2", "zero3", "hsdp")
"""Presets of which plans that share experts are made."""

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

    candidates: tuple[PricedPlan, ...]
    classics: tuple[PricedPlan, ...]
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
    simulations = simulations or Simulations()
    return replace(best_plans(job, top, simulations), classics=tuple(Search(job, simulations).classics()))


RESIDENCES = (
    Residence(),
    Residence(optimizer="host-stream"),
    Residence(optimizer="host-stream", gradients="host"),
    Residence(optimizer="host-stream", gradients="host", params="host"),
)
"""Choices of what lives on the host, the least first: its copies take the least time."""


def best_plans(job: TrainingJob, top: int, simulations: Simulations) -> Searched:
    """What :func:`search` finds without the classic systems: the best plans under any of the job's residences."""
    parts = [Search(one, simulations).run(top) for one in _by_residence(job)]
    if len(parts) == 1:
        return parts[0]
    ranked = _ranked([priced for part in parts for priced in part.candidates], job.tie)
    first = next((part for part in parts if ranked and ranked[0] in part.candidates), parts[0])
    return replace(
        first,
        candidates=tuple(ranked),
        considered=sum(part.considered for part in parts),
        fitting=sum(part.fitting for part in parts),
        simulated=sum(part.simulated for part in parts),
        gap=max(part.gap for part in parts),
        complete=all(part.complete for part in parts),
    )


def smallest(job: TrainingJob) -> tuple[Plan, Memory]:
    """The plan that needs the least memory of a device under any of the job's residences, and that memory; see
    :meth:`Search.smallest`."""
    return min((Search(one).smallest() for one in _by_residence(job)), key=lambda found: found[1].total)


def _by_residence(job: TrainingJob) -> Iterator[TrainingJob]:
    """The job with each of its residences alone."""
    if len(job.residences) == 1:
        yield job
        return
    for residence in job.residences:
        one = replace(job, residences=(residence,))
        if residence.streams_params:  # a stage of a pipeline would bring them up for every micro-batch
            if job.pp is not None and 1 not in job.pp:
                continue
            one = replace(one, pp=(1,))
        yield one


def search_wider(job: TrainingJob, *, top: int = 10) -> tuple[TrainingJob, Searched]:
    """Find the best plans for a job without tensor and pipeline parallelism, or with them if nothing fits otherwise.

    Returns the job that was searched for last, and what was found; ``top`` as in :func:`search`.
    """
    searched = search(job, top=top)
    if searched.candidates or (job.tp, job.pp) != ((1,), (1,)):
        return job, searched
    wider = replace(job, tp=None, pp=None)
    return wider, search(wider, top=top, simulations=searched.simulations)


def elsewhere(job: TrainingJob, cluster: ClusterSpec, **changes: Any) -> TrainingJob:
    """The job on another cluster, with further changes. Published rates follow the cluster; a profile is kept."""
    return replace(job, cluster=cluster, rates=job.rates.on(cluster), **changes)


class Search:
    """A search in steps: bounds, memory, simulation; arguments as of :func:`search`. Of several residences of the job,
    it knows only the first."""

    def __init__(self, job: TrainingJob, simulations: Simulations | None = None) -> None:
        self.job = job
        self.simulations = simulations or Simulations()
        self._pricer = self.simulations.pricer(job)
        self._cuts = {cut: Candidates(job, cut, self._pricer) for cut in job.cuts}

    def _price(self, plan: Plan, label: str | None = None) -> PricedPlan:
        return self.simulations.price(self.job, plan, label)

    def run(self, top: int) -> Searched:
        """Bound all plans, and simulate the best; classic systems are left out."""
        promising, simulated = self._promising()
        best = min((priced.seconds for priced in simulated.values() if priced.fits), default=math.inf)
        most, least = max(top, 16 + MOST_BLOCKS // self.job.model.layers), math.inf
        for candidate in promising.in_order():
            if candidate.plan in simulated:
                continue
            done = len(simulated) >= top and candidate.bound * (1 + RESOLUTION) > best
            if done or len(simulated) >= most:
                least = candidate.bound
                break
            if self._fits(candidate.plan):
                simulated[candidate.plan] = self._price(candidate.plan)
                best = min(best, simulated[candidate.plan].seconds)
        # The plans with the fewest knobs among those that may tie with the best.
        # Memory is checked last: thousands of plans may tie, and computing the memory of a plan is the slowest step.
        tying = (plan for _, plan in promising.plainest(best * (1 + self.job.tie)) if plan not in simulated)
        for plan in list(itertools.islice(filter(self._fits, tying), top)):
            simulated[plan] = self._price(plan)
        found = list(simulated.values())
        if (uncut := self._cuts.get(UNCUT)) is not None:
            found += expert_candidates(self.job, self.simulations, uncut.bucket_bytes)
        ranked = _ranked(found, self.job.tie)
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

    def _promising(self) -> tuple[ByBound, dict[Plan, PricedPlan]]:
        """All candidates, and the simulated best of every cut but the last.

        That best time is a limit for the following cuts: candidates that take longer are not generated. Pipelines come
        first, which have the fewest plans, then the cuts that compute least, so that the limit is low early.
        """
        groups: dict[Cut, list[CandidateGroup]] = {cut: [] for cut in self._cuts}
        simulated: dict[Plan, PricedPlan] = {}
        best = math.inf
        # The order of the cuts alone would take longer. Plans that share experts may still fit, and count these.
        if self.job.model.experts is None and not self._may_fit():
            return ByBound([]), simulated
        order = sorted(self._cuts, key=lambda cut: (cut.pp == 1, self._cuts[cut].batches.least))
        for cut in order:
            groups[cut] = list(self._cuts[cut].groups(best * (1 + self.job.tie)))
            if cut == order[-1]:
                break
            candidates = itertools.islice(ByBound(groups[cut]).in_order(), _TRIED)
            first = next((candidate for candidate in candidates if self._fits(candidate.plan)), None)
            if first is not None and first.bound < best:
                simulated[first.plan] = self._price(first.plan)
                best = min(best, simulated[first.plan].seconds)
        return ByBound([group for of_cut in groups.values() for group in of_cut]), simulated

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan fits into memory, including the messages of its codecs."""
        return self.simulations.memory(self.job, plan).total <= self.job.room

    def candidates(self) -> Iterator[Candidate]:
        """Every valid plan that fits into memory without codecs, with its estimate."""
        for part in self._cuts.values():
            for group in part.groups():
                yield from map(group.candidate, range(group.bounds.size))

    def classics(self) -> Iterator[PricedPlan]:
        """Every classic system with its best micro-batch and recomputation; all ranks are data-parallel."""
        if not self.job.allows(UNCUT):
            return
        candidates = self._cuts.get(UNCUT) or Candidates(self.job, UNCUT, self._pricer)
        for name in CLASSICS:
            yield self._best_batch(candidates, _preset(self.job, name, candidates.bucket_bytes), name)

    def _best_batch(self, candidates: Candidates, plan: Plan, label: str) -> PricedPlan:
        """A plan with the batch that makes it fastest, or with the smallest batch if none fits."""
        batches = candidates.batches.choices
        without_codecs = candidates.base.trusted(**{name: getattr(plan, name) for name in FACTORS})
        fitting = [batches[row] for row in candidates.states.fitting(without_codecs, batches)]
        tried = sorted(fitting, key=lambda batch: batch.computing + batch.bubble)
        tried = tried or [min(batches, key=lambda batch: max(batch.working))]
        best: PricedPlan | None = None
        for batch in tried:
            if best is not None and best.fits:
                if batch.computing + batch.bubble > best.seconds:
                    break
                # Fewer micro-batches may save communication; this batch computes longer.
                if batch.plan.micro_batches >= best.plan.micro_batches:
                    continue
            sized = {name: getattr(batch.plan, name) for name in ("micro_batch", "micro_batches", "recompute")}
            batched = plan.with_(**sized)
            priced = self._price(batched, label)
            # Messages of codecs, which count last, may not fit any more.
            if best is None or (not priced.fits, priced.seconds) < (not best.fits, best.seconds):
                best = priced
        assert best is not None, "there is a batch"
        return best

    def smallest(self) -> tuple[Plan, Memory]:
        """The plan that needs the least memory, and that memory.

        Among several, it is the one with the fewest tensor-parallel ranks and stages, then the one with the least
        sharding.
        """
        least: tuple[float, Plan | None] = math.inf, None
        for candidates in reversed(self._cuts.values()):  # the most cut first, which leaves little to try
            least = candidates.smallest(least[0]) or least
        _, plan = least
        assert plan is not None, "some plan needs the least"
        return plan, self.simulations.memory(self.job, plan)

    def _may_fit(self) -> bool:
        """Whether any plan fits, without the messages of codecs."""
        cuts = reversed(self._cuts.values())  # from the one with the most tensor-parallel ranks and stages
        return any(candidates.smallest(self.job.room) is not None for candidates in cuts)


def _preset(job: TrainingJob, name: str, bucket_bytes: int, **fields: Any) -> Plan:
    """A preset whose ranks are all data-parallel."""
    fields |= {"compute_dtype": job.compute_dtype, "bucket_bytes": bucket_bytes}
    return Plan.preset(name, nodes=job.mesh.nodes, local=job.mesh.local, **fields)


_TRIED = 8
"""Candidates of a cut to check at most for one that fits with its codecs' messages, before the search goes on."""


def _ranked(candidates: list[PricedPlan], tie: float) -> list[PricedPlan]:
    """Fitting candidates, fastest first; among those that tie with the fastest, the one with the fewest knobs leads."""
    by_time = sorted((c for c in candidates if c.fits), key=lambda c: (c.seconds, complexity(c.plan)))
    if not by_time:
        return []
    tied = [c for c in by_time if c.seconds <= by_time[0].seconds * (1 + tie)]
    first = min(tied, key=lambda c: (complexity(c.plan), c.seconds))
    return [first, *(c for c in by_time if c is not first)]


# -- plans that share experts, beside those of the search, which give every rank all experts --------------------------


def sharings(job: TrainingJob) -> list[int]:
    """Numbers of ranks that can share the experts of the job's model; empty for a dense model."""
    experts = job.model.experts or 1
    return [ways for ways in range(2, experts + 1) if experts % ways == 0 and job.mesh.group(ways) is not None]


def expert_candidates(job: TrainingJob, simulations: Simulations, bucket_bytes: int) -> list[PricedPlan]:
    """The fastest plan that fits for each number of ranks that share experts; plans have no tensor and pipeline
    parallelism, and no codecs."""
    found = []
    for ways in sharings(job):
        plans = (_preset(job, name, bucket_bytes, ep=ways) for name in SHARDED)
        fitting = [plan for each in plans for plan in _batched(job, simulations, each)]
        priced = [simulations.price(job, plan, f"ep {ways}") for plan in fitting]
        if priced:
            found.append(min(priced, key=lambda candidate: candidate.seconds))
    return found


def _batched(job: TrainingJob, simulations: Simulations, plan: Plan) -> Iterator[Plan]:
    """A plan with the largest micro-batch that fits without recomputation, or else with it."""
    for recompute in job.recomputes:
        for size, count in sorted(job.batches(), reverse=True):
            batched = plan.with_(micro_batch=size, micro_batches=count, recompute=recompute)
            if simulations.memory(job, batched).total <= job.room:
                yield batched
                return
