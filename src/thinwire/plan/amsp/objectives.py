"""AMSP's sum and the predicted step side by side: both optima under both, and the terms in which they differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from thinwire.cost import ProfiledRates
from thinwire.cost.memory.peak import largest_memory
from thinwire.errors import SpecError
from thinwire.plan.amsp.solver import AmspPlan, amsp_plan, amsp_search
from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.search import best_plans
from thinwire.plan.training_job import TrainingJob
from thinwire.sim import Resource
from thinwire.spec import Plan
from thinwire.units import format_bytes


@dataclass(frozen=True)
class UnderBoth:
    """A plan without codecs under both objectives.

    Attributes:
        step: The plan with its predicted step, and its memory as the runtime uses it.
        summed: Its factors and batch under AMSP's sum, and its memory as AMSP counts it; without the secondary shard,
            which the sum does not know.
        reducing: Seconds of T_g and T_os0 at the prices of the sum if gradients were reduced to the ranks that keep
            them.
        in_fp32: Bytes on a rank if it accumulates gradients in fp32.
    """

    step: PricedPlan
    summed: AmspPlan
    reducing: float
    in_fp32: int

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.step.plan

    @property
    def factors(self) -> str:
        """Factors of the plan in words."""
        secondary = "" if self.plan.secondary is None else f", secondary {self.plan.secondary}"
        return f"P {self.plan.params}, G {self.plan.grads}, OS {self.plan.optimizer}{secondary}"

    @property
    def transferring(self) -> float:
        """Seconds of all transfers of a step, hop by hop, whether computation waits for them or not."""
        busy = self.step.simulated.busy
        return busy.get(Resource.INSIDE, 0.0) + busy.get(Resource.ACROSS, 0.0)

    @property
    def waiting(self) -> float:
        """Seconds of a step in which computation waits for transfers."""
        return sum(self.step.simulated.exposed.values())


@dataclass(frozen=True)
class BothObjectives:
    """The optimum by AMSP's sum and the optimum by predicted step, for the same job without codecs.

    Attributes:
        by_sum: The optimum by AMSP's sum; ``None`` if no plan fits as AMSP counts memory.
        by_time: The optimum by predicted step; ``None`` if no plan fits as the runtime uses memory.
        differences: The terms in which the objectives differ, one sentence for each.
    """

    by_sum: UnderBoth | None
    by_time: UnderBoth | None
    differences: tuple[str, ...]

    @property
    def rows(self) -> dict[str, UnderBoth]:
        """The plans that there are, by what they minimise."""
        both = {"sum": self.by_sum, "step": self.by_time}
        return {name: plan for name, plan in both.items() if plan is not None}


def both_objectives(
    job: TrainingJob, chosen: PricedPlan | None = None, simulations: Simulations | None = None
) -> BothObjectives:
    """Find the optimum by each objective, and say why they differ.

    Codecs, tensor and pipeline parallelism do not apply, because the sum does not know them. ``chosen`` is the plan
    that a search by step time chose, which may use them, and ``simulations`` what that search simulated.
    """
    simulations = simulations or Simulations()
    try:
        plain = replace(job, codecs="none", tp=(1,), pp=(1,))
    except SpecError as error:
        return BothObjectives(None, None, (f"AMSP's sum knows data parallelism only, and {error.problems[0]}.",))
    summed = [row for row in amsp_search(plain, top=1) if row.fits]
    searched = best_plans(plain, 10, simulations).candidates
    by_sum = _under_both(plain, simulations.price(plain, summed[0].plan)) if summed else None
    by_time = _under_both(plain, searched[0]) if searched else None
    return BothObjectives(by_sum, by_time, tuple(_differences(plain, by_sum, by_time, chosen)))


def _under_both(job: TrainingJob, step: PricedPlan) -> UnderBoth:
    plan = step.plan
    wide = largest_memory(
        job.model, plan.with_(accumulate_dtype="float32"), seq=job.seq, overhead=job.overhead, loss_chunk=job.loss_chunk
    )
    return UnderBoth(step, *amsp_plan(job, plan), wide.total)


def _differences(
    job: TrainingJob, by_sum: UnderBoth | None, by_time: UnderBoth | None, chosen: PricedPlan | None
) -> Iterator[str]:
    """One sentence for each term, with the seconds or bytes that it makes up."""
    if by_sum is None:
        yield "Sum: no plan fits into memory as AMSP counts it."
    if by_time is None:
        yield "Step: no plan without codecs fits into memory as the runtime uses it."
    if by_sum is not None and by_time is not None:
        yield _choice(by_sum, by_time)
    for row in _distinct(by_sum, by_time):
        yield from _terms(row)
    if by_sum is not None or by_time is not None:
        yield _prices(job)
    if by_sum is not None:
        yield _memory(job, by_sum)
    if by_time is not None:
        yield from _what_else(by_sum, by_time, chosen)


def _distinct(by_sum: UnderBoth | None, by_time: UnderBoth | None) -> list[UnderBoth]:
    """The plans that there are; one of them if both have the same factors and batch."""
    rows = [row for row in (by_sum, by_time) if row is not None]
    return rows[:1] if len(rows) == 2 and _shape(rows[0].plan) == _shape(rows[1].plan) else rows


def _shape(plan: Plan) -> tuple[object, ...]:
    factors = plan.params, plan.grads, plan.optimizer, plan.secondary
    return *factors, plan.micro_batch, plan.recompute


def _choice(by_sum: UnderBoth, by_time: UnderBoth) -> str:
    """Which plan each objective prefers, and by how much."""
    if _shape(by_sum.plan) == _shape(by_time.plan):
        return f"Choice: both objectives choose {by_sum.factors}."
    chosen = f"Choice: the sum chooses {by_sum.factors}, and the step {by_time.factors}"
    slower = by_sum.step.seconds - by_time.step.seconds
    gain = f"whose step is {slower:.3f} s shorter" if slower > 0 else "whose step ties and which turns fewer knobs"
    more = by_time.summed.objective - by_sum.summed.objective
    terms = {name: by_time.summed.terms[name] - seconds for name, seconds in by_sum.summed.terms.items()}
    largest = max(terms, key=lambda name: abs(terms[name]))
    unknown = "" if by_time.plan.secondary is None else "; the sum does not know secondary shards"
    return (
        f"{chosen}, {gain} and whose sum differs by {more:+.3f} s, of which {largest} makes up "
        f"{terms[largest]:+.3f} s{unknown}."
    )


def _terms(row: UnderBoth) -> Iterator[str]:
    """What overlap and the operators make up for one plan."""
    hidden = max(0.0, row.transferring - row.waiting)
    yield (
        f"Overlap ({row.factors}): the sum counts all of {row.summed.times.total:.3f} s of communication; the step has "
        f"{row.transferring:.3f} s of transfers, of which computation hides {hidden:.3f} s and waits for "
        f"{row.waiting:.3f} s."
    )
    reduced = row.summed.times.grads + row.summed.times.sync
    if reduced:
        yield (
            f"Operators ({row.factors}): the sum all-reduces gradients, T_g + T_os0 = {reduced:.3f} s; ranks "
            f"reduce-scatter them to those that keep them and all-reduce the rest, which takes {row.reducing:.3f} s at "
            "the same prices."
        )


def _prices(job: TrainingJob) -> str:
    if isinstance(job.rates, ProfiledRates):
        return (
            "Prices: both come from the profile; the sum takes the rows of whole collectives by operator, bytes and "
            "shape of group, the step those of each hop inside nodes and across."
        )
    return (
        "Prices: both follow from published links; the sum prices each collective as one ring or tree over its group, "
        "the step each hop inside nodes and across."
    )


def _memory(job: TrainingJob, row: UnderBoth) -> str:
    """What the dtype of gradients makes up."""
    room = job.room
    if row.step.memory.total > room:
        verdict = "does not fit either way"
    else:
        verdict = "still fits" if row.in_fp32 <= room else "does not fit"
    return (
        "Gradient dtype: plans of the sum accumulate gradients in bf16, as AMSP counts them, and the search by step "
        f"tries fp32 only; the sum's optimum needs {format_bytes(row.step.memory.total)}, and with fp32 "
        f"{format_bytes(row.in_fp32)}, which {verdict}."
    )


def _what_else(by_sum: UnderBoth | None, by_time: UnderBoth, chosen: PricedPlan | None) -> Iterator[str]:
    """The choices that only the search by step time has."""
    plan = by_time.plan
    if by_sum is not None and (plan.micro_batch, plan.recompute) != (by_sum.plan.micro_batch, by_sum.plan.recompute):
        yield (
            f"Batch: the sum takes the smallest micro-batch ({_batch(by_sum.plan)}), the search by step tries all and "
            f"takes {_batch(plan)}."
        )
    if chosen is None:
        return
    names = [name for name, codec in chosen.plan.wire.codecs().items() if not codec.is_none]
    used = [f"codecs of {', '.join(names)}"] if names else []
    used += [f"{axis} = {count}" for axis, count in (("tp", chosen.plan.tp), ("pp", chosen.plan.pp)) if count > 1]
    if used:
        yield (
            f"Codecs and cuts: the sum knows none; with {' and '.join(used)}, the plan that was chosen takes "
            f"{chosen.seconds:.3f} s a step, and without any {by_time.step.seconds:.3f} s."
        )


def _batch(plan: Plan) -> str:
    return f"{plan.micro_batch} x {plan.micro_batches}{' with recomputation' if plan.recompute else ''}"
