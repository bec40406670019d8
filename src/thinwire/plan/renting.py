"""What a cluster costs for the tokens that it trains: prices, spot nodes, failures, and how many nodes to rent.

A failure loses what was done since the last checkpoint, and the time of a restart. Frequent checkpoints lose little to
failures and much to saving. Young (1974, "A first order approximation to the optimum checkpoint interval") found the
interval that loses least where failures are rare: the square root of twice the cost of a checkpoint times the mean time
between failures. Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart dumps") wrote down
the whole expectation for failures that come independently at a constant rate, also during a restart and a checkpoint.
Its optimum is the root of one equation, which is solved here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from thinwire.errors import SpecError, UsageError
from thinwire.plan.explain import shortage
from thinwire.plan.priced import PricedPlan
from thinwire.plan.search import Searched, elsewhere, search_wider
from thinwire.plan.training_job import TrainingJob
from thinwire.spec import ClusterSpec, Failures, NodeGroup, first_nodes
from thinwire.units import format_bytes, format_duration

_MOST_GROUPS = 5
"""Groups of nodes of which every selection is tried."""


_LARGEST_COST = 30.0
"""Above it, the best interval is the mean time between failures to the last digit."""

_LARGEST_EXPONENT = 15.0
"""Above it, training takes millions of times as long as without failures, which is as good as infinite."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The useful part of a job's time.

    Attributes:
        share: Seconds of training that count over seconds that pass, from 0 to 1; 0 if it makes no progress.
        interval: Seconds of training between two checkpoints; infinite if nothing fails.
        mean_time: Seconds between two failures of the job; infinite if nothing fails.
    """

    share: float
    interval: float
    mean_time: float


@dataclass(frozen=True, slots=True)
class Offer:
    """One way to rent the nodes of a cluster.

    Attributes:
        spot: Labels of the groups that are rented as spot nodes.
        per_hour: Price of all nodes for an hour; ``None`` if prices are unknown.
        goodput: The useful part of the time.
    """

    spot: tuple[str, ...]
    per_hour: float | None
    goodput: Goodput

    @property
    def label(self) -> str:
        """``on demand``, or which nodes are spot nodes."""
        return f"spot: {', '.join(self.spot)}" if self.spot else "on demand"


@dataclass(frozen=True, slots=True)
class Rental:
    """A plan on nodes that are rented in one way.

    Attributes:
        candidate: The plan with its predicted step.
        offer: How the nodes are rented.
        tokens_per_second: Tokens in a second, failures included.
        per_billion: Price of 10^9 tokens, failures included; ``None`` if prices are unknown.
    """

    candidate: PricedPlan
    offer: Offer
    tokens_per_second: float
    per_billion: float | None


@dataclass(frozen=True)
class SweptNodes:
    """One number of nodes, or one selection of groups, with the best plan for it.

    Attributes:
        nodes: Number of nodes.
        label: Name of the selection of groups; empty where the number says it all.
        job: The job on these nodes; ``None`` if it cannot be trained there.
        searched: What the search found.
        rental: The best plan, rented in the cheapest way; ``None`` if there is none.
        reason: Why there is none.
    """

    nodes: int
    label: str
    job: TrainingJob | None
    searched: Searched | None
    rental: Rental | None
    reason: str = ""


def offers(cluster: ClusterSpec) -> list[Offer]:
    """Every way to rent the nodes: all on demand first, then every selection of groups as spot nodes."""
    groups = _groups(cluster)
    able = [number for number, group in enumerate(groups) if group.spot is not None]
    if len(able) > _MOST_GROUPS:
        choices: Iterable[tuple[int, ...]] = [(), tuple(able)]
    else:
        choices = itertools.chain.from_iterable(itertools.combinations(able, n) for n in range(len(able) + 1))
    failures = cluster.failures or Failures()
    return [_offer(groups, cluster.gpus_per_node, frozenset(spot), failures) for spot in choices]


def rentals(job: TrainingJob, candidate: PricedPlan) -> list[Rental]:
    """A plan on the job's nodes, rented in every way; see :func:`offers`."""
    made = []
    for offer in offers(job.cluster):
        rate = job.tokens_per_step / candidate.seconds * offer.goodput.share
        price = None if offer.per_hour is None else math.inf if not rate else offer.per_hour / 3600 / rate * 1e9
        made.append(Rental(candidate, offer, rate, price))
    return made


def cheapest(options: Sequence[Rental]) -> Rental:
    """The rental with the lowest price per token; the first one if prices are unknown."""
    priced = [option for option in options if option.per_billion is not None]
    return min(priced, key=lambda option: option.per_billion or 0.0) if priced else options[0]


def sweep_nodes(job: TrainingJob, counts: Iterable[int]) -> Iterator[SweptNodes]:
    """The best plan for every number of nodes: the first ones of the job's cluster.

    Raises:
        SpecError: The cluster has fewer nodes, and describes them one by one.
    """
    for count in counts:
        yield _best_on(job, first_nodes(job.cluster, count), "")


