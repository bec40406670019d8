"""Why a plan was chosen: its bottleneck, the parts of its step, the runner-up, and what would change the choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from thinwire.cost import NominalRates, ProfiledRates
from thinwire.plan.priced import PricedPlan, price_plan
from thinwire.plan.rules import cuts, powers_of_two
from thinwire.plan.search import RESIDENCES, Searched, best_plans, elsewhere, smallest
from thinwire.plan.training_job import TrainingJob
from thinwire.sim import Resource
from thinwire.spec import ClusterSpec, Link, Plan
from thinwire.spec.cut import Cut, cut_problems
from thinwire.units import format_bandwidth, format_bytes


@dataclass(frozen=True)
class Flip:
    """A change of the circumstances that leads to another choice.

    Attributes:
        change: The change in words.
        plan: The plan that would be chosen, in words.
        seconds: Its step time in seconds; ``None`` if no plan fits.
    """

    change: str
    plan: str
    seconds: float | None


@dataclass(frozen=True)
class Explanation:
    """Why a search's best plan is the best.

    Attributes:
        binding: The bottleneck of the step, in one sentence.
        path: Seconds of the step by cause; they add up to the step time.
        noise: Step times in seconds with the lower and the upper quartiles of a profile; ``None`` without a profile.
        runner_up: The best plan with other factors, in one sentence; ``None`` if there is none.
        flips: Changes of the circumstances that lead to another choice.
        steady: Changes that were tried and do not change the choice.
    """

    binding: str
    path: dict[str, float]
    noise: tuple[float, float] | None
    runner_up: str | None
    flips: tuple[Flip, ...]
    steady: tuple[str, ...]


@dataclass(frozen=True)
class Remedy:
    """A change under which some plan fits.

    Attributes:
        change: The change, as command-line options where there are any.
        result: The plan that then fits, and its memory, in words.
    """

    change: str
    result: str


def summary(plan: Plan) -> str:
    """Factors, codecs and batch of a plan in a few words."""
    words = [f"P {plan.params}, G {plan.grads}, OS {plan.optimizer}"]
    if plan.secondary is not None:
        words.append(f"secondary {plan.secondary}")
    residence = plan.residence
    hosted = {"P": residence.streams_params, "G": residence.streams_gradients, "OS": residence.streams_states}
    if not residence.on_device:
        words.append(f"{', '.join(name for name, on_host in hosted.items() if on_host)} on the host")
    codecs = [f"{name} {codec}" for name, codec in plan.wire.codecs().items() if not codec.is_none]
    words.append(", ".join(codecs) if codecs else "no codecs")
    words.append(f"micro-batch {plan.micro_batch} x {plan.micro_batches}")
    if plan.recompute:
        words.append("recompute")
    ways = [f"{axis} {count}" for axis, count in (("tp", plan.tp), ("pp", plan.pp)) if count > 1]
    if plan.pipeline_schedule != "1f1b":
        ways.append(plan.pipeline_schedule)
    return "; ".join([" ".join(ways), *words] if ways else words)


def critical_path(candidate: PricedPlan) -> dict[str, float]:
    """Seconds of a step by cause.

    The causes are computation, its slowdown by codecs and transfers, waiting for each lane, and the additions of tensor
    and pipeline parallelism.
    """
    simulated, axes = candidate.simulated, candidate.axes
    waiting = {f"waiting for {lane}": seconds for lane, seconds in simulated.exposed.items() if seconds > 0}
    slowed = simulated.seconds - simulated.computing - sum(waiting.values()) - axes.idle - axes.messages
    added = {
        "sums over tensor-parallel ranks": axes.sums,
        "pipeline filling and draining": axes.idle,
        "messages between stages": axes.messages,
        "tokens on their way to experts and back": axes.experts,
        "keys and values of other ranks": axes.context,
    }
    return {
        "computation": simulated.computing - axes.inside,
        "computation slowed by codecs and transfers": max(0.0, slowed),
        **waiting,
        **{cause: seconds for cause, seconds in added.items() if seconds > 0},
    }


def explain(job: TrainingJob, searched: Searched) -> Explanation:
    """Explain why the best plan of a search is the best; at least one plan fits."""
    chosen = searched.candidates[0]
    flips, steady = [], []
    # Without --tp and --pp, thinwire plan tries them where no data-parallel plan fits; an explanation does not.
    none = "no data-parallel plan fits" if (job.tp, job.pp) == ((1,), (1,)) else "nothing fits"
    for change, changed in _variations(job):
        other = best_plans(changed, 1, searched.simulations)
        if not other.candidates:
            flips.append(Flip(change, none, None))
        elif _same(other.candidates[0].plan, chosen.plan):
            steady.append(change)
        else:
            flips.append(Flip(change, summary(other.candidates[0].plan), other.candidates[0].seconds))
    return Explanation(
        binding(job, chosen),
        critical_path(chosen),
        quartile_seconds(job, chosen),
        _runner_up(searched, job.tie),
        tuple(flips),
        tuple(steady),
    )


def remedies(job: TrainingJob) -> list[Remedy]:
    """Find changes of a job for which no plan fits, under which some plan does.

    For every kind of change, this is the smallest one that suffices. If none does, recomputation is combined with more
    nodes. Every change that is returned was tried.
    """
    kinds = (
        _computing_again(job),
        _offloading(job),
        _smaller_batches(job),
        *_sharing(job),
        _padded_vocabulary(job),
        _shorter_sequences(job),
        _more_nodes(job),
    )
    changes = [remedy for kind in kinds if (remedy := _first_that_fits(kind))]
    if not changes and job.recompute is False:
        larger = _more_nodes(replace(job, recompute=True))
        recomputed = ((f"--recompute on and {change}", changed) for change, changed in larger)
        changes = [remedy for remedy in (_first_that_fits(recomputed),) if remedy]
    return changes


def _first_that_fits(changes: Iterator[tuple[str, TrainingJob]]) -> Remedy | None:
    for change, changed in changes:
        plan, needed = smallest(changed)
        if needed.total <= changed.room:
            return Remedy(change, f"{summary(plan)}: {format_bytes(needed.total)} per rank")
    return None


def shortage(job: TrainingJob) -> tuple[Plan, int]:
    """The plan that needs the least memory, and the number of bytes by which it exceeds an accelerator's memory."""
    plan, needed = smallest(job)
    return plan, needed.total - job.room


