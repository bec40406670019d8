"""Who exchanges with whom in a round: every host with one other, so that all links are loaded at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

Pairs = tuple[tuple[int, int], ...]
"""Disjoint pairs of nodes."""

WHOLE = 64
"""Nodes up to which every node meets every other one. Of more nodes, each meets ``WHOLE - 1`` others per cycle."""

CYCLES = 6
"""Cycles in which every node meets others."""

FEWEST = 24
"""Rounds that few nodes make, in more cycles."""


def num_rounds(nodes: int) -> int:
    """Number of rounds of a tournament: 24, or 6 for each opponent, and at most 378 however many nodes there are."""
    opponents = min(WHOLE, nodes + nodes % 2) - 1
    return max(CYCLES, -(-FEWEST // opponents)) * opponents


def tournament(nodes: int, seed: int) -> Iterator[Pairs]:
    """Rounds in which each node meets another one, in an order that differs from cycle to cycle.

    In a cycle no two nodes meet twice (the circle method of round-robin tournaments). Which pairs cross the spine
    together differs from cycle to cycle, because the nodes are seated anew.

    Args:
        nodes: Number of nodes, at least 2.
        seed: Of the seating; the same on every rank.

    Yields:
        :func:`num_rounds` rounds. If the number of nodes is odd, one of them rests in each round.
    """
    draw = random.Random(seed)
    seats = nodes + nodes % 2
    left = num_rounds(nodes)
    while left:
        seated = draw.sample(range(seats), seats)
        turns = draw.sample(range(seats - 1), min(left, seats - 1, WHOLE - 1))
        left -= len(turns)
        for turn in turns:
            circle = [seated[0], *(seated[1 + (turn + place) % (seats - 1)] for place in range(seats - 1))]
            met = ((circle[place], circle[seats - 1 - place]) for place in range(seats // 2))
            yield tuple(pair for pair in met if max(pair) < nodes)


def inside(leaves: Sequence[Sequence[int]], draw: random.Random) -> Pairs:
    """Pairs within leaves: nothing crosses the spine. A leaf of odd size has one node that rests."""
    pairs: list[tuple[int, int]] = []
    for leaf in leaves:
        nodes = draw.sample(list(leaf), len(leaf))
        pairs += zip(nodes[0::2], nodes[1::2], strict=False)
    return tuple(pairs)


def across(leaves: Sequence[Sequence[int]], draw: random.Random) -> Pairs:
    """Pairs of different leaves, as many as there can be: all of their traffic crosses the spine."""
    largest_first = sorted(draw.sample(list(leaves), len(leaves)), key=len, reverse=True)
    nodes = [node for leaf in largest_first for node in draw.sample(list(leaf), len(leaf))]
    leaf_of = {node: number for number, leaf in enumerate(leaves) for node in leaf}
    # Half the circle apart, two nodes share a leaf only if it holds more than half of all nodes.
    half = len(nodes) - len(nodes) // 2
    pairs = zip(nodes, nodes[half:], strict=False)
    return tuple(pair for pair in pairs if leaf_of[pair[0]] != leaf_of[pair[1]])
