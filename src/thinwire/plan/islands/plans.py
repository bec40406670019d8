"""Plans with islands for a loss that the user would give: chosen among what the study behind the loss law has tried."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thinwire.errors import SpecError
from thinwire.plan.islands.loss_law import ExchangeWay, LossLaw
from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.search import best_plans, elsewhere
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Plan, first_nodes
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
    fewest, most = law.every
    bounds = [
        (law.percent(count, every, way) + law.left_out, count, every, way)
        for count in _counts(job, law)
        for way in law.ways
        if not (elastic and way.islands.get("delay"))
        for every in (1 << power for power in range(most.bit_length()) if fewest <= 1 << power <= most)
    ]
    # The rarest exchange comes last, and stays.
    rarest = {(count, way.name): (count, every, way) for bound, count, every, way in bounds if bound <= budget}
    if not rarest:
        bound, count, every, way = min(bounds, key=lambda found: found[0])
        raise SpecError(
            "--loss-budget",
            f"{budget:g}% is less than the loss law can promise: the least is {bound:.2f}%, with {count} islands that "
            f"exchange every {every} steps ({way.name}); raise the budget, or leave the option out",
        )
    choices = rarest.values()
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
            f"{nodes} nodes cannot be divided into {law.of_islands} islands of whole nodes, which is what the "
            "study behind the loss law had: change the number of nodes, or leave the option out",
        )
    return counts


def _insides(job: TrainingJob, count: int, simulations: Simulations) -> list[Plan]:
    """The best plans of one island, best first."""
    # All islands have one plan: without its groups, a cluster has the figures of its weakest nodes.
    cluster = first_nodes(job.cluster.with_(groups=()), job.cluster.nodes // count)
    island = elsewhere(job, cluster, tokens_per_step=job.tokens_per_step // count)
    return [candidate.plan for candidate in best_plans(island, _TRIED, simulations).candidates]
