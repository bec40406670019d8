"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from thinwire.errors import CheckpointError

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

    @classmethod
    def of(cls, saved: object, path: Path) -> Self:
        """The progress that a checkpoint holds.

        Args:
            saved: What a save has written, or what else is there.
            path: The checkpoint, for messages.

        Raises:
            CheckpointError: It is not the progress of a run.
        """
        counts, losses = {"step", "samples", "skipped"}, {"loss", "val_loss"}
        if (
            not isinstance(saved, dict)
            or not {"step", "samples"} <= saved.keys() <= counts | losses  # 0.1 did not count skipped steps
            or not all(type(saved[name]) is int and saved[name] >= 0 for name in saved.keys() & counts)
            or not all(saved[name] is None or type(saved[name]) in (int, float) for name in saved.keys() & losses)
        ):
            raise CheckpointError(f"{path}: holds no progress of a run of thinwire train: position is {saved!r:.80}")
        return cls(**saved)
