"""Chains of factors in the order of AMSP's objective, without trying them all: an exact best-first search.

The objective is T_p(P) + T_g(P, G) + T_os0(P) + T_os1(P, OS), and each term is at least 0. The part that depends on
``P`` alone is therefore a lower bound of all chains with that ``P``, and these chains are generated only once the bound
is the least of all. A chain whose states alone do not fit is left out; whether the others fit is for the caller to say.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from thinwire.plan.amsp.sums import AmspSums, AmspTimes
from thinwire.plan.rules import Chain, factors
from thinwire.spec import Factor

__all__ = ["ChainChoice", "in_order"]


@dataclass(frozen=True, slots=True)
class ChainChoice:
    """A chain of factors with or without recomputation, and its objective.

    Attributes:
        chain: Factors of ``P``, ``G`` and ``OS``.
        recompute: Whether blocks are recomputed in the backward.
        times: Seconds of communication.
        objective: The sum to minimise, in seconds: communication, and recomputation.
    """

    chain: Chain
    recompute: bool
    times: AmspTimes
    objective: float


_Place = tuple[int, ...]
"""Position of a branch or a choice in the order in which brute force would find it; it decides between equal bounds."""


def in_order(
    mesh: Factor, sums: AmspSums, recomputing: Mapping[bool, float], may_fit: Callable[[Factor], bool]
) -> Iterator[ChainChoice]:
    """Yield every chain of a mesh, best first by AMSP's objective.

    Args:
        mesh: All ranks.
        sums: The terms of the objective.
        recomputing: Seconds that a step gains, by whether blocks are recomputed; its keys are the choices.
        may_fit: Whether any chain with this factor of ``P`` may fit into memory; if not, all of them are left out.
    """
    candidates = factors(mesh)
    least = min(recomputing.values())
    # A branch precedes choices of the same bound, because it may contain one that brute force finds earlier.
    waiting: list[tuple[float, bool, _Place, ChainChoice | None]] = [
        (sums.least(params).total + least, False, (number,), None)
        for number, params in enumerate(candidates)
        if may_fit(params)
    ]
    heapq.heapify(waiting)
    while waiting:
        _, _, place, choice = heapq.heappop(waiting)
        if choice is not None:
            yield choice
            continue
        (first,) = place
        for place, choice in _choices(candidates, first, sums, recomputing):
            heapq.heappush(waiting, (choice.objective, True, place, choice))


def _choices(
    candidates: list[Factor], first: int, sums: AmspSums, recomputing: Mapping[bool, float]
) -> Iterator[tuple[_Place, ChainChoice]]:
    """Every choice with one factor of ``P``, and its place."""
    params = candidates[first]
    for number, optimizer in enumerate(candidates):
        if not params.divides(optimizer):
            continue
        for which, grads in enumerate(dict.fromkeys((params, optimizer))):
            times = sums.times((params, grads, optimizer))
            for turn, (recompute, seconds) in enumerate(recomputing.items()):
                choice = ChainChoice((params, grads, optimizer), recompute, times, times.total + seconds)
                yield (first, number, which, turn), choice
