"""Which plans are valid at all: chains of factors, secondary shards, and the knobs a plan turns."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.spec import Factor, Plan

__all__ = ["Chain", "chain_ends", "factors", "knobs", "secondaries"]

Chain = tuple[Factor, Factor, Factor]
"""``P``, ``G`` and ``OS``."""


def factors(mesh: Factor) -> list[Factor]:
    """Every factor of a mesh that fills a node before it crosses to the next, smallest first."""
    inside = [Factor(local=d) for d in _divisors(mesh.local)]
    across = [Factor(local=mesh.local, nodes=d) for d in _divisors(mesh.nodes) if d > 1]
    return inside + across


def chain_ends(mesh: Factor) -> Iterator[tuple[Factor, Factor]]:
    """``P`` and ``OS`` of every valid chain; ``G`` equals one of them."""
    found = factors(mesh)
    for params in found:
        for optimizer in found:
            if params.divides(optimizer):
                yield params, optimizer


def secondaries(mesh: Factor, params: Factor) -> list[Factor | None]:
    """No secondary shard, and every one that is smaller than ``P``'s factor but still shared."""
    if params.ranks == 1:
        return [None]
    inner = [f for f in factors(mesh) if f.divides(params) and 1 < f.ranks < params.ranks]
    return [None, *inner]


def knobs(plan: Plan) -> int:
    """How many things a plan does that plain data parallelism does not: ties go to the plan with fewer."""
    turned = [not codec.is_none for codec in plan.wire.codecs().values()]
    turned += [plan.secondary is not None, plan.recompute, plan.partition == "inter", plan.wire.error_feedback]
    turned += [plan.params.ranks > 1, plan.grads != plan.params, plan.optimizer != plan.params]
    return sum(turned)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
