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
from typing import Annotated, Final

from pydantic import Field

from thinwire.sim.cases import Case, Slowed, answer
from thinwire.spec.base import Count, Share, Spec

_NORMAL: Final = statistics.NormalDist()


_Factor = Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)]


class Disturbance(Spec):
    """Deviations of a cluster from its nominal speed. With jitter, the answer has the median of several steps, and the
    range of nine in ten."""

    jitter: Share = Field(
        default=0.0,
        description="standard deviation of the logarithm of every GPU's computation time, drawn anew in each step; "
        "0.05 is about 5 %",
    )
    link_jitter: Share = Field(default=0.0, description="the same of every node's network cards")
    straggler: _Factor = Field(default=1.0, description="factor by which one GPU always computes longer")
    slow_link: _Factor = Field(default=1.0, description="factor by which one node's cards always take longer")
    samples: Count = Field(default=64, description="steps to simulate if there is jitter")

    @property
    def nothing(self) -> bool:
        """Whether there is no deviation."""
        return not self.is_random and self.straggler == self.slow_link == 1

    @property
    def is_random(self) -> bool:
        """Whether steps differ."""
        return self.jitter > 0 or self.link_jitter > 0

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


def disturbed(case: Case, disturbance: Disturbance) -> Disturbed:
    """Sample disturbed steps, the same ones every time."""
    undisturbed, samples = answer(case), disturbance.samples if disturbance.is_random else 1
    chance = random.Random(0)
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
