"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Position"]


@dataclass
class Position:
    """The progress of a run; every checkpoint holds it.

    Attributes:
        step: Number of updates made, including those that were skipped.
        samples: Number of training sequences consumed, over all ranks.
        loss: Loss of the last update in nats per token; ``None`` before the first.
        val_loss: Loss of the last validation in nats per token; ``None`` before the first.
        skipped: Number of steps whose updates were skipped because the gradient was not finite.
    """

    step: int = 0
    samples: int = 0
    loss: float | None = None
    val_loss: float | None = None
    skipped: int = 0
