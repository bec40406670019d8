"""AMSP (arXiv 2311.00257v2): LLaMA on A800s, its ablation of overlap and the figures in its text."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from thinwire.sim import Answer, Case
from thinwire_bench.published.calibration import PublishedRow

_MODELS = {"LLaMA-7B": "llama-7b", "LLaMA-13B": "llama-13b", "LLaMA-30B": "llama-30b-amsp"}

_KINDS = {"AG": "gather", "RS": "reduce", "AR": "sync", "BC": "spread"}
"""The paper's letters for what may overlap."""


def is_ablation(row: PublishedRow) -> bool:
    """Table V. Its MFU is left out: it is about 9 % too high for its TGS at one micro-batch of 7B."""
    return row.where == "AMSP paper Table V" and row.metric == "TGS_tokens_per_gpu_s"


def is_stated(row: PublishedRow) -> bool:
    """MFU of AMSP's own engine at other sizes."""
    return (
        row.source.startswith("AMSP")
        and row.metric == "MFU"
        and row.system.startswith("AMSP s_p")
        and row.where != "AMSP paper Table V"
    )


def is_baseline(row: PublishedRow) -> bool:
    """MFU of DeepSpeed's engine."""
    return row.source.startswith("AMSP") and row.metric == "MFU" and row.system.startswith("DeepSpeed")


def is_ratio(row: PublishedRow) -> bool:
    """How much faster one way of AMSP's engine is than another."""
    return row.source.startswith("AMSP") and row.metric in {"MFU_ratio", "speedup"}


def is_rough(row: PublishedRow) -> bool:
    """What the systems that have enough memory reach on the fewest GPUs."""
    return row.source.startswith("AMSP") and row.metric == "MFU_approx"


def cases(row: PublishedRow) -> list[Case]:
    """The step of a row of AMSP's engine."""
    factors = dict(re.findall(r"s_(\w+)=(\d+x\d+)", row.system))
    named = re.search(r"overlap ([A-Z/+]+)", row.system)
    kinds = re.split(r"[/+]", named[1]) if named else []
    plan = {key: _factor(factors[name]) for key, name in _STATES.items()}
    return [_case(row, "amsp", plan, [_KINDS[kind] for kind in kinds], recompute="recompute" in row.system)]


def ratios(row: PublishedRow) -> list[Case]:
    """The faster step, then the other. With 30B recomputation is on; broadcasts overlap in the full one only."""
    large = "30B" in row.model
    best, mics = _BEST[row.model], _group("8x2" if large else "8x1")
    if row.metric == "speedup":
        return [_case(row, "amsp", best, overlap, recompute=large) for overlap in (list(_KINDS.values()), [])]
    overlap = ["gather", "reduce", "sync"]
    return [_case(row, "amsp", plan, overlap, recompute=large) for plan in (best, mics)]


def traced() -> dict[str, Case]:
    """What the paper's Figures 14 and 15 show traces of: 7B under MiCS on DeepSpeed, and AMSP's own way."""
    fields = {"model": "llama-7b", "gpu": "a800-80g", "gpus": 1024, "internode_gbps": 800, "seq": 4096}
    steps = {
        "DeepSpeed, MiCS 8x1": {"engine": "deepspeed", "plan": _group("8x1")},
        "AMSP, OS 8x1": {"engine": "amsp", "plan": _BEST["LLaMA-7B"]},
    }
    return {name: Case.parse({**fields, **step}, name) for name, step in steps.items()}


def ratio(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    """First over second."""
    first, second = answers
    return first.tgs / second.tgs


def baselines(row: PublishedRow) -> list[Case]:
    """The step of a row of DeepSpeed; with 30B recomputation is on, as in AMSP's own runs."""
    group = re.search(r"s=(\d+x\d+)", row.system)
    named: str | dict[str, Any] = "hpz" if "hpZ" in row.system else "zero1" if "ZeRO-1" in row.system else "zero3"
    return [_case(row, "deepspeed", _group(group[1]) if group else named, None, recompute="30B" in row.model)]


def rough(row: PublishedRow) -> list[Case]:
    """30B under AMSP, MiCS and ZeRO-3."""
    best = _case(row, "amsp", _BEST[row.model], ["gather", "reduce", "sync"], recompute=True)
    return [best, *(_case(row, "deepspeed", plan, None, recompute=True) for plan in (_group("8x2"), "zero3"))]


def mean_mfu(_row: PublishedRow, answers: Sequence[Answer]) -> float:
    """Over the systems, which the paper does not tell apart."""
    return statistics.fmean(answer.mfu for answer in answers)


def _group(text: str) -> dict[str, Any]:
    """MiCS: all states over a group."""
    return dict.fromkeys(_STATES, _factor(text))


def _case(
    row: PublishedRow, engine: str, plan: str | dict[str, Any], overlap: list[str] | None, *, recompute: bool
) -> Case:
    model, ran = _MODELS[row.model], {"engine": engine, "plan": plan, "overlap": overlap}
    return row.case(model, "a800-80g", seq=4096, recompute=recompute, **ran)


_STATES = {"params": "p", "grads": "g", "optimizer": "os"}


def _factor(text: str) -> dict[str, int]:
    local, nodes = map(int, text.split("x"))
    return {"local": local, "nodes": nodes}


_BEST = {
    model: {key: _factor(text) for key, text in zip(_STATES, factors, strict=True)}
    for model, factors in {"LLaMA-7B": ("1x1", "1x1", "8x1"), "LLaMA-30B": ("8x1", "8x1", "8x4")}.items()
}
"""The paper's Table IV."""
