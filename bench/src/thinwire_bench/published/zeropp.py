"""ZeRO++ (arXiv 2306.10209; DeepSpeed's blog of June 2023): GPT on DGX-2 machines whose links are throttled.

Their TFLOPS count recomputation; percentages are of 120 TFLOPS, which the paper takes for a V100's peak.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from thinwire.sim import Answer, Case
from thinwire_bench.published.calibration import PublishedRow

RECOMPUTED = 4 / 3
"""FLOPs with recomputation over those of the model alone."""

PEAK = 120.0
"""TFLOPS of which the paper's percentages are."""

_PLANS = {"ZeRO-3": "zero3", "ZeRO++": "zeropp"}

_MODELS = {"GPT-18B": ("gpt-18b",), "GPT-138B": ("gpt-138b",)}

_SLOW_GBPS = 100
"""Gbit/s of the paper's slower links, assumed for DeepSpeed's tutorial, which does not state its own."""

_ALL_MODELS = ("gpt-18b", "gpt-49b", "gpt-91b", "gpt-138b")

_TECHNIQUES: dict[str, tuple[str, dict[str, str]]] = {
    "qwZ": ("zero3", {"gather": "int8:256"}),
    "hpZ": ("hpz", {}),
    "qgZ": ("zero3", {"reduce_intra": "int4:256", "reduce_inter": "int4:256"}),
}
"""Plan and codecs of each technique alone."""

_TOKENS = (1024, 2048)
"""Tokens per GPU to try, for a row that gives the best of several."""


def is_chart(row: PublishedRow) -> bool:
    """The bars of the blog's three charts."""
    return row.source == "DeepSpeed ZeRO++ blog"


def is_stated(row: PublishedRow) -> bool:
    """Sections 5.2.1 to 5.2.3 but for what they contradict themselves in."""
    return row.source.startswith("ZeRO++") and "Sec 5.2" in row.where and "conflicts" not in row.where and (
        row.metric in ("speedup_max", "pct_of_120TFLOPS_peak_max") or row.micro_batch_tokens is not None
    )  # fmt: skip


def is_tutorial(row: PublishedRow) -> bool:
    """Seconds of a step in the last lines of the logs that DeepSpeed's tutorial shows."""
    return row.source == "DeepSpeed ZeRO++ tutorial" and row.metric == "step_time_ms_iter40"


def is_technique(row: PublishedRow) -> bool:
    """Section 5.3.1: each technique alone, and all."""
    return row.source.startswith("ZeRO++") and "Sec 5.3.1" in row.where


def cases(row: PublishedRow) -> list[Case]:
    """The steps of a row: of one model or of all; both plans of a speed-up, for each number of tokens."""
    systems = row.system.partition(";")[0].split(" vs ")
    tokens = _TOKENS if row.micro_batch_tokens is None else (row.micro_batch_tokens,)
    return [
        _case(row, model, _PLANS[system], count)
        for model in _MODELS.get(row.model, _ALL_MODELS)
        for count in tokens
        for system in systems
    ]


def technique_cases(row: PublishedRow) -> list[Case]:
    """ZeRO-3, then each technique alone or all. The rows do not give tokens per GPU: the fewer of the charts."""
    alone = row.system.startswith("single")
    ways = list(_TECHNIQUES.values()) if alone else [("zeropp", {})]
    return [_case(row, "gpt-18b", plan, _TOKENS[0], wire) for plan, wire in (("zero3", {}), *ways)]


def _case(row: PublishedRow, model: str, plan: str, tokens: int, wire: dict[str, str] | None = None) -> Case:
    ran = {"dtype": "float16", "engine": "deepspeed", "plan": plan, "wire": wire or None}
    links = row.internode_gbps or _SLOW_GBPS
    return row.case(model, "v100-32g", internode_gbps=links, micro_batch_tokens=tokens, recompute=True, **ran)


def counted_tflops(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    """With recomputation, of the slowest model."""
    return min(answer.tflops * RECOMPUTED for answer in answers)


def milliseconds(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    """Of a step."""
    return 1000 * answers[0].simulated.seconds


def techniques(row: PublishedRow, answers: Sequence[Answer]) -> float:
    """Gain of all; of techniques alone, the product of their gains, or their mean if the row has a range."""
    exact, *others = (answer.simulated.seconds for answer in answers)
    gains = [exact / seconds for seconds in others]
    return statistics.fmean(gains) if row.metric == "speedup_range" else math.prod(gains)


def stated(row: PublishedRow, answers: Sequence[Answer]) -> float:
    """Percent of the paper's peak, or the largest speed-up."""
    if row.metric == "pct_of_120TFLOPS_peak_max":
        return max(100 * counted_tflops(row, [answer]) / PEAK for answer in answers)
    if row.metric == "speedup_max":
        return max(answers[i].tgs / answers[i + 1].tgs for i in range(0, len(answers), 2))
    return 100 * counted_tflops(row, answers) / PEAK
