"""Peaks of memory that papers state. What a driver or an allocator reports as GB is taken for 2^30 bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from thinwire.cost import OVERHEAD
from thinwire.sim import Answer, Case
from thinwire_bench.published import zeropp
from thinwire_bench.published.calibration import PublishedRow
from thinwire_bench.published.engines import ENGINES

_GIB = 1 << 30

_METRICS = (
    "peak_memory_GB", "peak_memory_ratio", "memory_GB", "gpu_memory_GB", "memory_ratio", "max_allocated_MB", "OOM",
)  # fmt: skip


def is_memory(row: PublishedRow) -> bool:
    """Of a rank, or how many times another's; whether it is more than there is.

    RoBERTa on 8 V100 is left out: what runs out of memory there is fragmented, which no term counts.
    """
    return row.metric in _METRICS and "RoBERTa" not in row.model


def cases(row: PublishedRow) -> list[Case]:
    """The step of a row, or the two that it compares."""
    if row.source.startswith("InternEvo"):
        return [_internevo(row)]
    if row.metric == "max_allocated_MB":
        return zeropp.cases(row)
    if row.source.startswith("ZeRO++"):
        return [_states(row, plan) for plan in (("ddp", "hpz") if row.system.startswith("DP") else ("hpz", "zero3"))]
    if row.metric == "peak_memory_ratio":
        best = {"params": _ONE, "grads": _ONE, "optimizer": {"local": 8, "nodes": 1}}
        return [_amsp(row, "amsp", best), _amsp(row, "deepspeed", "mics")]
    if row.system.startswith("unsharded"):
        return [_amsp(row, "amsp", "ddp")]
    return [_amsp(row, "deepspeed", "hpz" if "hpZ" in row.system else "zero3")]


def figure(row: PublishedRow, answers: Sequence[Answer]) -> float:
    first = answers[0]
    if row.metric == "OOM":
        return float(first.memory.total > first.cluster.memory)
    if row.metric == "max_allocated_MB":
        return _allocated(first) / (1 << 20)
    if row.metric == "memory_ratio":
        return _held(first) / _held(answers[1])
    if row.metric == "peak_memory_ratio":
        return first.memory.total / answers[1].memory.total
    return _held(first) / 1e9 if row.system.startswith("unsharded") else first.memory.total / _GIB


_ONE = {"local": 1, "nodes": 1}


def _allocated(answer: Answer) -> int:
    """Bytes of tensors at once: with no room for more, and without what holds no tensors."""
    engine = ENGINES[answer.case.engine].on(answer.case.gpu, answer.cluster.gpus_per_node)
    return engine.memory(answer.model, answer.plan, room=0).total - OVERHEAD


def _held(answer: Answer) -> int:
    """Bytes of model states."""
    memory = answer.memory
    return memory.params + memory.grads + memory.optimizer + memory.secondary


def _amsp(row: PublishedRow, engine: str, plan: str | dict[str, Any]) -> Case:
    large = "30B" in row.model
    model = "llama-30b-amsp" if large else "llama-7b"
    return row.case(model, "a800-80g", seq=4096, recompute=large, engine=engine, plan=plan)


def _states(row: PublishedRow, plan: str) -> Case:
    """Of a model of about the size; the ratio does not depend on it."""
    return row.case("gpt-91b", "v100-32g", dtype="float16", engine="deepspeed", plan=plan)


def _internevo(row: PublishedRow) -> Case:
    """Its configuration for fine-tuning: one sequence of 2048."""
    tp, pp = (int(match[1]) if (match := re.search(rf"\b{axis}(\d+)", row.system)) else 1 for axis in ("tp", "pp"))
    fsdp = "fsdp" in row.system
    model = "internlm-7b" if "7B" in row.model else str(files("thinwire_bench.published") / "internlm-20b.toml")
    ran = {"engine": "internevo-fsdp", "plan": "zero3"} if fsdp else {"engine": "internevo", "plan": "zero1"}
    return row.case(model, "a800-80g", seq=2048, recompute=True, tp=tp, pp=pp, **ran)
