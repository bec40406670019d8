"""What a pipeline's schedule implies, for whoever plans, prices or runs one."""

from __future__ import annotations

from typing import Final

__all__ = ["STAGES_OF_A_RANK", "keeps_busy"]

STAGES_OF_A_RANK: Final = {"1f1b": 1, "interleaved": 2}
"""Stages that every rank of a pipeline holds, by schedule."""


def keeps_busy(pp: int, schedule: str, micro_batches: int) -> bool:
    """Whether a pipeline has a micro-batch for every stage; an interleaved one takes them in equal rounds."""
    rounds = micro_batches // pp
    return rounds > 0 and (schedule == "1f1b" or micro_batches % rounds == 0)
