"""Whether a study decides the order of two arms, and how many seeds it would take.

Arms of one seed start from the same weights and see the same samples, so their losses are compared in pairs: by
Student's t over the differences by seed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["COLUMNS", "CONFIDENCE", "POWER", "Comparison", "cells", "compare", "half_width"]

CONFIDENCE: Final = 0.95
"""Confidence of the intervals, two-sided."""

POWER: Final = 0.8
"""Probability that a study of the size that ``seeds_needed`` names finds a difference as large as the one measured."""

COLUMNS: Final = ("arm", "less", "mean", "interval", "order", f"seeds for {POWER:.0%} power")
"""Columns of :func:`cells`."""

_MANY: Final = 10_000
"""Most seeds that are worth naming."""

_QUANTILES: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Quantiles 0.975 of Student's t for 1 to 20 degrees of freedom."""


@dataclass(frozen=True)
class Comparison:
    """The losses of one arm less those of another, seed by seed.

    Attributes:
        arm: The arm.
        other: The arm that it is compared with.
        differences: Differences in nats per token, by seed; at least two.
    """

    arm: str
    other: str
    differences: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Mean difference."""
        return statistics.fmean(self.differences.values())

    @property
    def half_width(self) -> float:
        """Half the width of the mean's interval at ``CONFIDENCE``."""
        return half_width(list(self.differences.values()))

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.half_width

    @property
    def seeds_needed(self) -> int | None:
        """Seeds with which a paired t-test finds a difference of this mean and variance, at ``CONFIDENCE`` and with
        ``POWER`` (Guenther 1981, The American Statistician 35, 243); None if the arms do not differ."""
        if self.mean == 0:
            return None
        alpha, beta = _normal((1 + CONFIDENCE) / 2), _normal(POWER)
        ratio = statistics.stdev(self.differences.values()) / abs(self.mean)
        return max(2, math.ceil(((alpha + beta) * ratio) ** 2 + alpha**2 / 2))


def half_width(values: Sequence[float]) -> float:
    """Half the width of the interval of a mean at ``CONFIDENCE``, by Student's t.

    Args:
        values: At least two.
    """
    count = len(values)
    quantile = _QUANTILES[count - 2] if count - 2 < len(_QUANTILES) else _normal((1 + CONFIDENCE) / 2)
    return quantile * statistics.stdev(values) / math.sqrt(count)


def compare(losses: Mapping[str, Mapping[int, float]], baseline: str) -> list[Comparison]:
    """Compare every arm with the baseline, then each with the next in the order of mean losses.

    Args:
        losses: Final losses by arm and seed.
        baseline: Name of the baseline.

    Returns:
        Comparisons of arms that have at least two seeds in common.
    """
    ranked = sorted(losses, key=lambda arm: statistics.fmean(losses[arm].values()))
    pairs = [(arm, baseline) for arm in losses if arm != baseline and baseline in losses]
    pairs += [(arm, other) for arm, other in itertools.pairwise(ranked) if baseline not in (arm, other)]
    made = [Comparison(arm, other, _differences(losses[arm], losses[other])) for arm, other in pairs]
    return [comparison for comparison in made if len(comparison.differences) > 1]


def _differences(losses: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    return {seed: loss - others[seed] for seed, loss in losses.items() if seed in others}


def _normal(probability: float) -> float:
    return statistics.NormalDist().inv_cdf(probability)


def cells(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Rows of a table of comparisons, with ``COLUMNS``."""
    return [[one.arm, one.other, f"{one.mean:+.4f}", *_verdict(one)] for one in comparisons]


def _verdict(comparison: Comparison) -> list[str]:
    needed = comparison.seeds_needed
    if needed is None:
        return ["", "equal", ""]
    low, high = comparison.mean - comparison.half_width, comparison.mean + comparison.half_width
    order = "decided" if comparison.decided else "undecided"
    return [f"{low:+.4f} to {high:+.4f}", order, f"{needed:,}" if needed <= _MANY else f"over {_MANY:,}"]
