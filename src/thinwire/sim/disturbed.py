"""Stragglers, slow links and jitter: a synchronous step is as long as its slowest rank needs.

One rank stands for all in the simulator, so a disturbed step is the step of the slowest one, whose computation and
links take longer by factors that are drawn. The slowest of many is drawn at once, from the distribution of their
maximum: a hundred thousand GPUs cost no more than one.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass
from typing import Final

from thinwire.sim.cases import Answer, Case, Slowed, answer

__all__ = ["Disturbance", "Disturbed", "disturbed"]

_NORMAL: Final = statistics.NormalDist()


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What is not as fast as it should be.

    Attributes:
        jitter: of every GPU's computation, anew in each step: standard deviation of its logarithm, so that 0.05 is
            about 5 %.
        link_jitter: of every node's network cards, likewise.
        straggler: how many times longer one GPU always computes.
        slow_link: how many times longer one node's cards always take.
    """

    jitter: float = 0.0
    link_jitter: float = 0.0
    straggler: float = 1.0
    slow_link: float = 1.0

    @property
    def nothing(self) -> bool:
        """Whether everything is as it should be."""
        return self == Disturbance()

    def draw(self, gpus: int, nodes: int, chance: random.Random) -> Slowed:
        """The slowest GPU and the slowest node's cards of one step.

        Args:
            gpus: of the cluster.
            nodes: of the cluster.
            chance: where randomness comes from.
        """
        return Slowed(
            _slowest(gpus, self.jitter, self.straggler, chance),
            _slowest(nodes, self.link_jitter, self.slow_link, chance),
        )


@dataclass(frozen=True, slots=True)
class Disturbed:
    """Seconds of disturbed steps.

    Attributes:
        median: of the samples.
        low: their 5th percentile.
        high: their 95th percentile.
        undisturbed: of the step as it should be.
        samples: how many.
    """

    median: float
    low: float
    high: float
    undisturbed: float
    samples: int


def disturbed(case: Case, disturbance: Disturbance, *, samples: int = 64, seed: int = 0) -> Disturbed:
    """Sample disturbed steps.

    Args:
        case: the step.
        disturbance: what slows it.
        samples: how many steps, 1 at least.
        seed: the same one gives the same steps.
    """
    as_it_should = answer(case)
    chance = random.Random(seed)
    cluster = as_it_should.cluster
    found = sorted(_seconds(case, disturbance.draw(cluster.gpus, cluster.nodes, chance)) for _ in range(samples))
    return Disturbed(
        statistics.median(found),
        found[math.floor(0.05 * (samples - 1))],
        found[math.ceil(0.95 * (samples - 1))],
        as_it_should.simulated.seconds,
        samples,
    )


def _seconds(case: Case, slowed: Slowed) -> float:
    found: Answer = answer(case, slowed=slowed)
    return found.simulated.seconds


def _slowest(count: int, sigma: float, always: float, chance: random.Random) -> float:
    """The largest of ``count`` lognormal factors with median 1, one of which is ``always`` times larger."""

    def largest(number: int) -> float:
        # The largest of n draws is where their common distribution reaches the n-th root of a uniform draw.
        below = (1.0 - chance.random()) ** (1.0 / number)
        return math.exp(sigma * _NORMAL.inv_cdf(min(max(below, 1e-12), 1 - 1e-12)))

    if sigma == 0:
        return max(1.0, always)
    others = largest(count - 1) if count > 1 else 0.0
    return max(others, always * largest(1))
