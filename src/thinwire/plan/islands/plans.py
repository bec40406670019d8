"""Plans with islands for a loss that the user would give: chosen among what the study behind the loss law has tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from thinwire.errors import SpecError
from thinwire.plan.islands.loss_law import ExchangeWay, LossLaw
from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.search import Search, elsewhere
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Plan
from thinwire.spec.plan_parts.islands import Islands

_TRIED = 10
"""Plans of an island to try for one that still fits with what islands keep."""


@dataclass(frozen=True)
class IslandPlan:
    """A plan with islands, and what the law says of its loss.

    Attributes:
        candidate: The plan with its predicted step and memory.
        way: How its islands exchange.
        percent: Loss above synchronous training at equal tokens, in percent, by the law.
    """

    candidate: PricedPlan
    way: ExchangeWay
    percent: float

    @property
    def islands(self) -> Islands:
        """The plan's islands."""
        islands = self.candidate.plan.islands
        assert islands is not None
        return islands


def island_plans(
    job: TrainingJob, budget: float, law: LossLaw, simulations: Simulations | None = None, *, elastic: bool = False
) -> list[IslandPlan]:
    """The fastest plans with islands whose loss stays within a budget, by the law and its error.

    An island is one node or several. Inside, it has the best plan for so many nodes that still fits. Of each way to
    exchange, only the rarest exchange within the budget is simulated: a rarer one never sends more.

    Args:
        job: The job, without tensor and pipeline parallelism.
        budget: Percent of the loss.
        law: The loss law.
        simulations: What is known of earlier searches for the same model.
        elastic: Whether islands may vanish and come back. They exchange without a delay then.

    Returns:
        Plans that fit into memory, fastest first. Empty if none does.

    Raises:
        SpecError: The nodes cannot be divided into as many islands as the study had, or no islands stay within the
            budget.
    """
    counts = _counts(job, law)
    ways = [way for way in law.ways if not (elastic and way.islands.get("delay"))]
    choices = [choice for count in counts for choice in _within(law, ways, count, budget)]
    if not choices:
        raise SpecError("--loss-budget", [_least(law, ways, counts, budget)])
    simulations = simulations or Simulations()
    insides = {count: _insides(job, count, simulations) for count in {count for count, _, _ in choices}}
    made = []
    for count, every, way in choices:
        outer = law.outer_at(every).to_dict()
        islands = {"count": count, "every": every, "outer": outer, **way.islands}
        priced = (simulations.price(job, plan.with_(islands=islands)) for plan in insides[count])
        candidate = next((one for one in priced if one.fits), None)  # what islands keep needs memory, too
        if candidate is not None:
            # Elastic islands send the same while all are there, so the same price is theirs.
            plan = candidate.plan.with_(islands={"elastic": elastic})
            made.append(IslandPlan(replace(candidate, plan=plan), way, law.percent(count, every, way)))
    return sorted(made, key=lambda plan: (plan.candidate.seconds, plan.percent))


def _counts(job: TrainingJob, law: LossLaw) -> list[int]:
    """How many islands the nodes can be divided into, within the law's range."""
    nodes, (fewest, most) = job.cluster.nodes, law.islands
    counts = [count for count in range(fewest, most + 1) if nodes % count == 0]
    if not counts:
        raise SpecError(
            "--loss-budget",
            [
                f"{nodes} nodes cannot be divided into {law.of_islands} islands of whole nodes, which is what the "
                "study behind the loss law had: change the number of nodes, or leave the option out"
            ],
        )
    return counts


def _within(
    law: LossLaw, ways: Sequence[ExchangeWay], count: int, budget: float
) -> Iterator[tuple[int, int, ExchangeWay]]:
    """Of each way to exchange, the most inner steps whose loss stays within the budget."""
    for way in ways:
        rarest = max((every for every in _steps(law) if _bound(law, count, every, way) <= budget), default=None)
        if rarest is not None:
            yield count, rarest, way


def _bound(law: LossLaw, count: int, every: int, way: ExchangeWay) -> float:
    return law.percent(count, every, way) + law.left_out


def _steps(law: LossLaw) -> list[int]:
    """Powers of two in the law's range."""
    fewest, most = law.every
    return [1 << power for power in range(most.bit_length()) if fewest <= 1 << power <= most]


def _least(law: LossLaw, ways: Sequence[ExchangeWay], counts: list[int], budget: float) -> str:
    """Why no islands stay within the budget."""
    bound, count, every, way = min(
        (
            (_bound(law, count, every, way), count, every, way)
            for count in counts
            for every in _steps(law)
            for way in ways
        ),
        key=lambda found: found[0],
    )
    return (
        f"{budget:g}% is less than the loss law can promise: the least is {bound:.2f}%, with {count} islands that "
        f"exchange every {every} steps ({way.name}); raise the budget, or leave the option out"
    )


def _insides(job: TrainingJob, count: int, simulations: Simulations) -> list[Plan]:
    """The best plans of one island, best first."""
    nodes = job.cluster.nodes // count
    leaves = job.cluster.leaves
    cluster = job.cluster.with_(nodes=nodes, leaves=leaves[:nodes] if isinstance(leaves, tuple) else leaves)
    island = elsewhere(job, cluster, tokens_per_step=job.tokens_per_step // count)
    return [candidate.plan for candidate in Search(island, simulations).run(_TRIED).candidates]
