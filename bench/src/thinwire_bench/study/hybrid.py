"""What a codec for each parallel dimension gains: the speed of every policy in the lab, compared with plain torch.

The study of arXiv 2409.02423 (Figures 7 to 13) on a grid of two stages, two data-parallel and two tensor-parallel
ranks: tensor parallelism inside a node, data parallelism and the pipeline across. What the policies do to the loss is a
convergence study of its own (:mod:`thinwire_bench.study.arms`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.report import Sheet
from thinwire.spec import ModelSpec, Plan
from thinwire.spec.policy import STUDIED, HybridPolicy
from thinwire.units import format_bytes
from thinwire_bench.peers.catalog import MODELS
from thinwire_bench.peers.interface import SystemKind, SystemSpec
from thinwire_bench.systems.rows import SystemRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "NODES",
    "PLAIN",
    "RANKS",
    "GridWorkload",
    "PolicySpeed",
    "draw",
    "goals",
    "policies",
    "sheets",
    "speeds",
    "systems",
]

NODES, RANKS = 4, 2
"""Hosts and ranks of each: two stages of two data-parallel hosts, whose ranks share every matrix."""

PLAIN: Final = "torch"
"""Tensor and pipeline parallelism on torch's own process groups."""

BASELINE: Final = "none"
"""The same through ours, without codecs."""


OURS: Final = "hybrid"
"""Block quantisation with the paper's discipline."""

RIVAL: Final = "zhybrid:24-8"
"""The paper's choice."""


@dataclass(frozen=True)
class PolicySpeed:
    """One policy under one link.

    Attributes:
        policy: Name of the policy, or ``PLAIN``.
        bandwidth: Bandwidth of the links, as the user wrote it.
        samples_per_second: Sequences per second of all ranks, at the median step.
        tflops: TFLOPS of each rank; forward and backward are counted as in published figures.
        gain: Time of plain torch over that of the policy, median over rounds.
        smallest: Smallest gain within a round.
        largest: Largest gain within a round.
        by_axis: Bytes per step that all ranks send, by axis and codec.
        across: Bytes per step of the busiest host in its busier direction, as its link counts them.
    """

    policy: str
    bandwidth: str
    samples_per_second: float
    tflops: float
    gain: float
    smallest: float
    largest: float
    by_axis: Mapping[str, float]
    across: float


def policies(names: Sequence[str] | None) -> list[str]:
    """Names of policies, the baseline first; those of the study by default.

    Raises:
        SpecError: if one is unknown.
    """
    chosen = list(dict.fromkeys([BASELINE, *(STUDIED if names is None else names)]))
    for name in chosen:
        HybridPolicy.parse(name)
    return chosen


@dataclass(frozen=True)
class GridWorkload:
    """What every system of the study trains.

    Attributes:
        model: A key of the benchmarks' models.
        seq: Tokens of a sequence.
        dtype: Dtype of computation and messages.
        micro_batches: Micro-batches of a step, one sequence each.
    """

    model: str
    seq: int
    dtype: str
    micro_batches: int


def systems(names: Sequence[str], grid: GridWorkload) -> list[SystemSpec]:
    """Plain torch and every policy, on the study's grid.

    Args:
        names: Names of policies.
        grid: Model, lengths and dtype.
    """
    plan = Plan.preset(
        "zero1",
        nodes=2,
        local=1,
        tp=2,
        pp=2,
        compute_dtype=grid.dtype,
        micro_batches=grid.micro_batches,
        bucket_bytes=1 << 20,
    )
    workload = {"model": grid.model, "seq": grid.seq}
    builder = "thinwire_bench.peers.grids:grid"
    made = [SystemSpec(PLAIN, builder, {**workload, "plan": plan.to_toml(), "encoded": False}, SystemKind.PEER)]
    for name in names:
        # ZeRO-1 over two ranks has no all-reduce. DeepSpeed, which the paper measured, all-reduces all gradients.
        chosen = plan.with_(wire={"policy": name, "dp": str(HybridPolicy.parse(name).dp)})
        # A policy that rounds activations changes the training: its losses are judged by the loss study.
        kind = (
            SystemKind.PLAN if all(codec.is_lossless for codec in chosen.wire.codecs().values()) else SystemKind.CHANGED
        )
        made.append(SystemSpec(name, builder, {**workload, "plan": chosen.to_toml(), "encoded": True}, kind))
    return made


def speeds(rows: Sequence[SystemRow], model: str, seq: int) -> list[PolicySpeed]:
    """Rows of a benchmark, read as gains over plain torch.

    Args:
        rows: Rows of the :func:`systems`, plain torch first.
        model: A key of the benchmarks' models.
        seq: Sequence length in tokens.
    """
    fields: dict[str, Any] = {"name": model, "kind": "llama", "seq": seq, **MODELS[model]}
    shape = ModelSpec(**fields)
    results = []
    for row in rows:
        base = next(other for other in rows if other.system == PLAIN and other.bandwidth == row.bandwidth)
        ratios = [theirs / ours for theirs, ours in zip(base.samples, row.samples, strict=True)]
        results.append(
            PolicySpeed(
                policy=row.system,
                bandwidth=row.bandwidth,
                samples_per_second=row.tokens_per_second / seq,
                tflops=row.tokens_per_second * shape.flops_per_token(seq) / (NODES * RANKS) / 1e12,
                gain=statistics.median(ratios),
                smallest=min(ratios),
                largest=max(ratios),
                by_axis=row.by_axis,
                across=row.internode_bytes,
            )
        )
    return results


