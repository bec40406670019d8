"""``--objective amsp``: the plan that AMSP's own cost model picks, and the plan that its paper printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from thinwire.cost import (
    AMSP_STATES,
    CollectiveTimes,
    LibraryCollectives,
    Memory,
    ProfiledCollectives,
    ProfiledRates,
    largest_share,
    memory,
)
from thinwire.errors import SpecError
from thinwire.plan.amsp.sums import AmspSums, AmspTimes
from thinwire.plan.explain import other_links
from thinwire.plan.rules import Chain, chain_ends
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Factor, Plan
from thinwire.spec.plan_parts.presets import engine_fields
from thinwire.units import format_bytes

PAPER_PLANS = {"llama-7b": "zero1-node", "llama-13b": "amsp-13b", "llama-30b-amsp": "amsp-30b"}
"""Presets of the plans in AMSP's Table IV, by model."""

PAPER = "amsp-paper"
"""Label of these plans."""

TIE = 0.001
"""Relative difference below which two sums tie. A tie goes to s_g = s_p, then to the larger s_os (section 4.3)."""


@dataclass(frozen=True)
class AmspPlan:
    """One plan under AMSP's objective.

    Attributes:
        plan: Factors, batch and recomputation; whole tensors are dealt to ranks.
        times: Seconds of communication, which runs in sequence.
        recomputing: Seconds of computation that recomputation adds to a step.
        memory: Bytes on a rank, with states counted as AMSP counts them.
        fits: Whether these bytes fit into an accelerator's memory.
        label: :data:`PAPER` for the plan of Table IV.
    """

    plan: Plan
    times: AmspTimes
    recomputing: float
    memory: Memory
    fits: bool
    label: str | None = None

    @property
    def objective(self) -> float:
        """The sum to minimise, in seconds: communication, and recomputation if the plan recomputes."""
        return self.times.total + self.recomputing

    @property
    def terms(self) -> dict[str, float]:
        """Seconds of each term of the objective, by its name in the paper."""
        times = self.times
        sums = {"T_p": times.params, "T_g": times.grads, "T_os0": times.sync, "T_os1": times.spread}
        return {**sums, "recomputation": self.recomputing}


def amsp_search(job: TrainingJob, *, top: int | None = None, contention: bool = True) -> list[AmspPlan]:
    """Plans that fit, best first by AMSP's objective. The search is exact and tries no more plans than it has to.

    The paper's plan is labelled, and it is listed even if it does not fit.

    Args:
        job: Model, cluster and batch; codecs do not apply.
        top: Number of plans after which the list may end, once it holds the paper's plan; ``None`` lists all.
        contention: Whether groups that cross nodes at the same time share a node's network cards. A profile measures
            them while they do.

    Raises:
        SpecError: The job has a profile, and ``contention`` is false; or the profile lacks collectives over some links;
            or data parallelism alone cannot train the batch.
    """
    space = _Space(job, contention)
    chain = _paper_chain(job)
    paper = [space.priced(chain, recompute) for recompute in job.recomputes] if chain else []
    awaited = any(plan.fits for plan in paper)
    rows: list[AmspPlan] = []
    for plan in _ranked(space.fitting()):
        # The paper's plan gets one row's label, that with the better choice of recomputation.
        is_paper = awaited and _chain_of(plan.plan) == _chain_of(paper[0].plan)
        rows.append(replace(plan, label=PAPER) if is_paper else plan)
        awaited = awaited and not is_paper
        if top is not None and len(rows) >= top and not awaited:
            break
    if paper and not any(plan.fits for plan in paper):
        rows.append(replace(min(paper, key=lambda plan: plan.memory.total), label=PAPER))
    return rows


def amsp_plan(job: TrainingJob, plan: Plan) -> tuple[AmspPlan, float]:
    """A plan without tensor and pipeline parallelism under AMSP's objective: its factors, batch and recomputation. A
    secondary shard does not count. And what T_g and T_os0 would be if gradients were reduced to the ranks that keep
    them, at the prices of the sum."""
    space = _Space(replace(job, micro_batch=plan.micro_batch, recompute=plan.recompute), contention=True)
    return space.priced(_chain_of(plan), plan.recompute), space.sums.reducing(_chain_of(plan))


