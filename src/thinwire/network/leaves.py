"""Which nodes share a leaf, from the seconds that pairs of them took while all others exchanged as well."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

GROUP_COST = 6
"""Numbers that a group counts as in the criterion: it is chosen among all sets of nodes, so noise makes it look useful.
With 1, four of 24 simulated networks of six hosts got a leaf too many; with 6, none."""

MOST_REFINED, RANDOM_STARTS = 64, 4
"""Nodes up to which groups are refined, because that takes time by their square; and splits of a single group."""

OUTLIER = 2.0
"""Factor over the median of all samples beyond which one counts as if it had just reached it: a host was busy."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One exchange of a pair of nodes, in ascending order, during a round in which all pairs exchanged: its seconds on
    the slower of them."""

    pair: tuple[int, int]
    seconds: float
    round: int = 0


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


def grouped(samples: Sequence[Timed], nodes: int) -> list[list[int]]:
    """Group nodes so that pairs of a group are fast and pairs of different groups slow.

    The groups of :func:`linked` are a start. Up to 64 nodes, they are refined by :func:`refined`, which knows that
    pairs of different leaves are the slower the more of them cross at once.

    Args:
        samples: Exchanges. Pairs that never met count for nothing.
        nodes: Number of nodes.

    Returns:
        The groups in ascending order of their nodes; a single group if no pair is slower than others.
    """
    start = linked(samples, nodes)
    return refined(samples, start) if nodes <= MOST_REFINED else start


def linked(samples: Iterable[Timed], nodes: int) -> list[list[int]]:
    """Group nodes by the speed of pairs alone.

    1. The score of a pair is the mean logarithm of its seconds; outliers are limited.
    2. A threshold divides scores into fast and slow ones, where the variance within both is smallest (Otsu 1979).
    3. Starting from single nodes, the two groups with the fastest pairs between them are joined while these are faster
       than the threshold on average. Single wrong pairs are outvoted.

    Arguments and result are those of :func:`grouped`.
    """
    scores = _scores(samples)
    limit = _threshold(sorted(scores.values()))
    if limit is None:
        return [list(range(nodes))]
    faster = torch.zeros(nodes, nodes, dtype=torch.float64, device="cpu")
    met = torch.zeros(nodes, nodes, dtype=torch.float64, device="cpu")
    scale = statistics.median(abs(score - limit) for score in scores.values())
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


def refined(samples: Sequence[Timed], start: Sequence[Sequence[int]]) -> list[list[int]]:
    """Move nodes between groups as long as the groups then explain the seconds better.

    Groups predict one duration for pairs inside, and one for pairs of different groups for each number of such pairs
    that load their busier leaf in that round. A move counts if it lowers the Bayesian information criterion (Schwarz
    1978) of these durations, in which a group counts as :data:`GROUP_COST` numbers.

    Args:
        samples: Exchanges, by round.
        start: Groups to begin with. A single one is split at random as well.

    Returns:
        The groups in ascending order of their nodes.
    """
    fit = _Fit(samples, sum(map(len, start)))
    starts = [fit.numbered(start)]
    if len(start) == 1:
        draw = random.Random(0)
        starts += [[draw.randrange(2) for _ in starts[0]] for _ in range(RANDOM_STARTS)]
    best = min((fit.improved(groups) for groups in starts), key=lambda found: found[0])[1]
    members: dict[int, list[int]] = {}
    for node, number in enumerate(best):
        members.setdefault(number, []).append(node)
    return sorted(members.values())


class _Fit:
    """How well groups explain samples."""

    def __init__(self, samples: Sequence[Timed], nodes: int) -> None:
        self._nodes = nodes
        pairs = torch.tensor([sample.pair for sample in samples], device="cpu")
        self._one, self._other = pairs[:, 0], pairs[:, 1]
        rounds = {number: index for index, number in enumerate(dict.fromkeys(sample.round for sample in samples))}
        self._round = torch.tensor([rounds[sample.round] for sample in samples], device="cpu")
        self._num_rounds = len(rounds)
        logs = torch.tensor([sample.seconds for sample in samples], dtype=torch.float64, device="cpu").log()
        self._logs = logs.clamp(max=float(logs.median()) + math.log(OUTLIER))

    @staticmethod
    def numbered(groups: Sequence[Sequence[int]]) -> list[int]:
        """The group of each node."""
        number = {node: index for index, group in enumerate(groups) for node in group}
        return [number[node] for node in range(len(number))]

    def improved(self, groups: list[int]) -> tuple[float, list[int]]:
        """The groups after all moves that help, and their criterion."""
        best = self._criterion(groups)
        moved = True
        while moved:
            moved = False
            for node in range(self._nodes):
                for target in self._targets(groups, node):
                    tried = [*groups[:node], target, *groups[node + 1 :]]
                    criterion = self._criterion(tried)
                    if criterion < best - 1e-9:
                        best, groups, moved = criterion, tried, True
        return best, groups

    def _targets(self, groups: Sequence[int], node: int) -> list[int]:
        """The other groups, and a new one."""
        used = set(groups)
        unused = next(number for number in range(self._nodes + 1) if number not in used)
        return [number for number in sorted({*used, unused}) if number != groups[node]]

    def _criterion(self, groups: Sequence[int]) -> float:
        group_of = torch.tensor(groups, device="cpu")
        one, other = group_of[self._one], group_of[self._other]
        crosses = one != other
        width = self._nodes + 1
        sides = torch.cat([(self._round * width + side)[crosses] for side in (one, other)])
        load = torch.bincount(sides, minlength=self._num_rounds * width)
        busier = torch.maximum(load[self._round * width + one], load[self._round * width + other])
        kind = torch.where(crosses, busier, 0)
        count = torch.bincount(kind, minlength=1)
        total = torch.bincount(kind, weights=self._logs, minlength=1)
        squares = self._logs.square().sum() - (total.square() / count.clamp(min=1)).sum()
        number = len(self._logs)
        error = max(float(squares), 1e-9 * number)
        return number * math.log(error / number) + math.log(number) * (
            GROUP_COST * len(set(groups)) + int((count > 0).sum())
        )


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
