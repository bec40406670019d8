"""Assigns hosts to the nodes of the mesh so that groups that cross nodes stay below one leaf switch where possible.

A plan's factors nest: ``P`` spans a few nodes, and ``OS`` spans more. Nodes that belong to one block are taken from one
leaf. The remaining hosts of several leaves form the blocks that have to cross the spine, from as few leaves as
possible. This is done for all factors and for subsets of them, and the simulator picks the order with the shortest
step, at the prices that the search uses. Launchers take the result as an order of hosts: torchrun's node ranks, an MPI
rankfile, or SLURM's arbitrary distribution.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinwire.cost.rates import hop_route
from thinwire.errors import SpecError
from thinwire.plan.search import candidate, elsewhere
from thinwire.plan.training_job import TrainingJob
from thinwire.program import Kind, Scope, lower
from thinwire.spec import Fabric, Plan

__all__ = ["Placed", "hostfile", "leaf_numbers", "place", "placed", "rankfile", "read_hosts", "slurm_hostfile"]


def read_hosts(path: Path) -> dict[str, str]:
    """Hosts and their leaves, in the scheduler's order.

    Args:
        path: File with one line per host: its name and the name of its leaf switch. ``#`` begins a comment.

    Returns:
        The leaf of every host, by host.

    Raises:
        SpecError: The file cannot be read, a line is malformed, or a host appears twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(str(path), [f"cannot be read: {error}"]) from error
    hosts: dict[str, str] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            problems.append(
                f"line {number}: {line.strip()!r} should be a host and its leaf, for example 'node07 leaf2'"
            )
        elif words[0] in hosts:
            problems.append(f"line {number}: host {words[0]!r} stands there twice")
        else:
            hosts[words[0]] = words[1]
    if problems:
        raise SpecError(str(path), problems)
    return hosts


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
    """Number the leaves, and return each host's number as a cluster specification needs it.

    Args:
        hosts: Leaf of every host.
        order: Order of the hosts; default: leaf by leaf, to compare plans before their hosts are ordered.
    """
    number = {leaf: index for index, leaf in enumerate(dict.fromkeys(hosts.values()))}
    return tuple(number[hosts[host]] for host in (_ordered(list(hosts), hosts, []) if order is None else order))


def place(job: TrainingJob, plan: Plan, hosts: Mapping[str, str]) -> Placed:
    """Find the order of hosts with the shortest step; of equally short ones, the order that crosses the spine least.

    Args:
        job: Training job with the rates that price the step. If its cluster has no figure for the spine, all orders
            take equally long.
        plan: Plan with the factors that define which nodes belong together.
        hosts: Leaf of every host, in the scheduler's order, which breaks ties.

    Raises:
        SpecError: The number of hosts is not the cluster's number of nodes.
    """
    if len(hosts) != job.cluster.nodes:
        raise SpecError("hosts", [f"there are {len(hosts)} hosts, and the cluster has {job.cluster.nodes} nodes"])
    traffic = _traffic(job, plan)
    placed = (_placed(job, plan, order, hosts, traffic) for order in _candidates(plan, hosts))
    return min(placed, key=lambda placement: (placement.seconds, placement.crossing))


def placed(job: TrainingJob, plan: Plan, order: Sequence[str], hosts: Mapping[str, str]) -> Placed:
    """Price an order of hosts.

    Args:
        job: Training job with the rates that price the step.
        plan: The plan.
        order: Hosts, in the order of the mesh's nodes.
        hosts: Leaf of every host.
    """
    return _placed(job, plan, order, hosts, _traffic(job, plan))


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


Traffic = Mapping[tuple[Kind, int, int], int]
"""Bytes that a rank sends to other nodes per step, by kind of hop, nodes in its group, and stride."""


