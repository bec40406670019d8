"""Facts about pipeline schedules that planning, pricing and running share."""

from __future__ import annotations

from typing import Final

STAGES_OF_A_RANK: Final = {"1f1b": 1, "interleaved": 2}
"""Stages per rank of a pipeline, by schedule."""


def keeps_busy(pp: int, schedule: str, micro_batches: int) -> bool:
    """Whether there are micro-batches for every stage. An interleaved schedule needs rounds of equal size."""
    rounds = micro_batches // pp
    return rounds > 0 and (schedule == "1f1b" or micro_batches % rounds == 0)