def sheets(results: Sequence[PolicySpeed], dtype: str) -> list[Sheet]:
    """A table for each link, and one of bytes by axis.

    Args:
        results: Speeds of a benchmark.
        dtype: Dtype of messages.
    """
    made = []
    for bandwidth in dict.fromkeys(speed.bandwidth for speed in results):
        here = [speed for speed in results if speed.bandwidth == bandwidth]
        rows = [
            [
                speed.policy,
                f"{speed.samples_per_second:.2f}",
                f"{1e3 * speed.tflops:.2f}",
                f"{speed.gain:.2f}",
                f"{speed.smallest:.2f}",
                f"{speed.largest:.2f}",
                format_bytes(speed.across),
            ]
            for speed in here
        ]
        columns = ["policy", "samples/s", "GFLOPS/rank", "gain", "least", "most", "link/step"]
        title = f"Links of {bandwidth}, messages in {dtype}: gain over plain torch, median of rounds, least, most"
        made.append(Sheet(title, columns, 1, rows, frozenset({0})))
    first = [speed for speed in results if speed.bandwidth == results[0].bandwidth and speed.by_axis]
    rows = [[speed.policy, *(_of_axis(speed, axis) for axis in ("dp", "tp", "pp"))] for speed in first]
    title = f"Bytes of a step that all ranks send, by axis, and the codecs that made them; messages in {dtype}"
    return [*made, Sheet(title, ["policy", "dp", "tp", "pp"], 1, rows)]


def goals(results: Mapping[str, Sequence[PolicySpeed]]) -> list[Sheet]:
    """thinwire's policy compared with the best policy of the paper that keeps the loss, link by link.

    Args:
        results: Speeds of benchmarks, by the dtype of their messages.
    """
    rows = []
    for dtype, speeds in results.items():
        for bandwidth in dict.fromkeys(speed.bandwidth for speed in speeds):
            rate = {speed.policy: speed.samples_per_second for speed in speeds if speed.bandwidth == bandwidth}
            if {OURS, RIVAL} <= rate.keys():
                ratio = rate[OURS] / rate[RIVAL]
                verdict = "reached" if ratio >= 1 else "missed"
                rows.append([f"{bandwidth}, messages in {dtype}", f"{ratio:.2f}", "1.00", verdict])
    columns = [f"samples/s of {OURS} over {RIVAL}", "measured", "goal", ""]
    return [Sheet("Goals of speed", columns, 1, rows)] if rows else []


def _of_axis(speed: PolicySpeed, axis: str) -> str:
    for key, sent in speed.by_axis.items():
        name, _, codecs = key.partition(" ")
        if name == axis:
            return f"{format_bytes(sent)} {codecs}".strip()
    return ""


def draw(results: Sequence[PolicySpeed], losses: Mapping[str, Sequence[float]], path: Path) -> None:
    """Gains by policy and link, with their spread, and what the same policy does to the loss.

    Args:
        results: Speeds of a benchmark.
        losses: By policy, how far the loss of each seed lies above the baseline's, in percent; empty if not measured.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in dict.fromkeys(speed.policy for speed in results) if name != PLAIN]
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_gains(left, results, names)
    _draw_losses(right, losses, names)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)


def _draw_gains(axes: Axes, results: Sequence[PolicySpeed], names: Sequence[str]) -> None:
    """A group of bars for each policy, a bar for each link, with the spread over rounds."""
    links = list(dict.fromkeys(speed.bandwidth for speed in results))
    height = 0.8 / len(links)
    for number, link in enumerate(links):
        by_policy = {speed.policy: speed for speed in results if speed.bandwidth == link}
        places = [index + (number - (len(links) - 1) / 2) * height for index in range(len(names))]
        gains = [by_policy[name].gain for name in names]
        spread = [
            [by_policy[name].gain - by_policy[name].smallest for name in names],
            [by_policy[name].largest - by_policy[name].gain for name in names],
        ]
        axes.barh(places, gains, height=height, xerr=spread, label=link, error_kw={"linewidth": 0.8})
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("speed over plain torch: median of rounds, least and most")
    axes.legend(title="links", frameon=False)


def _draw_losses(axes: Axes, losses: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    """A dot for each seed of each policy, and a mark at their mean."""
    for index, name in enumerate(names):
        values: Any = losses.get(name, ())
        axes.plot(values, [index] * len(values), "o", color="#1f5fa8", alpha=0.6)
        if values:
            axes.plot([statistics.fmean(values)], [index], "|", color="#c4442b", markersize=22, markeredgewidth=2.5)
    axes.axvline(0.0, color="#444444", linewidth=1)
    axes.set_xlabel("final validation loss over that without codecs (%): each seed, and the mean")