def _traffic(job: TrainingJob, plan: Plan) -> Traffic:
    sent: dict[tuple[Kind, int, int], int] = {}
    for operation in lower(plan, job.units(plan), micro_batches=plan.micro_batches).operations:
        for hop in operation.hops:
            if hop.scope is Scope.ACROSS:
                key = hop.kind, hop.ranks, hop.stride
                sent[key] = sent.get(key, 0) + hop.sent
    return sent


def _placed(job: TrainingJob, plan: Plan, order: Sequence[str], hosts: Mapping[str, str], traffic: Traffic) -> Placed:
    cluster = job.cluster.with_(nodes_per_leaf=None, leaves=leaf_numbers(hosts, order))
    fabric = Fabric(cluster)
    leaving = sum(sent * hop_route(fabric, *key).crossing for key, sent in traffic.items())
    seconds = candidate(elsewhere(job, cluster), plan).seconds
    return Placed(tuple(order), seconds, leaving / max(1, sum(traffic.values())))


def _candidates(plan: Plan, hosts: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
    """The orders to try: the scheduler's, and hosts packed for all factors or for some, because packing for one factor
    may split the groups of another. Also leaf by leaf, for groups that hold one node of every block."""
    blocks, names = _blocks(plan), list(hosts)
    chosen = (some for count in range(len(blocks) + 1) for some in itertools.combinations(blocks, count))
    packed = [tuple(_ordered(names, hosts, some)) for some in chosen]
    strided = [_strided(packed[0], size) for size in blocks if len(names) % size == 0]
    return dict.fromkeys((tuple(names), *packed, *strided))


def _strided(order: Sequence[str], size: int) -> tuple[str, ...]:
    """Put neighbors in ``order`` at the same position of consecutive blocks of ``size`` nodes."""
    count = len(order) // size
    return tuple(order[place * count + block] for block in range(count) for place in range(size))


def _blocks(plan: Plan) -> list[int]:
    """Numbers of nodes per block, one for each factor, largest first."""
    sizes = {factor.nodes for factor in (plan.params, plan.grads, plan.optimizer, plan.secondary) if factor is not None}
    if plan.pp > 1:
        sizes.add(plan.mesh.nodes)  # nodes of a pipeline stage
    return sorted((size for size in sizes if size > 1), reverse=True)


def _ordered(names: Sequence[str], leaf_of: Mapping[str, str], blocks: Sequence[int]) -> list[str]:
    """Take whole blocks from single leaves first; order the remaining hosts with smaller blocks, leaf by leaf."""
    by_leaf = _grouped(names, leaf_of)
    if not blocks:
        return [name for leaf in by_leaf.values() for name in leaf]
    size, *smaller = blocks
    placed: list[str] = []
    rest: list[str] = []
    for leaf in by_leaf.values():
        whole = len(leaf) // size * size
        placed += leaf[:whole]
        rest += leaf[whole:]
    return placed + _filled(rest, leaf_of, size, smaller)


def _filled(names: Sequence[str], leaf_of: Mapping[str, str], size: int, smaller: Sequence[int]) -> list[str]:
    """Fill blocks from the remaining hosts: each takes the largest remainder of a leaf first, then the best fit."""
    by_leaf = _grouped(names, leaf_of)
    order: list[str] = []
    while by_leaf:
        room, block = size, []
        while room and by_leaf:
            fitting = [leaf for leaf, left in by_leaf.items() if len(left) <= room]
            leaf = max(fitting or by_leaf, key=lambda leaf: len(by_leaf[leaf]))
            taken, left = by_leaf[leaf][:room], by_leaf[leaf][room:]
            block += taken
            room -= len(taken)
            if left:
                by_leaf[leaf] = left
            else:
                del by_leaf[leaf]
        order += _ordered(block, leaf_of, smaller)
    return order


def _grouped(names: Iterable[str], leaf_of: Mapping[str, str]) -> dict[str, list[str]]:
    names_of: dict[str, list[str]] = {}
    for name in names:
        names_of.setdefault(leaf_of[name], []).append(name)
    return names_of