_LINKS = {
    Resource.INSIDE: "the links inside a node",
    Resource.ACROSS: "the links between nodes",
    Resource.SPINE: "the links between leaf switches and the spine",
}


def binding(job: TrainingJob, chosen: PricedPlan) -> str:
    """The bottleneck of a plan's step, in one sentence."""
    busy, seconds = chosen.simulated.busy, chosen.seconds
    shares = {resource: work / seconds for resource, work in busy.items()}
    waiting = sum(chosen.simulated.exposed.values()) / seconds
    computing = shares[Resource.COMPUTE]
    busiest = max(_LINKS, key=lambda resource: shares[resource])
    zones = busiest is Resource.SPINE and job.cluster.links.spine is None
    link = "the links between zones" if zones else _LINKS[busiest]
    room = job.room - chosen.memory.total
    memory = f"{format_bytes(room)} of memory are left"
    axes = chosen.axes
    idle = (axes.idle + axes.messages) / seconds
    stands = f"{link} are busy for {shares[busiest]:.0%}"
    if idle > max(0.1, waiting):
        stands = f"the pipeline: ranks idle for {axes.idle / seconds:.0%} of the step and wait for messages for"
        stands += f" {axes.messages / seconds:.0%}"
    elif shares[busiest] > max(0.9, computing):
        return f"{link}: they are busy for {shares[busiest]:.0%} of the step; {memory}"
    elif waiting > 0.1:
        lane = max(chosen.simulated.exposed, key=lambda lane: chosen.simulated.exposed[lane])
        limit = f", which is limited by {link}: busy for {shares[busiest]:.0%}" if busiest is Resource.SPINE else ""
        stands = f"waiting: {waiting:.0%} of the step, most of it for the {lane} lane{limit}"
    if max(idle, waiting) > computing:
        return f"{stands}; {memory}"
    sums = f" ({axes.sums / seconds:.0%} are sums over tensor-parallel ranks)" if axes.sums else ""
    return f"computation: {computing:.0%} of the step{sums}; {stands}; {memory}"


