"""Stragglers, slow links and jitter: a synchronous step takes as long as its slowest rank.

In the simulator, one rank stands for all. A disturbed step is therefore the step of the slowest rank, whose computation
and links are slowed down by random factors. These are drawn directly from the distribution of the maximum, so a hundred
thousand GPUs cost no more than one.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from typing import Final

from thinwire.sim.cases import Case, Slowed, answer

_NORMAL: Final = statistics.NormalDist()


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Deviations of a cluster from its nominal speed.

    Attributes:
        jitter: Standard deviation of the logarithm of every GPU's computation time, drawn anew in each step; 0.05 is
            about 5 %.
        link_jitter: The same for every node's network cards.
        straggler: Factor by which one GPU always computes longer.
        slow_link: Factor by which one node's cards always take longer.
    """

    jitter: float = 0.0
    link_jitter: float = 0.0
    straggler: float = 1.0
    slow_link: float = 1.0

    @property
    def nothing(self) -> bool:
        """Whether there is no deviation."""
        return self == Disturbance()

    def draw(self, gpus: int, nodes: int, chance: random.Random) -> Slowed:
        """Draw the slowest GPU and the slowest node's cards of one step."""
        return Slowed(
            _slowest(gpus, self.jitter, self.straggler, chance),
            _slowest(nodes, self.link_jitter, self.slow_link, chance),
        )


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Step times in seconds under disturbances: median, 5th and 95th percentile of the samples, and without
    disturbances."""

    median: float
    low: float
    high: float
    undisturbed: float
    samples: int


def disturbed(case: Case, disturbance: Disturbance, *, samples: int = 64, seed: int = 0) -> Disturbed:
    """Sample disturbed steps; the same seed gives the same steps."""
    undisturbed = answer(case)
    chance = random.Random(seed)
    cluster = undisturbed.cluster
    drawn = [disturbance.draw(cluster.gpus, cluster.nodes, chance) for _ in range(samples)]
    seconds = sorted(answer(case, slowed=slowed).simulated.seconds for slowed in drawn)
    return Disturbed(
        statistics.median(seconds),
        seconds[math.floor(0.05 * (samples - 1))],
        seconds[math.ceil(0.95 * (samples - 1))],
        undisturbed.simulated.seconds,
        samples,
    )


def _slowest(count: int, sigma: float, always: float, chance: random.Random) -> float:
    """The largest of ``count`` lognormal factors with median 1, one of which is ``always`` times larger."""

    def largest(number: int) -> float:
        # The largest of n draws is the quantile of their distribution at the n-th root of a uniform draw.
        below = (1.0 - chance.random()) ** (1.0 / number)
        return math.exp(sigma * _NORMAL.inv_cdf(min(max(below, 1e-12), 1 - 1e-12)))

    if sigma == 0:
        return max(1.0, always)
    others = largest(count - 1) if count > 1 else 0.0
    return max(others, always * largest(1))
