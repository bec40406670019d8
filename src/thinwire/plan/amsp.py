"""``--objective amsp``: the plan that AMSP's own cost model picks, and the plan that its paper printed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from thinwire.cost import (
    AMSP_STATES,
    AmspTimes,
    Collectives,
    FlatCollectives,
    Memory,
    ProfiledCollectives,
    ProfiledRates,
    amsp_times,
    memory,
)
from thinwire.errors import SpecError
from thinwire.plan.candidates import Candidate
from thinwire.plan.rules import Chain, chain_ends
from thinwire.plan.search import candidate, search
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Factor, Link, Plan
from thinwire.units import format_bandwidth, format_bytes

__all__ = ["PAPER_PLANS", "AmspPlan", "BothObjectives", "amsp_flips", "amsp_search", "beside_time"]

PAPER_PLANS = {"llama-7b": "zero1-node", "llama-13b": "amsp-13b", "llama-30b-amsp": "amsp-30b"}
"""Presets of the plans in AMSP's Table IV, by model."""

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
        label: ``amsp-paper`` for the plan of Table IV.
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


@dataclass(frozen=True)
class BothObjectives:
    """The optimum by AMSP's sum beside the optimum by step time, for the same job without codecs.

    Attributes:
        by_sum: The optimum by AMSP's sum, with its predicted step.
        by_time: The optimum by step time.
        summed: Seconds of communication per step that AMSP's sum counts for the first plan.
        summed_by_time: The same for the factors and the batch of the second plan; ``None`` if it keeps a secondary
            shard, which the sum does not know.
    """

    by_sum: Candidate
    by_time: Candidate
    summed: float
    summed_by_time: float | None

    @property
    def explanation(self) -> list[str]:
        """Why the objectives differ, one sentence for each line."""
        chosen, fastest = self.by_sum, self.by_time
        lines = [
            f"AMSP's sum counts {self.summed:.3f} s of communication for its optimum, {_factors(chosen.plan)}.",
            f"The predicted step of that plan, whose transfers run beside computation, takes {_anatomy(chosen)}.",
        ]
        if _chain_of(chosen.plan) == _chain_of(fastest.plan):
            return [*lines, f"The optimum by step time has the same factors and takes {_anatomy(fastest)}."]
        lines.append(f"The optimum by step time, {_factors(fastest.plan)}, takes {_anatomy(fastest)}.")
        if self.summed_by_time is not None:
            lines.append(f"AMSP's sum counts {self.summed_by_time:.3f} s of communication for it.")
        if fastest.seconds > chosen.seconds:
            lines.append("The two steps tie by predicted time, and a tie goes to the plan with fewer knobs.")
        return lines


def amsp_search(job: TrainingJob, *, contention: bool = True) -> list[AmspPlan]:
    """Every plan that fits, best first by AMSP's objective.

    The paper's plan is labelled, and it is listed even if it does not fit.

    Args:
        job: Model, cluster and batch; codecs do not apply.
        contention: Whether groups that cross nodes at the same time share a node's network cards. A profile measures
            them while they do.

    Raises:
        SpecError: The job has a profile, and ``contention`` is false; or the profile lacks collectives over some links.
    """
    collectives = _collectives(job, contention)
    base = Plan(
        mesh=job.mesh,
        params=Factor(),
        grads=Factor(),
        optimizer=Factor(),
        partition="inter",
        accumulate_dtype="bfloat16",  # as AMSP_STATES counts them
    )
    priced = [
        _priced(job, collectives, base, chain, recompute) for chain in _chains(job) for recompute in job.recomputes
    ]
    paper = _paper_chain(job)
    ranked = _ranked([plan for plan in priced if plan.fits])
    marked = [_labelled(plan) if _chain_of(plan.plan) == paper else plan for plan in ranked]
    # The paper's plan gets one row, with the better choice of recomputation.
    first = next((plan for plan in marked if plan.label), None)
    rows = [plan if plan is first or not plan.label else _labelled(plan, None) for plan in marked]
    if paper is not None and first is None:
        rows += [_labelled(min((p for p in priced if _chain_of(p.plan) == paper), key=lambda p: p.memory.total))]
    return rows


def beside_time(job: TrainingJob, first: AmspPlan) -> BothObjectives | None:
    """Compare AMSP's optimum with the optimum by step time.

    Args:
        job: The job that the search was for; its codecs do not apply.
        first: The optimum by AMSP's sum.

    Returns:
        Both plans; ``None`` if no plan fits by step time.
    """
    searched = search(replace(job, codecs="none"))
    if not searched.candidates:
        return None
    fastest = searched.candidates[0]
    plan = fastest.plan
    summed = None
    if plan.secondary is None and (plan.tp, plan.pp) == (1, 1):
        collectives = _collectives(job, contention=True)
        summed = amsp_times(job.parts(plan), collectives, job.mesh, _chain_of(plan), plan.micro_batches).total
    return BothObjectives(candidate(job, first.plan), fastest, first.times.total, summed)