def quartile_seconds(job: TrainingJob, chosen: PricedPlan) -> tuple[float, float] | None:
    """Seconds of a plan's step with the lower and with the upper quartiles of a profile; ``None`` without a profile."""
    if not isinstance(job.rates, ProfiledRates):
        return None
    quartiles: tuple[Literal["low", "high"], ...] = ("low", "high")
    low, high = (
        price_plan(
            replace(job, rates=ProfiledRates(job.rates.profile, job.model, job.compute_dtype, which)), chosen.plan
        )
        for which in quartiles
    )
    return low.seconds, high.seconds


def _runner_up(searched: Searched, tie: float) -> str | None:
    chosen = searched.candidates[0]
    others = [c for c in searched.candidates[1:] if _factors(c.plan) != _factors(chosen.plan)]
    if not others:
        return None
    best = min(others, key=lambda c: c.seconds)
    ratio = best.seconds / chosen.seconds - 1
    if abs(ratio) < tie:
        return f"{summary(best.plan)}: a tie within {tie:.0%}, but with more knobs"
    return f"{summary(best.plan)}: {ratio:+.1%}"


def _factors(plan: Plan) -> tuple[object, ...]:
    return plan.params, plan.grads, plan.optimizer, plan.secondary, Cut.of(plan)


def _same(one: Plan, other: Plan) -> bool:
    """Whether two choices are the same. Micro-batches may differ in size if both take a rank's whole batch at once."""
    alike = _factors(one) == _factors(other) and all(
        getattr(one, key) == getattr(other, key) for key in ("wire", "recompute", "residence")
    )
    return alike and (one.micro_batch == other.micro_batch or one.micro_batches == other.micro_batches == 1)


