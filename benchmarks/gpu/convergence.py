"""Part: 124 million parameters on the bytes of Python's library, exact and with codecs, two hosts that share the card.

A checkpoint of such a run is larger than what some machines give back, so a run is not continued: each arm and seed is
a case, and leases add up case by case. Losses are compared at the same numbers of steps.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from benchmarks.gpu.case import GIB, Case, Report
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.scale import Scale

import thinwire as tw
from thinwire.collectives import group
from thinwire.report.sheet import Sheet
from thinwire.spec import Plan
from thinwire.testing import RankPool
from thinwire.train.models.llama import Llama, LlamaConfig

__all__ = ["ARMS", "cases"]

_UNBLOCKED: Final = {"gather": "int8:tensor", "reduce_intra": "int4:tensor", "reduce_inter": "int4:tensor"}
ARMS: Final[dict[str, dict[str, Any]]] = {
    "exact": {"preset": "zero3", "wire": {}},
    "zeropp": {"preset": "zeropp", "wire": {}},
    "thinwire": {"preset": "thinwire", "wire": {}},
    "unblocked int4": {"preset": "zeropp", "wire": _UNBLOCKED},
}
"""Plans by name; the last has one scale for all values of a message."""

_FIELDS: Final = {"vocab": 256, "hidden": 768, "layers": 13, "heads": 12, "kv_heads": 12, "ffn": 3072, "seq": 512}
_BATCH: Final = 16
_RANKS: Final = 2
_SEEDS: Final = 3
_MOST_STEPS: Final = 2000
_LANDMARKS: Final = (25, 50, 100, 200, 400, 800, 1600)
_OVER: Final = 10
"""Steps over whose losses a figure is the mean."""

_CORPUS_BYTES: Final = 32 << 20
_RATE: Final = 3e-4


def cases(scale: Scale, stack: ExitStack) -> list[Case]:
    """Every arm with a first seed, then with others."""
    pool = RankPool(_RANKS)
    stack.callback(pool.close)
    seeds = range(_SEEDS if scale.is_whole else 1)
    return [
        Case(f"{arm}, seed {seed}", partial(_run, pool, scale, arm, seed), scale.convergence_seconds + 25, 24 * GIB)
        for seed in seeds
        for arm in ARMS
    ]


def _run(pool: RankPool, scale: Scale, arm: str, seed: int, report: Report) -> Outcome:
    report(f"{arm}, seed {seed}")
    fields = dict(_FIELDS) if scale.is_whole else {**scale.model}
    limit = scale.convergence_seconds
    curves = pool.run(train, arm, seed, fields, scale.device, limit, timeout=limit + 90)
    curve = [sum(losses) / len(losses) for losses in zip(*curves, strict=True)]
    cells = [f"{_mean_until(curve, at):.4f}" if at <= len(curve) else "" for at in _LANDMARKS]
    columns = ("arm", "seed", "steps", *(f"at {at}" for at in _LANDMARKS), "last")
    row = [arm, str(seed), str(len(curve)), *cells, f"{_mean_until(curve, len(curve)):.4f}"]
    title = (
        f"loss in nats per byte, mean of {_OVER} steps; {_RANKS} hosts, {_RANKS * _BATCH * fields['seq']} bytes a step"
    )
    return Outcome((Sheet(title, columns, 1, [row]),), data={"curves": {"arm": arm, "seed": seed, "losses": curve}})


def _mean_until(curve: list[float], at: int) -> float:
    return statistics.mean(curve[max(0, at - _OVER) : at])


def train(arm: str, seed: int, fields: dict[str, Any], device: str, limit: float) -> list[float]:
    """Train on this rank until time is over; the losses of its steps."""
    rank = group.control().rank
    plan = Plan.preset(ARMS[arm]["preset"], nodes=_RANKS, local=1, micro_batch=_BATCH)
    plan = plan.with_(wire=plan.wire.with_(**ARMS[arm]["wire"])) if ARMS[arm]["wire"] else plan
    if arm == "exact":
        plan = plan.uncompressed()
    model = tw.shard(Llama(LlamaConfig(**fields), seed=seed).to(device), plan)
    optim = tw.optimizer(model, torch.optim.AdamW, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    data, length = _corpus(), fields["seq"] + 1
    # All arms of a seed see the same windows, each rank its own.
    choose = torch.Generator().manual_seed(1000 * seed + rank)
    losses: list[float] = []
    started = time.monotonic()
    while len(losses) < _MOST_STEPS:
        starts = torch.randint(0, len(data) - length, (_BATCH,), generator=choose)
        ids = torch.stack([data[start : start + length] for start in starts.tolist()]).to(device, torch.int64)
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
        loss.backward()
        tw.clip_grad_norm_(model, 1.0)
        optim.step()
        optim.zero_grad()
        losses.append(float(loss))
        # All ranks stop after the same step.
        if group.control().all_reduce_mean([float(time.monotonic() - started > limit)])[0] > 0:
            break
    return losses


def _corpus() -> torch.Tensor:
    """The first bytes of Python's library, file after file, uint8."""
    parts, amount = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if amount >= _CORPUS_BYTES or "site-packages" in path.parts:
            continue
        parts.append(np.fromfile(path, dtype=np.uint8))
        amount += parts[-1].size
    return torch.from_numpy(np.concatenate(parts))
