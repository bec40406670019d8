"""The gains in training steps: of the techniques of ZeRO++, of the ways to run codecs, of the orders of a backward.

All are interleaved benchmarks of plans in the lab, read as gains over one of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from thinwire.report import Sheet
from thinwire.spec import Plan
from thinwire.units import format_bytes
from thinwire_bench.peers.catalog import plan_system
from thinwire_bench.peers.interface import SystemSpec
from thinwire_bench.systems.rows import SystemRow

BASELINE: Final = "zero3"
"""The plan over which the gains of the techniques are measured."""

TECHNIQUES: Final = ("qwZ", "hpZ", "qgZ")
"""The techniques of ZeRO++."""

TOGETHER: Final = "zeropp"

BACKENDS: Final = ("reference", "unfused", "cpp")
"""Ways to run the codecs, the first the baseline; on CPU."""

BUCKETS: Final = {"one bucket": 1 << 30, "4 MiB": 4 << 20, "1 MiB": 1 << 20}
"""Sizes of buckets by name: a reduction has as many stages to overlap as there are buckets."""

WAYS: Final = (("serial", False, 1), ("whole", True, 1), ("stages", True, 8))
"""Ways to perform collectives: name, whether stages overlap, chunks of each."""


BACKWARD_PAIRS: Final = {
    "tw:blocks, weights first": "tw:blocks",
    "tw:modules": "tw:modules, one ahead",
    "tw:modules, weights first": "tw:modules",
    "tw:modules, together": "tw:modules",
    "tw:blocks, kept": "tw:blocks",
    "tw:blocks, all": "tw:blocks",
    "tw:modules, all": "tw:blocks",
}
"""What :func:`backward_systems` are compared with, each by itself."""


BATCHES: Final = {"gather_bytes": 4 << 20, "reduce_bytes": 4 << 20}
"""Modules whose gathers start together, and gradients of consecutive modules, travel as one until they have as much."""

ALL_STAY: Final = {"persist_bytes": 200_000, "reuse_bytes": 2_000_000_000, "live_bytes": 2_000_000_000}
"""DeepSpeed's defaults of stage 3, in bytes of bf16: of a small model, everything stays gathered until its backward."""

RETENTION: Final = {**ALL_STAY, "live_bytes": 24 << 20}
"""Units stay gathered as long as all that are gathered have no more; bf16, where the default model has 33 MiB."""


@dataclass(frozen=True)
class Gain:
    """One system's speed over the baseline's under one setting.

    Attributes:
        system: Label of the system.
        bandwidth: Bandwidth of the links, as the user wrote it.
        tokens_per_second: Tokens per second of all ranks, at the median step.
        internode_bytes: Bytes per step of the busiest host in its busier direction.
        gain: The baseline's time over the system's, median over rounds.
        smallest: Smallest gain within a round.
        largest: Largest gain within a round.
    """

    system: str
    bandwidth: str
    tokens_per_second: float
    internode_bytes: float
    gain: float
    smallest: float
    largest: float


def technique_systems(workload: Mapping[str, Any], nodes: int, ranks: int) -> list[SystemSpec]:
    """ZeRO-3, each technique of ZeRO++ alone, and all together."""
    codecs = Plan.preset(TOGETHER, nodes=nodes, local=ranks).wire
    plain = Plan.preset(BASELINE, nodes=nodes, local=ranks)
    plans = {
        BASELINE: plain,
        "qwZ": plain.with_(wire={"gather": str(codecs.gather)}),
        "hpZ": Plan.preset("hpz", nodes=nodes, local=ranks),
        "qgZ": plain.with_(wire={"reduce_intra": str(codecs.reduce_intra), "reduce_inter": str(codecs.reduce_inter)}),
        TOGETHER: Plan.preset(TOGETHER, nodes=nodes, local=ranks),
    }
    return [plan_system(name, plan, workload) for name, plan in plans.items()]


def backend_systems(plan: Plan, workload: Mapping[str, Any]) -> list[SystemSpec]:
    """One plan with each way to run its codecs."""
    return [plan_system(backend, plan, {**workload, "codec_backend": backend}) for backend in BACKENDS]


def stage_systems(plan: Plan, workload: Mapping[str, Any]) -> list[SystemSpec]:
    """One plan with its collectives one at a time, with their stages side by side, and with these in chunks too, in
    buckets of several sizes."""
    return [
        plan_system(
            f"{label}, {name}",
            plan.with_(bucket_bytes=size, bucket_chunks=chunks, overlap={"stages": stages}),
            workload,
        )
        for label, stages, chunks in WAYS
        for name, size in BUCKETS.items()
    ]


