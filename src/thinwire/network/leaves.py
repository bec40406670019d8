"""Which nodes share a leaf, from the seconds that pairs of them took while all others exchanged as well."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Contrast", "Timed", "contrast", "grouped", "spread"]

OUTLIER = 4.0
"""Factor over the median pair beyond which a sample counts as if it had just reached it: a host was busy."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One exchange of a pair, during a round in which all pairs exchanged.

    Attributes:
        pair: The nodes, in ascending order.
        seconds: Seconds of the exchange on the slower of them.
    """

    pair: tuple[int, int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Contrast:
    """How much slower pairs of different leaves are than pairs of one leaf, both under full load.

    Attributes:
        inside: Median seconds of the pairs inside leaves, while all pairs are inside.
        across: Median seconds of the pairs of different leaves, while all pairs cross.
        certainty: Probability that a sample from across is slower than one from inside, from 0 to 1.
    """

    inside: float
    across: float
    certainty: float

    @property
    def ratio(self) -> float:
        """Seconds across over seconds inside."""
        return self.across / self.inside


def grouped(samples: Iterable[Timed], nodes: int) -> list[list[int]]:
    """Group nodes so that pairs of a group are fast and pairs of different groups slow.

    1. The score of a pair is the mean logarithm of its seconds; outliers are limited.
    2. A threshold divides scores into fast and slow ones, where the variance within both is smallest (Otsu 1979).
    3. Starting from single nodes, the two groups with the fastest pairs between them are joined while these are faster
       than the threshold on average. Single wrong pairs are outvoted.

    Args:
        samples: Exchanges. Pairs that never met count for nothing.
        nodes: Number of nodes.

    Returns:
        The groups in ascending order of their nodes; a single group if no pair is slower than others.
    """
    scores = _scores(samples)
    limit = _threshold(sorted(scores.values()))
    if limit is None:
        return [list(range(nodes))]
    width = max(abs(score - limit) for score in scores.values())
    faster = torch.zeros(nodes, nodes, dtype=torch.float64)
    met = torch.zeros(nodes, nodes, dtype=torch.float64)
    scale = min(width, statistics.median(abs(score - limit) for score in scores.values()))
    for (one, other), score in scores.items():
        # One very fast or slow pair has no more votes than a typical one.
        vote = max(-1.0, min(1.0, (limit - score) / scale))
        faster[one, other] = faster[other, one] = vote
        met[one, other] = met[other, one] = 1.0
    return _joined(faster, met)


def _scores(samples: Iterable[Timed]) -> dict[tuple[int, int], float]:
    of_pair: dict[tuple[int, int], list[float]] = {}
    for sample in samples:
        of_pair.setdefault(sample.pair, []).append(math.log(sample.seconds))
    limit = statistics.median(x for logs in of_pair.values() for x in logs) + math.log(OUTLIER)
    return {pair: statistics.fmean(min(x, limit) for x in logs) for pair, logs in of_pair.items()}


def _threshold(scores: Sequence[float]) -> float | None:
    """The middle between the two classes into which ascending scores fall; ``None`` if all are equal."""
    count, total = len(scores), math.fsum(scores)
    best, limit, below = 0.0, None, 0.0
    for number in range(1, count):
        below += scores[number - 1]
        low, high = below / number, (total - below) / (count - number)
        between = number * (count - number) * (high - low) ** 2
        if between > best and scores[number] > scores[number - 1]:
            best, limit = between, (low + high) / 2
    return limit


def _joined(faster: torch.Tensor, met: torch.Tensor) -> list[list[int]]:
    """Join the groups with the highest mean of votes between them, as long as there are two with a positive one."""
    groups: dict[int, list[int]] = {node: [node] for node in range(len(met))}
    while True:
        mean = torch.where(met > 0, faster / met.clamp(min=1.0), -1.0)
        mean.fill_diagonal_(-1.0)
        one, other = divmod(int(mean.argmax()), len(met))
        if mean[one, other] <= 0:
            return sorted(sorted(group) for group in groups.values())
        groups[one] += groups.pop(other)
        for votes in (faster, met):
            votes[one] += votes[other]
            votes[:, one] += votes[:, other]
            votes[other] = votes[:, other] = 0.0


def contrast(inside: Sequence[Timed], across: Sequence[Timed]) -> Contrast:
    """Compare exchanges inside leaves with exchanges across; both have at least one sample."""
    near, far = ([sample.seconds for sample in samples] for samples in (inside, across))
    slower = sum((b > a) + (b == a) / 2 for a in near for b in far) / (len(near) * len(far))
    return Contrast(statistics.median(near), statistics.median(far), slower)


def spread(samples: Iterable[Timed]) -> float:
    """Seconds of a slow pair over those of a fast one: the ninth decile of pairs over the first."""
    scores = sorted(_scores(samples).values())
    tenth = (len(scores) - 1) // 10
    return math.exp(scores[-1 - tenth] - scores[tenth])
