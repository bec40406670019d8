"""Which host takes which place of the mesh: groups that cross nodes stay below one leaf switch where they can.

A plan's factors nest: ``P`` over a few nodes, ``OS`` over more. The hosts of a block of nodes that belongs together are
taken from one leaf; what is left over of several leaves makes the blocks that cannot avoid the spine, of as few leaves
as possible. Launchers take the result as an order of hosts: torchrun's node ranks, an MPI rankfile, or SLURM's
arbitrary distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from thinwire.errors import SpecError
from thinwire.spec import Plan

__all__ = ["crossings", "hostfile", "place", "rankfile", "read_hosts", "slurm_hostfile"]


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


def place(plan: Plan, hosts: Mapping[str, str]) -> list[str]:
    """Hosts in the order of the mesh's nodes.

    Args:
        plan: whose factors say which nodes belong together.
        hosts: leaf of every host, in the scheduler's order, which settles ties.

    Raises:
        SpecError: if there are not as many hosts as the mesh has nodes.
    """
    if len(hosts) != plan.mesh.nodes:
        raise SpecError(
            "hosts", [f"there are {len(hosts)} hosts, and the mesh {plan.mesh} has {plan.mesh.nodes} nodes"]
        )
    return _ordered(list(hosts), hosts, _blocks(plan))


def crossings(plan: Plan, order: Sequence[str], hosts: Mapping[str, str]) -> int:
    """How many groups of nodes that belong together cross the spine, over all factors: less is better.

    Args:
        plan: whose factors they are.
        order: of the hosts.
        hosts: leaf of every host.
    """
    return sum(
        len({hosts[host] for host in order[start : start + size]}) - 1
        for size in _blocks(plan)
        for start in range(0, len(order), size)
    )


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


def _blocks(plan: Plan) -> list[int]:
    """Nodes that belong together, by factor, largest first."""
    sizes = {factor.nodes for factor in (plan.params, plan.grads, plan.optimizer, plan.secondary) if factor is not None}
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