def _variations(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    links, memory = job.cluster.links, job.cluster.memory
    if isinstance(job.rates, NominalRates):
        yield from other_links(job, "nic", links.nic, (0.1, 0.25, 0.5, 2.0, 4.0), "between nodes")
        if links.spine is not None:
            yield from other_links(job, "spine", links.spine, (0.5, 2.0, 4.0), "of a node across the spine")
    for scale in (0.5, 2.0):
        cluster = job.cluster.with_(memory=int(memory * scale))
        yield f"{format_bytes(memory * scale)} of memory", replace(job, cluster=cluster)
    for times in (2, 8):
        yield f"{times} x the tokens per step", replace(job, tokens_per_step=job.tokens_per_step * times)


def other_links(
    job: TrainingJob, key: str, link: Link, scales: Sequence[float], where: str
) -> Iterator[tuple[str, TrainingJob]]:
    """The job with other bandwidths of a link, which :class:`~thinwire.spec.Links` has under ``key``."""
    for scale in scales:
        changed = link.with_(bandwidth=link.bandwidth * scale)
        cluster = job.cluster.with_(links=job.cluster.links.with_(**{key: changed}))
        yield f"{format_bandwidth(changed.bandwidth)} {where}", elsewhere(job, cluster)


def _computing_again(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    if job.recompute is False:
        yield "--recompute on", replace(job, recompute=True)


def _offloading(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    if all(residence.on_device for residence in job.residences):
        yield "--offload", replace(job, residences=RESIDENCES)
        if job.recompute is False:
            yield "--offload --recompute on", replace(job, residences=RESIDENCES, recompute=True)


def _smaller_batches(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    if job.micro_batch is None or job.micro_batch == 1:
        return
    sequences = [job.sequences(job.mesh_of(cut)) for cut in job.cuts]
    sizes = (d for d in range(1, job.micro_batch) if any(count % d == 0 for count in sequences))
    for size in sorted(sizes, reverse=True):
        yield f"--micro-batch {size}", replace(job, micro_batch=size)
    if job.recompute is False:
        yield "--recompute on --micro-batch 1", replace(job, recompute=True, micro_batch=1)


def _sharing(job: TrainingJob) -> Iterator[Iterator[tuple[str, TrainingJob]]]:
    """Tensor-parallel ranks, pipeline stages, and both, if the job did not allow them."""
    if job.tp is None or job.pp is None or (job.tp, job.pp) != ((1,), (1,)):
        return
    all_cuts = cuts(powers_of_two(job.cluster.gpus_per_node), powers_of_two(job.model.layers))
    ways = sorted((cut for cut in all_cuts if cut.schedule == "1f1b" and job.allows(cut)), key=lambda c: (c.ways, c.pp))
    kinds = (
        [cut for cut in ways if cut.tp > 1 and cut.pp == 1],
        [cut for cut in ways if cut.tp == 1 and cut.pp > 1],
        [cut for cut in ways if cut.tp > 1 and cut.pp > 1],
    )
    for kind in kinds:
        yield ((_option(cut), replace(job, tp=(cut.tp,), pp=(cut.pp,))) for cut in kind)


def _padded_vocabulary(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """A vocabulary padded for tensor parallelism, alone and with more nodes, if only the vocabulary rules that out."""
    model, ways = job.model, job.cluster.gpus_per_node
    padded = model.with_(vocab=-(-model.vocab // ways) * ways)
    largest = Cut(tp=powers_of_two(ways)[-1])
    if not cut_problems(model, job.seq, largest) or cut_problems(padded, job.seq, largest):
        return
    changed = replace(job, model=padded, tp=None, pp=None)
    change = f"vocab = {padded.vocab} instead of {model.vocab}, with --tp auto --pp auto"
    yield change, changed
    for more, larger in _more_nodes(changed):
        yield f"{change} and {more}", larger


def _option(cut: Cut) -> str:
    return " ".join(f"--{axis} {count}" for axis, count in (("tp", cut.tp), ("pp", cut.pp)) if count > 1)


def _shorter_sequences(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    for divisor in (2, 4, 8):
        if job.seq % divisor == 0 and job.seq // divisor >= 256:
            yield f"--seq {job.seq // divisor}", replace(job, seq=job.seq // divisor, micro_batch=None)


def _more_nodes(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Doubled numbers of nodes, each with enough tokens for at least one sequence per rank."""
    for doublings in range(1, 11):
        nodes = job.cluster.nodes << doublings
        cluster = _times(job.cluster, 1 << doublings)
        tokens = max(job.tokens_per_step, job.seq * cluster.gpus)
        tokens -= tokens % (job.seq * cluster.gpus)
        change = f"{nodes} nodes instead of {job.cluster.nodes}"
        if tokens != job.tokens_per_step:
            change += f" and --tokens-per-step {tokens}"
        yield change, elsewhere(job, cluster, tokens_per_step=tokens, micro_batch=None)


def _times(cluster: ClusterSpec, times: int) -> ClusterSpec:
    """A cluster with ``times`` as many nodes and leaf switches."""
    leaves = cluster.leaves
    if isinstance(leaves, tuple):
        leaves = tuple(leaf + copy * (max(leaves) + 1) for copy in range(times) for leaf in leaves)
    return cluster.with_(nodes=cluster.nodes * times, leaves=leaves)