def backward_systems(plan: Plan, workload: Mapping[str, Any]) -> list[SystemSpec]:
    """One plan with units of blocks, with units of modules, and with each choice of what these do in a backward.

    With modules, the backward gathers one module or one block ahead, reductions start after or before the input
    gradient, and modules travel apart or together. Blocks are freed after use or kept within a limit. The last two
    plans do everything, with units of blocks and of modules, and free nothing before its backward.
    """
    modules = plan.with_(granularity="module")
    first = {"overlap": {"input_gradient": True}}
    plans = {
        "blocks": plan.with_(granularity="block"),
        "blocks, weights first": plan.with_(granularity="block", overlap={"input_gradient": True}),
        "modules, one ahead": modules.with_(backward_prefetch="module"),
        "modules": modules,
        "modules, weights first": modules.with_(**first),
        "modules, together": modules.with_(**BATCHES),
        "blocks, kept": plan.with_(granularity="block", **RETENTION),
        "blocks, all": plan.with_(granularity="block", **first, **BATCHES, **ALL_STAY),
        "modules, all": modules.with_(**first, **BATCHES, **ALL_STAY),
    }
    return [plan_system(name, each, workload) for name, each in plans.items()]


def paired(rows: Sequence[SystemRow], pairs: Mapping[str, str]) -> list[Gain]:
    """Gains of systems over partners of their own, round by round.

    Args:
        rows: Rows of a benchmark under one setting.
        pairs: Labels of the partners by label.
    """
    by_label = {row.system: row for row in rows}
    return [_gain(by_label[system], by_label[partner]) for system, partner in pairs.items()]


def gains(rows: Sequence[SystemRow]) -> list[Gain]:
    """Gains over the first system, under each setting.

    Args:
        rows: Rows of a benchmark whose first system is the baseline.
    """
    measured = []
    for bandwidth in dict.fromkeys(row.bandwidth for row in rows):
        here = [row for row in rows if row.bandwidth == bandwidth]
        measured += [_gain(row, here[0]) for row in here]
    return measured


def product_of_single(measured: Sequence[Gain], bandwidth: str) -> float:
    """The product of the gains of the single techniques."""
    names = {f"tw:{name}" for name in TECHNIQUES}
    return math.prod(gain.gain for gain in measured if gain.bandwidth == bandwidth and gain.system in names)


def across_bandwidths(rows: Sequence[SystemRow], slow: str, fast: str) -> tuple[float, float, float]:
    """The speed of all techniques together on a slow link, over that of the baseline on a fast link.

    Args:
        rows: Rows of a benchmark under both settings.
        slow: Bandwidth of the link for all techniques together.
        fast: Bandwidth of the link for the baseline.

    Returns:
        Median over rounds, smallest, largest; above 1 ours is faster.
    """
    by_key = {(row.system, row.bandwidth): row for row in rows}
    ours, theirs = by_key[f"tw:{TOGETHER}", slow], by_key[f"tw:{BASELINE}", fast]
    ratios = _ratios(theirs, ours)
    return statistics.median(ratios), min(ratios), max(ratios)


def sheet(measured: Sequence[Gain], title: str, *, product: bool) -> Sheet:
    """Gains as a table.

    Args:
        measured: Gains of a benchmark.
        title: Title above the table.
        product: Whether to add the product of the gains of the single techniques.
    """
    rows = []
    for bandwidth in dict.fromkeys(gain.bandwidth for gain in measured):
        rows += [
            [
                gain.system,
                bandwidth,
                f"{gain.tokens_per_second:,.0f}",
                format_bytes(gain.internode_bytes),
                f"{gain.gain:.2f}",
                f"{gain.smallest:.2f}",
                f"{gain.largest:.2f}",
            ]
            for gain in measured
            if gain.bandwidth == bandwidth
        ]
        if product:
            single = product_of_single(measured, bandwidth)
            rows.append([f"product of {', '.join(TECHNIQUES)}", bandwidth, "", "", f"{single:.2f}", "", ""])
    columns = ["plan", "link", "tokens/s", "link/step", "gain", "least", "most"]
    return Sheet(title, columns, 2, rows)


def _gain(row: SystemRow, base: SystemRow) -> Gain:
    ratios = _ratios(base, row)
    return Gain(
        system=row.system,
        bandwidth=row.bandwidth,
        tokens_per_second=row.tokens_per_second,
        internode_bytes=row.internode_bytes,
        gain=statistics.median(ratios),
        smallest=min(ratios),
        largest=max(ratios),
    )


def _ratios(base: SystemRow, row: SystemRow) -> list[float]:
    """Round by round, how much faster than the baseline."""
    return [theirs / ours for theirs, ours in zip(base.samples, row.samples, strict=True)]
