"""What a number of seeds can decide: intervals of paired differences, and the power to find one.

Runs of one seed start from the same weights and see the same samples, so that losses are compared in pairs, by
Student's t over the differences.
"""

from __future__ import annotations

import bisect
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

POWER: Final = 0.8
"""Probability with which a study that is large enough decides."""

_MOST_SEEDS: Final = 10_000

_GRID: Final = 1_000
"""Steps of a numerical integral."""


@functools.cache
def _scales(freedom: int) -> tuple[list[float], list[float]]:
    """What chi over the root of its degrees of freedom may be, and the probability of each value."""
    top = math.log(1 + 8 / math.sqrt(freedom))
    logs = [-10 + (top + 10) * step / _GRID for step in range(_GRID + 1)]
    densities = [freedom * (log - math.exp(2 * log) / 2) for log in logs]
    weights = [math.exp(density - max(densities)) for density in densities]
    total = math.fsum(weights)
    return [math.exp(log) for log in logs], [weight / total for weight in weights]


def exceeds(bound: float, freedom: int, shift: float = 0.0) -> float:
    """The probability that noncentral Student's t is above a bound.

    Args:
        bound: The bound.
        freedom: Degrees of freedom, at least 1.
        shift: Noncentrality; 0 is Student's t itself.
    """
    # t is (z + shift) / u, with u as in _scales: the mean over u of the probability that z is above bound * u - shift.
    scales, weights = _scales(freedom)
    root = math.sqrt(2)
    return math.fsum(w * math.erfc((bound * u - shift) / root) / 2 for u, w in zip(scales, weights, strict=True))


def _least(holds: Callable[[float], bool], high: float) -> float:
    """The smallest number from 0 at which something begins to hold that holds at ``high``."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@functools.cache
def quantile(tail: float, freedom: int) -> float:
    """What Student's t exceeds with a probability of ``tail``, which is below a half."""
    high = 1.0
    while exceeds(high, freedom) > tail:
        high *= 2
    return _least(lambda bound: exceeds(bound, freedom) <= tail, high)


def half_width(differences: Sequence[float], tail: float) -> float:
    """Half the width of the interval of a mean.

    Args:
        differences: At least two.
        tail: Probability that the mean lies above the interval, and that it lies below.
    """
    count = len(differences)
    return quantile(tail, count - 1) * statistics.stdev(differences) / math.sqrt(count)


def power(margin: float, spread: float, seeds: int, tail: float) -> float:
    """The probability that the interval of a mean difference of 0 ends below a margin.

    Args:
        margin: The margin.
        spread: Standard deviation of the differences, in the unit of the margin.
        seeds: Number of pairs.
        tail: As in :func:`half_width`.
    """
    if seeds < 2:
        return 0.0
    if spread == 0:
        return 1.0
    return exceeds(quantile(tail, seeds - 1), seeds - 1, margin / spread * math.sqrt(seeds))


def seeds_needed(margin: float, spread: float, tail: float) -> int | None:
    """The fewest seeds with :data:`POWER`, ``None`` if these are over 10,000; see :func:`power` for the arguments."""
    counts = range(2, _MOST_SEEDS + 1)
    found = bisect.bisect_left(counts, POWER, key=lambda seeds: power(margin, spread, seeds, tail))
    return counts[found] if found < len(counts) else None


def least_margin(spread: float, seeds: int, tail: float) -> float:
    """The smallest margin that some seeds decide with :data:`POWER`; infinite for a single one. See :func:`power`."""
    if seeds < 2:
        return math.inf
    bound = quantile(tail, seeds - 1)
    shift = _least(lambda shift: exceeds(bound, seeds - 1, shift) >= POWER, 2 * bound + 10)
    return shift * spread / math.sqrt(seeds)