class _Space:
    """The plans of a job under AMSP's objective, priced only when they are asked for; ``contention`` as in
    :func:`amsp_search`."""

    def __init__(self, job: TrainingJob, contention: bool) -> None:
        self._job, self._room = job, job.room
        micro_batch, micro_batches = replace(job, tp=(1,), pp=(1,)).batches()[0]  # or the job says why it has none
        self._base = Plan(
            mesh=job.mesh,
            params=Factor(),
            grads=Factor(),
            optimizer=Factor(),
            **engine_fields("amsp", recompute=False),
            micro_batch=micro_batch,
            micro_batches=micro_batches,
        )
        parts = job.parts(self._base)
        self.sums = AmspSums(parts, _collectives(job, contention=contention), job.mesh, micro_batches)
        again = sum(job.rates.computing(part, self._base, job.seq)[0] for part in parts if part.kind == "block")
        self._recomputing = {recompute: micro_batches * again if recompute else 0.0 for recompute in job.recomputes}
        # Padding depends on the number of ranks alone, so the units of all plans have the same sizes. Only who owns
        # how much differs, of which the largest share matters.
        self._units = job.units(self._base.with_(partition="intra"))
        self._numel = sum(buffer.numel for unit in self._units for buffer in unit.buffers)
        unsharded = {recompute: self._memory(self._base.with_(recompute=recompute)) for recompute in self._recomputing}
        self._working = {
            recompute: needed.activations + needed.logits + needed.overhead for recompute, needed in unsharded.items()
        }
        self._share = cache(self._largest_share)

    def fitting(self) -> Iterator[AmspPlan]:
        """Every plan that fits, in the order of its objective."""
        for _, chain, recompute in self._in_order():
            if self._least_bytes(chain, recompute) <= self._room and (plan := self.priced(chain, recompute)).fits:
                yield plan

    def _in_order(self) -> list[tuple[float, Chain, bool]]:
        """Chains whose ``P`` may fit, without and with recomputation, and their objective, best first. Even a million
        ranks have no more than some thousand of them."""
        choices = [
            (self.sums.times(chain).total + seconds, chain, recompute)
            for params, optimizer in chain_ends(self._job.mesh)
            if self._may_fit(params)
            for chain in dict.fromkeys(((params, params, optimizer), (params, optimizer, optimizer)))
            for recompute, seconds in self._recomputing.items()
        ]
        return sorted(choices, key=lambda choice: choice[0])

    def priced(self, chain: Chain, recompute: bool) -> AmspPlan:
        """A plan with its memory."""
        params, grads, optimizer = chain
        plan = self._base.with_(
            params=params,
            grads=grads,
            optimizer=optimizer,
            recompute=recompute,
            **engine_fields("amsp", recompute=recompute),
        )
        needed = self._memory(plan, share=self._share(params, optimizer))
        return AmspPlan(plan, self.sums.times(chain), self._recomputing[recompute], needed, needed.total <= self._room)

    def _may_fit(self, params: Factor) -> bool:
        states = AMSP_STATES.params * self._numel // params.ranks
        return states + min(self._working.values()) <= self._room

    def _least_bytes(self, chain: Chain, recompute: bool) -> int:
        """Bytes of states and activations, without buffers."""
        params, grads, optimizer = chain
        sharded = AMSP_STATES.params * self._numel // params.ranks + AMSP_STATES.grads * (self._numel // grads.ranks)
        return sharded + AMSP_STATES.optimizer * self._share(params, optimizer) + self._working[recompute]

    def _largest_share(self, params: Factor, optimizer: Factor) -> int:
        return largest_share(self._job.model, self._base.with_(params=params, grads=params, optimizer=optimizer))

    def _memory(self, plan: Plan, share: int | None = None) -> Memory:
        job = self._job
        return memory(job.model, plan, self._units, seq=job.seq, states=AMSP_STATES, overhead=job.overhead, share=share)


