"""The learning rate, a pure function of the step: nothing to store, nothing to restore."""

from __future__ import annotations

import math


def learning_rate_share(step: int, *, warmup: int, steps: int, final: float) -> float:
    """Linear warm-up, then half a cosine.

    Args:
        step: updates made before this one, from 0.
        warmup: updates of warm-up; the last of them has the full rate.
        steps: updates of the whole run.
        final: share of the full rate at the last update.

    Returns:
        Share of the full learning rate, above 0 for the first update and `final` for the last.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
