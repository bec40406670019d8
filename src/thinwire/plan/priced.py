"""Plans with their predicted steps and memory, each simulated once for a search and its what-ifs; and what a prediction
rests on: measurements of this cluster, of another with the same accelerator, or neither."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from thinwire.cost import Basis, Memory, Pricer, ProfiledRates, Rates
from thinwire.cost.memory.peak import largest_memory
from thinwire.plan.training_job import TrainingJob, axis_costs
from thinwire.sim import Simulated
from thinwire.sim.axes import pass_seconds
from thinwire.sim.step import PLAYED, Played, play, with_exchanges
from thinwire.spec import ModelSpec, Plan, mean_peak


@dataclass(frozen=True, slots=True)
class AxisSeconds:
    """Seconds that tensor, pipeline, expert and context parallelism add to a step; computation hides none of them.

    Attributes:
        sums: Seconds of sums over tensor-parallel ranks, which are part of computation.
        idle: Seconds during which ranks idle while the pipeline fills and drains.
        messages: Seconds of waiting for messages between stages.
        experts: Seconds of exchanging tokens with the experts of other ranks, which are part of computation.
        context: Seconds of gathering keys and values, and of reducing their gradients, which are part of computation.
    """

    sums: float = 0.0
    idle: float = 0.0
    messages: float = 0.0
    experts: float = 0.0
    context: float = 0.0

    @classmethod
    def of(cls, job: TrainingJob, plan: Plan) -> AxisSeconds:
        """The seconds of a plan of a job."""
        if plan.tp == plan.pp == plan.ep == plan.cp == 1:
            return cls()
        workload = job.workload(plan)
        costs, passes = axis_costs(job, plan), plan.micro_batches * (3 if plan.recompute else 2)
        sums = experts = context = idle = 0.0
        if workload.exchanges:
            sums, experts, context = (
                passes * sum(map(of_part, workload.parts)) for of_part in (costs.sums, costs.experts, costs.context)
            )
        if plan.pp > 1:
            idle = costs.idle(*pass_seconds(plan, workload, job.rates))
        return cls(sums, idle, costs.awaited, experts, context)

    @property
    def inside(self) -> float:
        """Seconds that are part of computation."""
        return self.sums + self.experts + self.context


@dataclass(frozen=True)
class PricedPlan:
    """A plan with its predicted step time and memory.

    Attributes:
        plan: The plan, including ``micro_batch``, ``micro_batches`` and ``recompute``.
        simulated: The simulated step; its seconds include those of tensor and pipeline parallelism.
        memory: Bytes on the rank that needs the most memory.
        fits: Whether these bytes fit into an accelerator's memory.
        label: Name of the classic system or other framework whose plan this is; ``None`` for one of the search.
        axes: Seconds that tensor and pipeline parallelism add.
    """

    plan: Plan
    simulated: Simulated
    memory: Memory
    fits: bool
    label: str | None = None
    axes: AxisSeconds = AxisSeconds()

    @classmethod
    def of(cls, job: TrainingJob, plan: Plan, step: Simulated, needed: Memory, label: str | None) -> PricedPlan:
        """A plan of a job with a step as it was played, and its memory."""
        axes = AxisSeconds.of(job, plan)
        step = replace(step, seconds=step.seconds + axes.idle + axes.messages)
        return cls(plan, step, needed, needed.total <= job.room, label, axes)

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return self.simulated.seconds

    def tokens_per_gpu_second(self, job: TrainingJob) -> float:
        """Tokens per second and GPU (TGS)."""
        return job.tokens_per_step / self.seconds / job.cluster.gpus

    def mfu(self, job: TrainingJob) -> float:
        """Model FLOPs utilisation (MFU); recomputation does not count. Of unlike nodes, the mean peak is 100 %."""
        flops = job.model.flops_per_token(job.seq)
        return self.tokens_per_gpu_second(job) * flops / mean_peak(job.cluster, job.compute_dtype)

    def cost_per_billion_tokens(self, job: TrainingJob) -> float | None:
        """Price of a billion tokens, in the currency of ``price_per_gpu_hour``; ``None`` if that is unset."""
        price = job.cluster.price_per_gpu_hour
        return None if price is None else price * 1e9 / self.tokens_per_gpu_second(job) / 3600


class Simulations:
    """Steps and memory that were predicted.

    Steps do not depend on the memory of a cluster, and those of more than three micro-batches follow from three.
    What-ifs with another memory or batch therefore find most of their steps here.
    """

    def __init__(self) -> None:
        self._steps: dict[tuple[Plan, Rates, ModelSpec, int, bool], Played] = {}
        self._memory: dict[tuple[Plan, ModelSpec, int, int, int], Memory] = {}
        self._pricers: dict[tuple[Rates, str], Pricer] = {}

    def price(self, job: TrainingJob, plan: Plan, label: str | None = None) -> PricedPlan:
        """Predict the step time and the memory of one plan; arguments as of :func:`price_plan`.

        Of unlike nodes, the slowest decide.
        """
        views = (replace(job, rates=rates) for rates in job.rates.views)
        return max((self._price(view, plan, label) for view in views), key=lambda seen: seen.seconds)

    def _price(self, job: TrainingJob, plan: Plan, label: str | None) -> PricedPlan:
        simulated = self._played(job, plan).step(plan.micro_batches)
        if plan.num_islands > 1:
            simulated = with_exchanges(plan, job.units(plan), job.rates, simulated)
        return PricedPlan.of(job, plan, simulated, self.memory(job, plan), label)

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
            self._pricers[key] = Pricer(job.rates, job.compute_dtype)
        return self._pricers[key]


def price_plan(job: TrainingJob, plan: Plan, label: str | None = None) -> PricedPlan:
    """Predict the step time and the memory of one plan, with its micro-batch, micro-batches and recomputation.
    ``label`` is its name in tables."""
    return Simulations().price(job, plan, label)


# -- what a prediction rests on --------------------------------------------------------------------------------------


_WORST_FIRST: Final[tuple[Basis, ...]] = ("extrapolated", "measured elsewhere", "measured here")


@dataclass(frozen=True, slots=True)
class Provenance:
    """What the parts of a predicted step rest on.

    Attributes:
        computation: Of forward and backward.
        transfers: Of collectives and codecs.
    """

    computation: Basis
    transfers: Basis

    @property
    def step(self) -> Basis:
        """Of the step: the weaker of the two."""
        return min(self.computation, self.transfers, key=_WORST_FIRST.index)


def provenance(job: TrainingJob, row: PricedPlan) -> Provenance:
    """What a plan's step rests on."""
    bases = [
        rates.computing_basis(part, row.plan, job.seq)
        for rates in job.rates.views
        for part in job.parts(row.plan)
        if part.matrices or part.attention_width or part.routed
    ]
    computation: Basis = min(bases, key=_WORST_FIRST.index, default=_WORST_FIRST[0])
    return Provenance(computation, _transfers(job, row))


def _transfers(job: TrainingJob, row: PricedPlan) -> Basis:
    """Of collectives and codecs: a profile's rates say whether a step asked for something that was not measured."""
    if not isinstance(job.rates, ProfiledRates):
        return "extrapolated"
    rates = ProfiledRates(job.rates.profile, job.model, job.compute_dtype, job.rates.quartile)
    price_plan(replace(job, rates=rates), row.plan)
    return "extrapolated" if rates.transfers_extrapolated else "measured here"
