"""The learning rate as a pure function of the step, so that checkpoints need not store it."""

from __future__ import annotations

import math


def learning_rate_share(step: int, *, warmup: int, steps: int, final: float) -> float:
    """Linear warm-up, followed by half a period of a cosine.

    Args:
        step: Number of updates before this one.
        warmup: Number of warm-up updates; the last of them has the peak rate.
        steps: Number of updates in the whole run.
        final: Learning rate of the last update, as a fraction of the peak.

    Returns:
        Learning rate as a fraction of the peak: above 0 for the first update, `final` for the last.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