def amsp_flips(job: TrainingJob) -> list[str]:
    """Circumstances under which the paper's plan is the optimum, found by trying each; one line for each condition."""
    circumstances: dict[str, list[str]] = {}
    for what, changed, contention in _circumstances(job):
        condition = _condition(changed, amsp_search(changed, top=1, contention=contention))
        if condition:
            circumstances.setdefault(condition, []).append(what)
    return [f"{', '.join(where)}: {condition}" for condition, where in circumstances.items()]


def _circumstances(job: TrainingJob) -> Iterator[tuple[str, TrainingJob, bool]]:
    """The job itself, other bandwidths, and fewer nodes: the paper prints one plan for 8 to 1024 GPUs.

    A profile holds for the links that it measured, always with contention, so only the number of nodes changes.
    """
    yield f"{job.cluster.gpus} GPUs", job, True
    measured = isinstance(job.rates, ProfiledRates)
    if not measured:
        links = job.cluster.links
        for key, where, link in (("nic", "between nodes", links.nic), ("inside", "inside a node", links.inside)):
            for what, changed in other_links(job, key, link, (0.25, 4.0), where):
                yield what, changed, True
        yield f"{job.cluster.gpus} GPUs without NIC contention (the sums as printed)", job, False
    nodes = job.cluster.nodes // 4
    while nodes >= 1:
        cluster = job.cluster.with_(nodes=nodes)
        if job.tokens_per_step % (job.seq * cluster.gpus) == 0:
            fewer = replace(job, cluster=cluster)
            yield f"{cluster.gpus} GPUs", fewer, True
            if not measured:
                yield f"{cluster.gpus} GPUs without NIC contention", fewer, False
        nodes //= 4


def _condition(job: TrainingJob, rows: list[AmspPlan]) -> str | None:
    """Whether the paper's plan is the optimum of these rows, or would be with less memory; ``None`` if neither."""
    paper = next((row for row in rows if row.label), None)
    if paper is None or not paper.fits:
        return None
    if rows[0] is paper:
        return "it is the optimum"
    tightest = min(row.memory.total for row in rows[: rows.index(paper)])
    if tightest > paper.memory.total:
        room = f"{format_bytes(paper.memory.total)} to {format_bytes(tightest)}"
        return f"it is the optimum with {room} of memory, where no better plan fits"
    return None


def _collectives(job: TrainingJob, *, contention: bool) -> CollectiveTimes:
    """Seconds of collectives from the job's profile if it has one, otherwise from the cluster's published figures.

    Raises:
        SpecError: The job has a profile, and ``contention`` is false.
    """
    if not isinstance(job.rates, ProfiledRates):
        return LibraryCollectives(job.cluster, contention=contention)
    if not contention:
        problem = "False has no price in a profile, which measures all groups at once; plan without --profile"
        raise SpecError("contention", problem)
    return ProfiledCollectives(job.rates)


def _ranked(plans: Iterable[AmspPlan]) -> Iterator[AmspPlan]:
    """Plans in the order of their objective, in which those that tie are sorted by s_g = s_p, then by the larger s_os.

    Plans tie with the first of those that no earlier plan ties with.
    """
    tied: list[AmspPlan] = []
    for plan in plans:
        if tied and plan.objective > tied[0].objective * (1 + TIE):
            yield from _preferred(tied)
            tied = []
        tied.append(plan)
    yield from _preferred(tied)


def _preferred(tied: list[AmspPlan]) -> list[AmspPlan]:
    return sorted(tied, key=lambda p: (p.plan.grads != p.plan.params, -p.plan.optimizer.ranks, p.objective))


def _paper_chain(job: TrainingJob) -> Chain | None:
    preset = PAPER_PLANS.get(job.model.name or "")
    if preset is None:
        return None
    return _chain_of(Plan.preset(preset, nodes=job.mesh.nodes, local=job.mesh.local))


def _chain_of(plan: Plan) -> Chain:
    return plan.params, plan.grads, plan.optimizer
