"""Assigns hosts to the nodes of the mesh so that groups that cross nodes stay below one leaf switch where possible.

``program/ordering.py`` makes orders that suit a plan's factors. The simulator picks the one with the shortest step, at
the prices that the search uses. Launchers take the result as an order of hosts: torchrun's node ranks, an MPI rankfile,
or SLURM's arbitrary distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from thinwire.errors import SpecError
from thinwire.plan.priced import price_plan
from thinwire.plan.search import elsewhere
from thinwire.plan.training_job import TrainingJob
from thinwire.program import Traffic, crossing_bytes, host_orders, leaf_by_leaf, lower, traffic_across
from thinwire.spec import Plan


@dataclass(frozen=True)
class Placed:
    """An order of hosts with its costs.

    Attributes:
        order: Hosts, in the order of the mesh's nodes.
        seconds: Seconds of the plan's step in this order.
        crossing: Fraction of the bytes between nodes that cross from one leaf to another.
    """

    order: tuple[str, ...]
    seconds: float
    crossing: float


def leaf_numbers(hosts: Mapping[str, str], order: Iterable[str] | None = None) -> tuple[int, ...]:
    """Number the leaves, and return each host's number as a cluster specification needs it, from the leaf of every
    host.

    Without an order of the hosts, they stand leaf by leaf, to compare plans before their hosts are ordered.
    """
    number = {leaf: index for index, leaf in enumerate(dict.fromkeys(hosts.values()))}
    return tuple(number[hosts[host]] for host in (leaf_by_leaf(hosts) if order is None else order))


def place(job: TrainingJob, plan: Plan, hosts: Mapping[str, str]) -> Placed:
    """Find the order of hosts with the shortest step; of equally short ones, the order that crosses the spine least.

    Args:
        job: Training job with the rates that price the step. If its cluster has no figure for the spine, all orders
            take equally long. Its groups of unlike nodes are those of the hosts as given.
        plan: Plan with the factors that define which nodes belong together.
        hosts: Leaf of every host, in the scheduler's order, which breaks ties.

    Raises:
        SpecError: The number of hosts is not the cluster's number of nodes.
    """
    if len(hosts) != job.cluster.nodes:
        raise SpecError("hosts", [f"there are {len(hosts)} hosts, and the cluster has {job.cluster.nodes} nodes"])
    traffic = _traffic(job, plan)
    orders = (placed(job, plan, order, hosts, traffic) for order in host_orders(plan, hosts))
    return min(orders, key=lambda placement: (placement.seconds, placement.crossing))


def placed(
    job: TrainingJob, plan: Plan, order: Sequence[str], hosts: Mapping[str, str], traffic: Traffic | None = None
) -> Placed:
    """Price an order of hosts, which are the nodes of the mesh; arguments as of :func:`place`, and the plan's traffic
    where it is known."""
    traffic = _traffic(job, plan) if traffic is None else traffic
    node_of = {host: node for node, host in enumerate(hosts)}
    given = job.cluster.with_(leaves=leaf_numbers(hosts, hosts))
    cluster = given.in_order([node_of[host] for host in order])
    seconds = price_plan(elsewhere(job, cluster), plan).seconds
    return Placed(tuple(order), seconds, crossing_bytes(traffic, cluster.leaf_of_nodes) / max(1, sum(traffic.values())))


def hostfile(order: Sequence[str]) -> str:
    """A file with one host per line; the line number, from 0, is torchrun's ``--node-rank``."""
    return "".join(f"{host}\n" for host in order)


def rankfile(order: Sequence[str], local: int) -> str:
    """An Open MPI rankfile with one line per rank."""
    return "".join(
        f"rank {node * local + slot}={host} slot={slot}\n" for node, host in enumerate(order) for slot in range(local)
    )


def slurm_hostfile(order: Sequence[str], local: int) -> str:
    """A file for ``SLURM_HOSTFILE`` with ``srun --distribution=arbitrary``, with one line per task."""
    return "".join(f"{host}\n" for host in order for _ in range(local))


def _traffic(job: TrainingJob, plan: Plan) -> Traffic:
    return traffic_across(lower(plan, job.units(plan), micro_batches=plan.micro_batches))
