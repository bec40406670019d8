"""Plans with islands for a loss that the user would give: chosen among what the study behind the loss law has tried.

The law says how far islands end above synchronous training: a fit to a study of islands (docs/islands.md), and where it
ends.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from pydantic import Field

from thinwire.errors import SpecError
from thinwire.plan.priced import PricedPlan, Simulations
from thinwire.plan.search import best_plans, elsewhere
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import Plan, first_nodes
from thinwire.spec.base import Count, Positive, Spec
from thinwire.spec.plan_parts.islands import Islands, OuterOptimizer

_TRIED = 10
"""Plans of an island to try for one that still fits with what islands keep."""

LAW_FILE = "loss_law.json"
"""The law in the package. ``thinwire bench islands --law`` of the tag evidence-0.2 (commit 25a50cb) wrote it."""


class ExchangeWay(Spec):
    """A way to exchange, as an arm of the study used it."""

    name: str = Field(description="for tables")
    islands: dict[str, Any] = Field(description="keys of a plan's islands table, without count, every and outer")
    percent: float = Field(description="loss above that of the exact exchange with as many islands and steps")


class StudiedOuter(Spec):
    """The outer optimizer of the study's arms with as many inner steps."""

    every: Count = Field(description="inner steps from one exchange to the next")
    optimizer: OuterOptimizer = Field(description="keys of a plan's islands.outer")


class LossLaw(Spec):
    """Percent of validation loss above synchronous training at equal tokens, over islands and inner steps.

    The law is ``(1 - 1/K) (base + slope log2 H)`` for K islands that exchange exactly every H steps, by least squares
    over runs, and what another way to exchange added with four islands and 32 steps.
    """

    parameters: Count = Field(description="of the study's model")
    tokens: Count = Field(description="of a run, those of the trunk among them")
    trunk: int = Field(description="tokens of synchronous training before the islands part")
    tokens_per_step: Count = Field(description="of all islands")
    seeds: Count = Field(description="fewest of an arm")
    islands: tuple[Count, Count] = Field(description="fewest and most islands of the study")
    every: tuple[Count, Count] = Field(description="fewest and most inner steps of the study")
    outers: tuple[StudiedOuter, ...] = Field(
        default=(), description="outer optimizers of the study, by ascending every; without any, plans have the default"
    )
    base: float = Field(description="percent, see the law")
    slope: float = Field(description="percent for every doubling of H, see the law")
    left_out: Positive = Field(description="root mean square error in percent for a run that the fit has not seen")
    ways: tuple[ExchangeWay, ...] = Field(min_length=1, description="ways to exchange; the first is exact")

    @staticmethod
    @cache
    def known() -> LossLaw:
        """The law in the package."""
        return LossLaw.parse(json.loads((files("thinwire.plan") / LAW_FILE).read_text(encoding="utf-8")), LAW_FILE)

    @property
    def of_islands(self) -> str:
        """How many islands the study had."""
        return _range(self.islands)

    def covers(self, count: int, every: int) -> bool:
        """Whether the study had as many islands and steps, or fewer and more."""
        return self.islands[0] <= count <= self.islands[1] and self.every[0] <= every <= self.every[1]

    def outer_at(self, every: int) -> OuterOptimizer:
        """The outer optimizer for as many inner steps: that of the study's arms with at most as many.

        Momentum that suits rare exchanges makes too long steps where exchanges are frequent, so the next smaller
        number decides.
        """
        known = [outer for outer in self.outers if outer.every <= every] or list(self.outers[:1])
        return known[-1].optimizer if known else OuterOptimizer()

    def percent(self, count: int, every: int, way: ExchangeWay) -> float:
        """Loss of so many islands that exchange every so many inner steps, above synchronous training: percent of the
        validation loss, below 0 where islands ended lower.

        Raises:
            SpecError: The study had no such islands.
        """
        if not self.covers(count, every):
            raise SpecError(
                "islands",
                f"count = {count}, every = {every} is outside the study behind the loss law, which had "
                f"{self.of_islands} islands and every = {_range(self.every)}",
            )
        return (1 - 1 / count) * (self.base + self.slope * math.log2(every)) + way.percent


def _range(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low} to {high}"


def parse_budget(text: str) -> float:
    """Percent of a loss that a user would give for speed, from text such as ``0.5%``.

    Raises:
        SpecError: It is no such text.
    """
    number, sign, rest = text.strip().partition("%")
    try:
        percent = float(number)
    except ValueError:
        percent = math.nan
    if not sign or rest or not 0 < percent < 100:
        raise SpecError("--loss-budget", [f"{text!r} is no share of the loss: give percent above 0, such as 0.5%"])
    return percent


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
