"""How much of its time a job that fails now and then makes progress, and how often it should save.

A failure loses what was done since the last checkpoint, and the time of a restart. Frequent checkpoints lose little to
failures and much to saving. Young (1974, "A first order approximation to the optimum checkpoint interval") found the
interval that loses least where failures are rare: the square root of twice the cost of a checkpoint times the mean time
between failures. Daly (2006, "A higher order estimate of the optimum checkpoint interval for restart dumps") wrote down
the whole expectation for failures that come independently at a constant rate, also during a restart and a checkpoint.
Its optimum is the root of one equation, which is solved here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGEST_COST = 30.0
"""Above it, the best interval is the mean time between failures to the last digit."""

_LARGEST_EXPONENT = 15.0
"""Above it, training takes millions of times as long as without failures, which is as good as infinite."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The useful part of a job's time.

    Attributes:
        share: Seconds of training that count over seconds that pass, from 0 to 1; 0 if it makes no progress.
        interval: Seconds of training between two checkpoints; infinite if nothing fails.
        mean_time: Seconds between two failures of the job; infinite if nothing fails.
    """

    share: float
    interval: float
    mean_time: float


def goodput(mean_time: float, checkpoint: float, restart: float, interval: float | None = None) -> Goodput:
    """The useful part of a job's time.

    Args:
        mean_time: Mean seconds between two failures of the job, which is that of a node over the number of nodes.
        checkpoint: Seconds for which a checkpoint holds training up, above 0.
        restart: Seconds from a failure to the first new step.
        interval: Seconds of training between two checkpoints; ``None``: those that lose least.
    """
    if math.isinf(mean_time):
        share = 1.0 if interval is None else interval / (interval + checkpoint)
        return Goodput(share, math.inf if interval is None else interval, mean_time)
    chosen = best_interval(mean_time, checkpoint) if interval is None else interval
    return Goodput(useful_share(mean_time, checkpoint, restart, chosen), chosen, mean_time)


def useful_share(mean_time: float, checkpoint: float, restart: float, interval: float) -> float:
    """Seconds of training over the expected seconds that they take (Daly 2006, the complete model)."""
    exponent = (interval + checkpoint + restart) / mean_time
    if exponent > _LARGEST_EXPONENT:
        return 0.0
    expected = mean_time * math.exp(restart / mean_time) * math.expm1((interval + checkpoint) / mean_time)
    return interval / expected


def best_interval(mean_time: float, checkpoint: float) -> float:
    """Seconds of training between two checkpoints that lose least.

    The derivative of :func:`useful_share` vanishes where ``exp(x + c) (1 - x) = 1``, with interval and cost of a
    checkpoint in units of the mean time between failures. The left side falls from above 1 to 0 between 0 and 1.

    Args:
        mean_time: Mean seconds between two failures of the job.
        checkpoint: Seconds for which a checkpoint holds training up, above 0.
    """
    cost = min(checkpoint / mean_time, _LARGEST_COST)
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        if middle + cost + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mean_time
