"""InternEvo's table of throughput (train_performance.md): InternLM-7B on A100s, sequences of 2048."""

from __future__ import annotations

import re

from thinwire.sim import Case
from thinwire_bench.published.calibration import PublishedRow


def is_throughput(row: PublishedRow) -> bool:
    """Whether a row gives tokens per second; the TFLOPS of the source follow from them."""
    return row.source.startswith("InternLM") and row.metric == "TGS_tokens_per_gpu_s"


def cases(row: PublishedRow) -> list[Case]:
    """The step of a row; ``zero1=-1`` is all data-parallel ranks. The source overlaps all but the parameters' way."""
    tp = int(_number(r"tp=(\d+)", row.system))
    zero1 = int(_number(r"zero1=(-?\d+)", row.system))
    nodes, local = row.gpus // row.gpus_per_node, row.gpus_per_node // tp
    one = {"local": 1, "nodes": 1}
    optimizer = {"local": local, "nodes": nodes} if zero1 == -1 else {"local": zero1, "nodes": 1}
    case = row.case(
        "internlm-7b",
        "a100-80g",
        seq=2048,
        recompute="no recompute" not in row.system,
        tp=tp,
        engine="internevo",
        plan={"params": one, "grads": one, "optimizer": optimizer},
        overlap=["gather", "reduce", "sync"],
    )
    return [case]


def _number(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{text} has no {pattern}"
    return match[1]
