"""Which host takes which place of the mesh: groups that cross nodes stay below one leaf switch where they can.

A plan's factors nest: ``P`` over a few nodes, ``OS`` over more. The hosts of a block of nodes that belongs together are
taken from one leaf; what is left over of several leaves makes the blocks that cannot avoid the spine, of as few leaves
as possible. That is done for all factors and for some of them, and the simulator says in which order the plan's step is
shortest, at the prices by which the search compares plans. Launchers take the result as an order of hosts: torchrun's
node ranks, an MPI rankfile, or SLURM's arbitrary distribution.
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
        path: a line for each host: its name, and the name of its leaf switch; ``#`` begins a comment.

    Raises:
        SpecError: the file cannot be read, or a line is malformed, or a host appears twice.
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
    """An order of hosts, and what it is worth.

    Attributes:
        order: of the hosts, as the nodes of the mesh.
        seconds: of the plan's step in that order.
        crossing: share of what nodes send to each other that leaves its leaf.
    """

    order: tuple[str, ...]
    seconds: float
    crossing: float


def leaf_numbers(hosts: Mapping[str, str], order: Iterable[str] | None = None) -> tuple[int, ...]:
    """Number of every host's leaf, as a cluster has it.

    Args:
        hosts: leaf of every host.
        order: of the hosts; leaf by leaf by default, so that plans can be compared before their hosts are ordered.
    """
    number = {leaf: index for index, leaf in enumerate(dict.fromkeys(hosts.values()))}
    return tuple(number[hosts[host]] for host in (_ordered(list(hosts), hosts, []) if order is None else order))


def place(job: TrainingJob, plan: Plan, hosts: Mapping[str, str]) -> Placed:
    """Hosts in the order of the mesh's nodes in which the plan's step is shortest; of several, the one that crosses the
    spine least.

    Args:
        job: whose rates price the step. Without a figure for the spine all orders take as long.
        plan: whose factors say which nodes belong together.
        hosts: leaf of every host, in the scheduler's order, which settles ties.

    Raises:
        SpecError: if there are not as many hosts as the cluster has nodes.
    """
    if len(hosts) != job.cluster.nodes:
        raise SpecError("hosts", [f"there are {len(hosts)} hosts, and the cluster has {job.cluster.nodes} nodes"])
    traffic = _traffic(job, plan)
    placed = (_placed(job, plan, order, hosts, traffic) for order in _candidates(plan, hosts))
    return min(placed, key=lambda found: (found.seconds, found.crossing))


def placed(job: TrainingJob, plan: Plan, order: Sequence[str], hosts: Mapping[str, str]) -> Placed:
    """What an order is worth.

    Args:
        job: whose rates price the step.
        plan: whose step it is.
        order: of the hosts.
        hosts: leaf of every host.
    """
    return _placed(job, plan, order, hosts, _traffic(job, plan))


def hostfile(order: Sequence[str]) -> str:
    """One host a line: its line number is torchrun's ``--node-rank``."""
    return "".join(f"{host}\n" for host in order)


def rankfile(order: Sequence[str], local: int) -> str:
    """An Open MPI rankfile."""
    return "".join(
        f"rank {node * local + slot}={host} slot={slot}\n" for node, host in enumerate(order) for slot in range(local)
    )


def slurm_hostfile(order: Sequence[str], local: int) -> str:
    """For ``SLURM_HOSTFILE`` with ``srun --distribution=arbitrary``: a line for each task."""
    return "".join(f"{host}\n" for host in order for _ in range(local))


Traffic = Mapping[tuple[Kind, int, int], int]
"""Bytes that a rank sends to other nodes in a step, by kind of hop, nodes of its group and stride."""


def _traffic(job: TrainingJob, plan: Plan) -> Traffic:
    found: dict[tuple[Kind, int, int], int] = {}
    for operation in lower(plan, job.units(plan), micro_batches=plan.micro_batches).operations:
        for hop in operation.hops:
            if hop.scope is Scope.ACROSS:
                key = hop.kind, hop.ranks, hop.stride
                found[key] = found.get(key, 0) + hop.sent
    return found


def _placed(job: TrainingJob, plan: Plan, order: Sequence[str], hosts: Mapping[str, str], traffic: Traffic) -> Placed:
    cluster = job.cluster.with_(nodes_per_leaf=None, leaves=leaf_numbers(hosts, order))
    fabric = Fabric(cluster)
    leaving = sum(sent * hop_route(fabric, *key).crossing for key, sent in traffic.items())
    seconds = candidate(elsewhere(job, cluster), plan).seconds
    return Placed(tuple(order), seconds, leaving / max(1, sum(traffic.values())))


def _candidates(plan: Plan, hosts: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
    """The scheduler's order, and hosts packed for all factors or for some: what suits one may tear another apart. And
    leaf by leaf for the groups between blocks, which hold one node of each."""
    blocks, names = _blocks(plan), list(hosts)
    chosen = (some for count in range(len(blocks) + 1) for some in itertools.combinations(blocks, count))
    packed = [tuple(_ordered(names, hosts, some)) for some in chosen]
    strided = [_strided(packed[0], size) for size in blocks if len(names) % size == 0]
    return dict.fromkeys((tuple(names), *packed, *strided))


def _strided(order: Sequence[str], size: int) -> tuple[str, ...]:
    """Neighbours in ``order`` put into the same place of blocks of ``size`` that follow each other."""
    count = len(order) // size
    return tuple(order[place * count + block] for block in range(count) for place in range(size))


def _blocks(plan: Plan) -> list[int]:
    """Nodes that belong together, by factor, largest first."""
    sizes = {factor.nodes for factor in (plan.params, plan.grads, plan.optimizer, plan.secondary) if factor is not None}
    if plan.pp > 1:
        sizes.add(plan.mesh.nodes)  # of a stage
    return sorted((size for size in sizes if size > 1), reverse=True)


def _ordered(names: Sequence[str], leaf_of: Mapping[str, str], blocks: Sequence[int]) -> list[str]:
    """Whole blocks of one leaf first; the rest again with smaller blocks, leaf by leaf."""
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
    """Blocks of what is left of the leaves: each takes the largest remainder first, then what fills it best."""
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
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(leaf_of[name], []).append(name)
    return found
