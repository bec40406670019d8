"""Orders of hosts for the nodes of the mesh, so that groups that cross nodes stay below one leaf where possible.

A plan's factors nest: ``P`` spans a few nodes, and ``OS`` spans more. Nodes that belong to one block are taken from one
leaf. The remaining hosts of several leaves form the blocks that have to cross the spine, from as few leaves as
possible. This is done for all factors and for subsets of them. The planner prices the orders with its simulator, and
ranks that start a run take the one with the fewest bytes that cross leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from thinwire.program.lower import lower
from thinwire.program.mesh import Kind, Scope
from thinwire.program.shares import Even
from thinwire.program.step import BufferInfo, StepProgram, UnitInfo
from thinwire.program.wire import ITEMSIZE
from thinwire.spec import Plan
from thinwire.spec.machines.fabric import crossing_share

Host = TypeVar("Host", bound=Hashable)
Leaf = TypeVar("Leaf", bound=Hashable)

Traffic = Mapping[tuple[Kind, int, int], int]
"""Bytes that a rank sends to other nodes per step, by kind of hop, nodes in its group, and stride."""

_NOMINAL_UNITS = 4
_NOMINAL_SHARE = 1 << 16
"""Units of a model that stands for all, and elements of one rank's share in each: what matters is their proportion."""


def traffic_across(program: StepProgram) -> Traffic:
    """The traffic of a program between nodes."""
    sent: dict[tuple[Kind, int, int], int] = {}
    for operation in program.operations:
        for hop in operation.hops:
            if hop.scope is Scope.ACROSS:
                key = hop.kind, hop.ranks, hop.stride
                sent[key] = sent.get(key, 0) + hop.sent
    return sent


def crossing_bytes(traffic: Traffic, leaves: Sequence[int]) -> float:
    """Bytes per rank and step that cross leaves, given the leaf above each node in the order of the mesh."""
    return sum(
        sent * crossing_share(leaves, ranks, stride, exchange=kind is Kind.REDUCE_SCATTER)
        for (kind, ranks, stride), sent in traffic.items()
    )


def least_crossing(plan: Plan, switches: Sequence[tuple[str, ...]]) -> tuple[tuple[int, ...], float, float]:
    """The order of nodes in which the fewest bytes cross switches, those of every level counted.

    Traffic depends on a model's size by a factor only, so the order needs no model.

    Args:
        plan: The plan.
        switches: Switches above every node, from the leaf upwards. Nodes with fewer levels stand at their top.

    Returns:
        The node at each position of the mesh, and the share of the bytes between nodes that cross leaves, in that order
        and in the given one. Among equals, the given order wins.
    """
    traffic = traffic_across(lower(plan, _nominal_units(plan), micro_batches=plan.micro_batches))
    given = tuple(range(len(switches)))
    levels = [_numbered(switches, level) for level in range(max(map(len, switches)))]
    tree = sorted(given, key=lambda node: [level[node] for level in reversed(levels)])
    orders = [order for level in levels for order in host_orders(plan, {node: level[node] for node in tree})]

    def crossing(order: Sequence[int], level: Sequence[int]) -> float:
        return crossing_bytes(traffic, [level[node] for node in order])

    best = min(dict.fromkeys((given, *orders)), key=lambda order: sum(crossing(order, level) for level in levels))
    total = max(1, sum(traffic.values()))
    return best, crossing(best, levels[0]) / total, crossing(given, levels[0]) / total


def _numbered(switches: Sequence[tuple[str, ...]], level: int) -> list[int]:
    """The number of the switch of a level above each node, in the order in which they appear. A name counts together
    with those above it, so that racks of different rows may be called the same."""
    paths = [names[min(level, len(names) - 1) :] for names in switches]
    numbers = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    return [numbers[path] for path in paths]


def _nominal_units(plan: Plan) -> tuple[UnitInfo, ...]:
    of_axis = plan.optimizer.ranks // plan.params.ranks
    itemsize = ITEMSIZE[plan.compute_dtype]
    share = _NOMINAL_SHARE * plan.world // plan.optimizer.ranks
    buffer = BufferInfo(_NOMINAL_SHARE * plan.world, itemsize, True, Even(share, of_axis))
    return tuple(UnitInfo(f"blocks.{block}", (buffer,), 1, block) for block in range(_NOMINAL_UNITS))


def host_orders(plan: Plan, leaf_of: Mapping[Host, Leaf]) -> Iterable[tuple[Host, ...]]:
    """The orders to try: the given one, and hosts packed for all factors or for some, because packing for one factor
    may split the groups of another. Also leaf by leaf, for groups that hold one node of every block."""
    blocks, names = _blocks(plan), list(leaf_of)
    chosen = (some for count in range(len(blocks) + 1) for some in itertools.combinations(blocks, count))
    packed = [tuple(_ordered(names, leaf_of, some)) for some in chosen]
    strided = [_strided(packed[0], size) for size in blocks if len(names) % size == 0]
    return dict.fromkeys((tuple(names), *packed, *strided))


def leaf_by_leaf(leaf_of: Mapping[Host, Leaf]) -> list[Host]:
    """The hosts of one leaf after those of another."""
    return _ordered(list(leaf_of), leaf_of, [])


def _strided(order: Sequence[Host], size: int) -> tuple[Host, ...]:
    """Put neighbors in ``order`` at the same position of consecutive blocks of ``size`` nodes."""
    count = len(order) // size
    return tuple(order[place * count + block] for block in range(count) for place in range(size))


def _blocks(plan: Plan) -> list[int]:
    """Numbers of nodes per block, one for each factor, largest first."""
    sizes = {factor.nodes for factor in (plan.params, plan.grads, plan.optimizer, plan.secondary) if factor is not None}
    if plan.pp > 1:
        sizes.add(plan.mesh.nodes)  # nodes of a pipeline stage
    return sorted((size for size in sizes if size > 1), reverse=True)


def _ordered(names: Sequence[Host], leaf_of: Mapping[Host, Leaf], blocks: Sequence[int]) -> list[Host]:
    """Take whole blocks from single leaves first; order the remaining hosts with smaller blocks, leaf by leaf."""
    by_leaf = _grouped(names, leaf_of)
    if not blocks:
        return [name for leaf in by_leaf.values() for name in leaf]
    size, *smaller = blocks
    placed: list[Host] = []
    rest: list[Host] = []
    for leaf in by_leaf.values():
        whole = len(leaf) // size * size
        placed += leaf[:whole]
        rest += leaf[whole:]
    return placed + _filled(rest, leaf_of, size, smaller)


def _filled(names: Sequence[Host], leaf_of: Mapping[Host, Leaf], size: int, smaller: Sequence[int]) -> list[Host]:
    """Fill blocks from the remaining hosts: each takes the largest remainder of a leaf first, then the best fit."""
    by_leaf = _grouped(names, leaf_of)
    order: list[Host] = []
    while by_leaf:
        room = size
        block: list[Host] = []
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


def _grouped(names: Iterable[Host], leaf_of: Mapping[Host, Leaf]) -> dict[Leaf, list[Host]]:
    names_of: dict[Leaf, list[Host]] = {}
    for name in names:
        names_of.setdefault(leaf_of[name], []).append(name)
    return names_of
