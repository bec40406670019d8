"""Exhaustive search: estimate every valid plan, then simulate the most promising ones.

An estimate is the time that a plan's busiest resource needs, so it is a lower bound of the step. The search simulates
plans in the order of their estimates. It ends when the best simulated time is within the resolution of the next
estimate: no plan of the whole space is better by more than that. If the job allows tensor and pipeline parallelism, the
search goes through the cuts of the model one by one. It drops a batch early if its computation and idle time alone
exceed the step of the best plan so far.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from thinwire.cost import NominalRates
from thinwire.plan.candidates import Candidate
from thinwire.plan.drafts import Drafts, PlanDraft, fits
from thinwire.plan.experts import expert_candidates
from thinwire.plan.rules import UNCUT, knobs
from thinwire.plan.simulations import Simulations, candidate
from thinwire.plan.training_job import TrainingJob
from thinwire.program import Lane
from thinwire.sim import Resource
from thinwire.spec import ClusterSpec, Plan

__all__ = ["CLASSICS", "RESOLUTION", "Search", "Searched", "candidate", "elsewhere", "search"]

CLASSICS = ("zero1", "zero2", "zero3", "mics", "zeropp")
"""Presets that every table shows for comparison."""

RESOLUTION = 0.01
"""The search is complete when no plan that was not simulated can be better by more than this share."""

_CHUNKS = (2, 4, 8)
"""Numbers of chunks to try."""

_MIB = 1 << 20

_SMALL_UNIT = 64 << 10
"""Bytes of units that stay whole where others stay as far as memory reaches."""

MOST_BLOCKS = 1200
"""Blocks to simulate at most, over all plans: about a third of a second. If the search stops here, its result says that
other plans might still be better."""


@dataclass(frozen=True)
class Searched:
    """The result of a search.

    Attributes:
        candidates: Simulated plans that fit into memory, best first. Among plans that tie, the one with the fewest
            knobs comes first.
        classics: The classic systems, each with its best micro-batch and recomputation. Some may not fit. Empty if the
            batch is too small for that many data-parallel ranks.
        cuts: Number of combinations of tensor and pipeline parallelism; 1 for plain data parallelism.
        considered: Number of plans that were estimated.
        fitting: Number of these that fit into memory. Plans whose computation alone takes too long are not counted.
        simulated: Number of plans that were simulated.
        complete: Whether no plan that was not simulated can be better.
        simulations: What was simulated; what-ifs begin with it.
    """

    candidates: tuple[Candidate, ...]
    classics: tuple[Candidate, ...]
    cuts: int
    considered: int
    fitting: int
    simulated: int
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
    nominal = isinstance(job.rates, NominalRates)
    rates = NominalRates(cluster, job.compute_dtype) if nominal else job.rates
    return replace(job, cluster=cluster, rates=rates, **changes)


class Search:
    """A search in steps: estimates, memory, simulation.

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
        """Estimate all plans, and simulate the best; classic systems are left out."""
        drafts, simulated = self._promising()
        best = min((priced.seconds for priced in simulated.values() if priced.fits), default=math.inf)
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
                simulated[draft] = self._candidate(self.plan(draft))
                best = min(best, simulated[draft].seconds)
        # The plans with the fewest knobs among those that may tie with the best.
        tying = (draft for draft in drafts if draft.bound <= best * (1 + self.job.tie) and draft not in simulated)
        # Memory is checked last: thousands of plans may tie, and computing the memory of a plan is the slowest step.
        plainest = filter(self._fits, sorted(tying, key=lambda draft: (draft.knobs, draft.bound)))
        for draft in list(itertools.islice(plainest, top)):
            simulated[draft] = self._candidate(self.plan(draft))
        ranked = _ranked(
            [*simulated.values(), *_sharing_experts(self.job, self._cuts.get(UNCUT), self.simulations)], self.job.tie
        )
        if ranked:
            ranked[0] = self._refined(ranked[0])
        return Searched(
            tuple(ranked),
            (),
            cuts=len(self._cuts),
            considered=sum(part.considered for part in self._cuts.values()),
            fitting=sum(part.fitting for part in self._cuts.values()),
            simulated=len(simulated),
            complete=complete,
            simulations=self.simulations,
        )

    def _promising(self) -> tuple[list[PlanDraft], dict[PlanDraft, Candidate]]:
        """All drafts sorted by their estimates, and the simulated best of every cut but the last.

        That best time is a limit for the following cuts: drafts that take longer are not generated.
        """
        promising: list[PlanDraft] = []
        simulated: dict[PlanDraft, Candidate] = {}
        best = math.inf
        for number, cut in enumerate(self._cuts.values(), start=1):
            drafts = sorted(cut.drafts(best * (1 + self.job.tie)), key=lambda draft: (draft.bound, draft.knobs))
            promising += drafts
            first = next((draft for draft in drafts[:_TRIED] if self._fits(draft)), None)
            if number < len(self._cuts) and first is not None and first.bound < best:
                simulated[first] = self._candidate(self.plan(first))
                best = min(best, simulated[first].seconds)
        return sorted(promising, key=lambda draft: (draft.bound, draft.knobs)), simulated

    def _refined(self, best: Candidate) -> Candidate:
        """The best plan with what makes it faster by more than a tie, unless its links and its computation leave
        nothing to gain."""
        if best.seconds > self._least(best) * (1 + self.job.tie):
            best = self._under_input_gradients(self._in_chunks(best))
        return self._retaining(best)

    def _least(self, best: Candidate) -> float:
        """A lower bound of the seconds of a step with the work of this one, whatever overlaps what.

        Computation takes longer beside transfers, or waits for them. At published rates, messages that are cut up take
        longer together than a whole one. Measured seconds need not grow that way, so that only computation counts.
        """
        busy = best.simulated.busy
        computing, standing = busy[Resource.COMPUTE], best.axes.idle + best.axes.messages
        if not isinstance(self.job.rates, NominalRates):
            return computing + standing
        computing += busy[Resource.CODEC]
        links = max(busy[Resource.INSIDE], busy[Resource.ACROSS], busy[Resource.SPINE])
        # Waiting for a transfer costs a second for each of its seconds; computing beside it costs at most that.
        beside = min(1.0, self.job.rates.least_slowing - 1) * min(computing, links)
        return max(computing + beside, links) + standing

    def _in_chunks(self, best: Candidate) -> Candidate:
        """The best plan with its reductions in chunks, if that makes it faster by more than a tie.

        Only the best plan is tried: chunks shorten what computation does not hide, at most a unit's reduction and the
        last bucket's, which rarely decides between two ways of sharding.
        """
        in_chunks = (self._candidate(best.plan.with_(bucket_chunks=chunks)) for chunks in _CHUNKS)
        return _faster(self.job.tie, best, in_chunks)

    def _under_input_gradients(self, best: Candidate) -> Candidate:
        """The best plan with reductions that start before the input gradient, if that makes it faster by more than a
        tie: those of the head alone, or of every linear layer, which are then units of their own.

        Only the best plan is tried: what computation does not hide is again a part of a unit's reduction.
        """
        if best.plan.tp > 1 or best.plan.ep > 1:
            return best
        first = {"overlap": {"input_gradient": True}}
        earlier = (self._candidate(best.plan.with_(**first, granularity=size)) for size in ("block", "module"))
        return _faster(self.job.tie, best, earlier)

    def _retaining(self, best: Candidate) -> Candidate:
        """The best plan with units that travel together, or that stay gathered as far as memory reaches, if that makes
        it faster by more than a tie.

        Only the best plan is tried: both spare gathers, whose bytes the choice between ways of sharding has counted. It
        is not, where computation hardly waits for them: no plan gains more than that.
        """
        plan, waiting = best.plan, best.simulated.exposed
        if plan.params.ranks == 1 or waiting[Lane.GATHER] + waiting[Lane.REDUCE] <= self.job.tie * best.seconds:
            return best
        live = best.memory.gathered + self.job.cluster.memory - best.memory.total
        live -= live % _MIB
        if live <= 0:
            return best
        together = {"gather_bytes": plan.bucket_bytes, "reduce_bytes": plan.bucket_bytes}
        stays = {"reuse_bytes": self.job.cluster.memory, "live_bytes": live}
        small = sum(unit.nbytes for unit in self.job.units(plan) if unit.nbytes <= _SMALL_UNIT)
        if small * 8 <= live:
            stays["persist_bytes"] = _SMALL_UNIT
        changes = (together, stays, {**together, **stays})
        return _faster(self.job.tie, best, [self._candidate(plan.with_(**change)) for change in changes])

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
        states = drafts.states((plan.params, plan.grads, plan.optimizer), plan.secondary)
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

    def smallest(self) -> Candidate:
        """The plan that needs the least memory.

        Among several, it is the one with the fewest tensor-parallel ranks and stages, then the one with the least
        sharding.
        """
        _, draft = min((drafts.smallest() for drafts in self._cuts.values()), key=lambda found: found[0])
        return self._candidate(self.plan(draft))


def _sharing_experts(job: TrainingJob, drafts: Drafts | None, simulations: Simulations) -> list[Candidate]:
    """Plans whose ranks share experts, if the model has any; ``drafts`` are those without tensor and pipeline
    parallelism, if they are allowed."""
    if drafts is None or job.model.experts is None:
        return []
    return expert_candidates(job, simulations, drafts.bucket_bytes)


def _faster(tie: float, best: Candidate, others: Iterable[Candidate]) -> Candidate:
    """The fastest of the others that fit, if it is faster than the best by more than a tie."""
    faster = [c for c in others if c.fits and c.seconds * (1 + tie) < best.seconds]
    return min(faster, key=lambda c: c.seconds, default=best)


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
