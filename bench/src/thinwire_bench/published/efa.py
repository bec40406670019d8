"""DeepSpeed on AWS before and after Amazon's work (its blog, pull request 1453), and the issue that started it (1069).

The blog's TFLOPS count recomputation, the others do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.sim import Answer, Case
from thinwire_bench.published.calibration import PublishedRow
from thinwire_bench.published.zeropp import RECOMPUTED

_TOKENS = 8192
"""Tokens per GPU in the runs of the blog, according to the pull request."""

_ISSUE_TOKENS = 8 * 512
"""Eight sequences; their length follows from the issue's samples/s and TFLOPS."""


def is_throughput(row: PublishedRow) -> bool:
    """Whether a row gives TFLOPS; the samples/s of the source follow from them."""
    named = ("Amazon Science", "DeepSpeed PR #1453", "DeepSpeed issue #1069")
    return row.source.startswith(named) and row.metric.startswith("TFLOPS")


def cases(row: PublishedRow) -> list[Case]:
    """The step of a row; what the pull request brought is an engine of its own. ZeRO-2 overlapped its reductions."""
    on_issue = "issue" in row.source
    case = row.case(
        "roberta-10b" if "10B" in row.model else "roberta-50b",
        "v100-32g" if on_issue else "a100-40g",
        micro_batch_tokens=_ISSUE_TOKENS if on_issue else _TOKENS,
        recompute=True,
        dtype="float16" if on_issue else "bfloat16",
        engine="deepspeed-efa" if " optimized" in row.system else "deepspeed",
        plan="zero2" if row.system.startswith("ZeRO-2") else "zero3",
    )
    return [case]


def tflops(row: PublishedRow, answers: Sequence[Answer]) -> float:
    """TFLOPS of a GPU, counted as in the row."""
    counted = RECOMPUTED if row.metric == "TFLOPS_per_gpu_recompute_counted" else 1.0
    return counted * answers[0].tflops