def parts_of(job: TrainingJob) -> Iterator[SweptNodes]:
    """The best plan for the whole cluster and for every selection of its groups, if it has any.

    Raises:
        UsageError: A price is missing.
    """
    groups = _groups(job.cluster)
    unpriced = [group.label for group in groups if group.price_per_gpu_hour is None]
    if unpriced:
        where = f" of the groups {', '.join(unpriced)}" if job.cluster.groups else ""
        raise UsageError(
            f"--objective cost needs the price of a GPU{where}: price_per_gpu_hour in the cluster's file, or --set "
            "cluster.price_per_gpu_hour=2"
        )
    yield _best_on(job, job.cluster, "all" if job.cluster.groups else "")
    if len(groups) > _MOST_GROUPS:
        sizes: Sequence[int] = (len(groups) - 1,)
    else:
        sizes = range(len(groups) - 1, 0, -1)
    for chosen in itertools.chain.from_iterable(itertools.combinations(groups, size) for size in sizes):
        cluster = job.cluster.with_(groups=chosen, leaves=None)
        yield _best_on(job, cluster, " + ".join(group.label for group in chosen))


def _best_on(job: TrainingJob, cluster: ClusterSpec, label: str) -> SweptNodes:
    try:
        smaller = elsewhere(job, cluster)
    except SpecError as error:
        return SweptNodes(cluster.nodes, label, None, None, None, "; ".join(error.problems))
    smaller, searched = search_wider(smaller, top=1)
    if not searched.candidates:
        _, lacking = shortage(smaller)
        why = f"does not fit: every plan lacks at least {format_bytes(lacking)} on a GPU"
        return SweptNodes(cluster.nodes, label, smaller, searched, None, why)
    chosen = cheapest(rentals(smaller, searched.candidates[0]))
    if not chosen.tokens_per_second:
        between = format_duration(chosen.offer.goodput.mean_time)
        why = f"fails every {between}, before it makes progress"
        return SweptNodes(cluster.nodes, label, smaller, searched, None, why)
    return SweptNodes(cluster.nodes, label, smaller, searched, chosen)


def _groups(cluster: ClusterSpec) -> tuple[NodeGroup, ...]:
    """The groups of a cluster; equal nodes are one."""
    if cluster.groups:
        return cluster.groups
    price, spot = cluster.price_per_gpu_hour, cluster.spot
    return (NodeGroup(name="all nodes", nodes=cluster.nodes, price_per_gpu_hour=price, spot=spot),)


def _offer(groups: Sequence[NodeGroup], gpus: int, spot: frozenset[int], failures: Failures) -> Offer:
    rates, prices, losses = [], [], []
    for number, group in enumerate(groups):
        leased = group.spot if number in spot else None
        fails = 0.0 if failures.mtbf is None else group.nodes / failures.mtbf
        taken = 0.0 if leased is None else group.nodes * leased.interruptions_per_hour / 3600
        rates += [fails + taken]
        losses += [fails * failures.restart + taken * (failures.restart + (leased.replacement if leased else 0.0))]
        price = group.price_per_gpu_hour
        prices += [None if price is None else price * gpus * group.nodes * (1 - (leased.discount if leased else 0.0))]
    rate = sum(rates)
    restart = sum(losses) / rate if rate else 0.0
    mean_time = 1 / rate if rate else math.inf
    share = goodput(mean_time, failures.checkpoint, restart, failures.interval)
    known = [price for price in prices if price is not None]
    return Offer(
        tuple(group.label for number, group in enumerate(groups) if number in spot),
        sum(known) if len(known) == len(prices) else None,
        share,
    )


# -- how much of its time a job that fails now and then makes progress, and how often it should save ------------------


def goodput(mean_time: float, checkpoint: float, restart: float, interval: float | None = None) -> Goodput:
    """The useful part of a job's time.

    Args:
        mean_time: Mean seconds between two failures of the job, which is that of a node over the number of nodes.
        checkpoint: Seconds for which a checkpoint holds training up, above 0.
        restart: Seconds from a failure to the first new step.
        interval: Seconds of training between two checkpoints; ``None``: those that lose least.
    """
    if math.isinf(mean_time):
        share = 1.0 if interval is None else interval / (interval + checkpoint)
        return Goodput(share, math.inf if interval is None else interval, mean_time)
    chosen = best_interval(mean_time, checkpoint) if interval is None else interval
    return Goodput(useful_share(mean_time, checkpoint, restart, chosen), chosen, mean_time)


def useful_share(mean_time: float, checkpoint: float, restart: float, interval: float) -> float:
    """Seconds of training over the expected seconds that they take (Daly 2006, the complete model)."""
    exponent = (interval + checkpoint + restart) / mean_time
    if exponent > _LARGEST_EXPONENT:
        return 0.0
    expected = mean_time * math.exp(restart / mean_time) * math.expm1((interval + checkpoint) / mean_time)
    return interval / expected


def best_interval(mean_time: float, checkpoint: float) -> float:
    """Seconds of training between two checkpoints that lose least.

    The derivative of :func:`useful_share` vanishes where ``exp(x + c) (1 - x) = 1``, with interval and cost of a
    checkpoint in units of the mean time between failures. The left side falls from above 1 to 0 between 0 and 1.

    Args:
        mean_time: Mean seconds between two failures of the job.
        checkpoint: Seconds for which a checkpoint holds training up, above 0.
    """
    cost = min(checkpoint / mean_time, _LARGEST_COST)
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        if middle + cost + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mean_time
