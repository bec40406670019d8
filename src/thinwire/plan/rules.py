"""Which plans are valid: chains of factors, secondary shards, meshes of cuts; and how many knobs a plan turns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from thinwire.errors import SpecError
from thinwire.spec import Factor, Plan
from thinwire.spec.cut import Cut

Chain = tuple[Factor, Factor, Factor]
"""Factors of ``P``, ``G`` and ``OS``."""


UNCUT = Cut()
"""Data parallelism only."""


def cuts(tps: tuple[int, ...], pps: tuple[int, ...]) -> Iterator[Cut]:
    """Every combination of ``tps`` and ``pps``; pipelines come in both schedules."""
    for tp in tps:
        for pp in pps:
            yield Cut(tp, pp)
            if pp > 1:
                yield Cut(tp, pp, "interleaved")


def powers_of_two(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``most``."""
    return tuple(1 << k for k in range(max(1, most).bit_length()))


def divided(ranks: Factor, cut: Cut) -> Factor | None:
    """The data-parallel mesh that a cut leaves; ``None`` if the ranks cannot be divided this way."""
    try:
        return ranks.data_parallel(cut.tp, cut.pp)
    except SpecError:
        return None


@lru_cache(maxsize=256)
def factors(mesh: Factor) -> tuple[Factor, ...]:
    """Every factor that fills a node before it spans several nodes, smallest first."""
    inside = [Factor(local=d) for d in _divisors(mesh.local)]
    across = [Factor(local=mesh.local, nodes=d) for d in _divisors(mesh.nodes) if d > 1]
    return (*inside, *across)


def chain_ends(mesh: Factor) -> Iterator[tuple[Factor, Factor]]:
    """``P`` and ``OS`` of every valid chain; ``G`` equals one of the two."""
    candidates = factors(mesh)
    for params in candidates:
        for optimizer in candidates:
            if params.divides(optimizer):
                yield params, optimizer


@lru_cache(maxsize=1024)
def secondaries(mesh: Factor, params: Factor) -> tuple[Factor | None, ...]:
    """``None``, and every factor of a secondary shard: above 1 and below the factor of ``P``."""
    if params.ranks == 1:
        return (None,)
    inner = [f for f in factors(mesh) if f.divides(params) and 1 < f.ranks < params.ranks]
    return (None, *inner)


def complexity(plan: Plan) -> int:
    """How many things a plan does that plain data parallelism does not. A tie goes to the plan with fewer.

    Error feedback does not count: it is turned on where it is free, for the sake of the loss.
    """
    turned = [not codec.is_none for codec in plan.wire.codecs().values()]
    turned += [plan.secondary is not None, plan.recompute, plan.partition == "inter"]
    turned += [plan.granularity == "module", plan.overlap.input_gradient]
    turned += [plan.gather_bytes > 0 or plan.reduce_bytes > 0, plan.persist_bytes > 0 or plan.reuse_bytes > 0]
    turned += [plan.bucket_chunks > 1, plan.params.ranks > 1, plan.grads != plan.params, plan.optimizer != plan.params]
    turned += [plan.ep > 1, plan.cp > 1]
    return sum(turned) + Cut.of(plan).complexity


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