def amsp_flips(job: TrainingJob) -> list[str]:
    """Circumstances under which the paper's plan is the optimum, found by trying each; one line for each condition.

    Args:
        job: The job that the search is for.
    """
    circumstances: dict[str, list[str]] = {}
    for what, changed, contention in _circumstances(job):
        condition = _condition(changed, amsp_search(changed, contention=contention))
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
        yield from _other_links(job)
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


def _other_links(job: TrainingJob) -> Iterator[tuple[str, TrainingJob, bool]]:
    """The job with a quarter of the bandwidth, and with four times as much."""
    links = job.cluster.links
    for key, where, link in (("nic", "between nodes", links.nic), ("inside", "inside a node", links.inside)):
        for scale in (0.25, 4.0):
            changed = Link(bandwidth=link.bandwidth * scale, latency=link.latency)
            cluster = job.cluster.with_(links={key: changed})
            yield f"{format_bandwidth(changed.bandwidth)} {where}", replace(job, cluster=cluster), True


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


def _collectives(job: TrainingJob, contention: bool) -> Collectives:
    """Seconds of collectives from the job's profile if it has one, otherwise from the cluster's published figures."""
    if not isinstance(job.rates, ProfiledRates):
        return FlatCollectives(job.cluster, contention=contention)
    if not contention:
        problem = "False has no price in a profile, which measures all groups at once; plan without --profile"
        raise SpecError("contention", [problem])
    return ProfiledCollectives(job.rates)


def _chains(job: TrainingJob) -> Iterator[Chain]:
    for params, optimizer in chain_ends(job.mesh):
        yield from dict.fromkeys(((params, params, optimizer), (params, optimizer, optimizer)))


def _priced(job: TrainingJob, collectives: Collectives, base: Plan, chain: Chain, recompute: bool) -> AmspPlan:
    micro_batch, micro_batches = job.batches()[0]
    params, grads, optimizer = chain
    plan = base.with_(
        params=params,
        grads=grads,
        optimizer=optimizer,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        recompute=recompute,
    )
    parts = job.parts(plan)
    times = amsp_times(parts, collectives, job.mesh, chain, micro_batches)
    again = sum(job.rates.forward(part, plan, job.seq) for part in parts if part.kind == "block")
    needed = memory(job.model, plan, job.units(plan), seq=job.seq, states=AMSP_STATES, overhead=job.overhead)
    return AmspPlan(
        plan, times, micro_batches * again if recompute else 0.0, needed, needed.total <= job.cluster.memory
    )


def _ranked(plans: list[AmspPlan]) -> list[AmspPlan]:
    """Best first. Plans that tie with the best of the rest are sorted by s_g = s_p, then by the larger s_os."""
    left = sorted(plans, key=lambda plan: plan.objective)
    ranked = []
    while left:
        limit = left[0].objective * (1 + TIE)
        tied = [plan for plan in left if plan.objective <= limit]
        ranked += sorted(tied, key=lambda p: (p.plan.grads != p.plan.params, -p.plan.optimizer.ranks, p.objective))
        left = left[len(tied) :]
    return ranked


def _paper_chain(job: TrainingJob) -> Chain | None:
    preset = PAPER_PLANS.get(job.model.name or "")
    if preset is None:
        return None
    return _chain_of(Plan.preset(preset, nodes=job.mesh.nodes, local=job.mesh.local))


def _chain_of(plan: Plan) -> Chain:
    return plan.params, plan.grads, plan.optimizer


def _factors(plan: Plan) -> str:
    secondary = "" if plan.secondary is None else f", secondary {plan.secondary}"
    return f"P {plan.params}, G {plan.grads}, OS {plan.optimizer}{secondary}"


def _anatomy(row: Candidate) -> str:
    """Seconds of a step, those of computation and updates (slowed by transfers), and those that they wait."""
    waits = sum(row.simulated.exposed.values())
    return f"{row.seconds:.3f} s, {row.seconds - waits:.3f} s of computation and {waits:.3f} s of waiting for transfers"


def _labelled(plan: AmspPlan, label: str | None = "amsp-paper") -> AmspPlan:
    return AmspPlan(plan.plan, plan.times, plan.recomputing, plan.memory, plan.fits, label)
