"""AMSP (arXiv 2311.00257v2): LLaMA on A800s, its ablation of overlap and the figures in its text."""

from __future__ import annotations

import re
from typing import Any

from thinwire.published.rows import Row
from thinwire.sim import Case

__all__ = ["case", "is_ablation", "is_stated"]

_MODELS = {"LLaMA-7B": "llama-7b", "LLaMA-13B": "llama-13b", "LLaMA-30B": "llama-30b-amsp"}

_KINDS = {"AG": "gather", "RS": "reduce", "AR": "sync", "BC": "spread"}
"""The paper's letters for what may overlap."""


def is_ablation(row: Row) -> bool:
    """Table V. Its MFU is left out: it is about 9 % too high for its TGS at one micro-batch of 7B."""
    return row.where == "AMSP paper Table V" and row.metric == "TGS_tokens_per_gpu_s"


def is_stated(row: Row) -> bool:
    """MFU of AMSP's own engine at other sizes."""
    return (
        row.source.startswith("AMSP")
        and row.metric == "MFU"
        and row.system.startswith("AMSP s_p")
        and row.where != "AMSP paper Table V"
    )


def case(row: Row) -> Case:
    """The step of a row of AMSP's engine."""
    factors = dict(re.findall(r"s_(\w+)=(\d+x\d+)", row.system))
    named = re.search(r"overlap ([A-Z/+]+)", row.system)
    kinds = re.split(r"[/+]", named[1]) if named else []
    fields: dict[str, Any] = {
        "model": _MODELS[row.model],
        "gpu": "a800-80g",
        "gpus": row.gpus,
        "gpus_per_node": row.gpus_per_node,
        "internode_gbps": row.internode_gbps,
        "seq": 4096,
        "micro_batch_tokens": row.micro_batch_tokens,
        "micro_batches": row.micro_batches,
        "recompute": "recompute" in row.system,
        "engine": "amsp",
        "plan": {key: _factor(factors[name]) for key, name in _STATES.items()},
        "overlap": [_KINDS[kind] for kind in kinds],
    }
    return Case.parse(fields, row.where)


_STATES = {"params": "p", "grads": "g", "optimizer": "os"}


def _factor(text: str) -> dict[str, int]:
    local, nodes = map(int, text.split("x"))
    return {"local": local, "nodes": nodes}
