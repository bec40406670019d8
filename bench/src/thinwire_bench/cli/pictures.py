"""The pictures of ``thinwire reproduce``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.program.timeline import Span
    from thinwire_bench.published import RowComparison, Table

_KINDS = ("compute", "gather", "reduce", "sync", "spread", "waiting")
"""Rows of a panel, from above: computation, lanes, and computation standing still."""


def draw_agreement(path: Path, table: Table, comparisons: Sequence[RowComparison]) -> None:
    """Published figures across, simulated ones up; what agrees lies on the diagonal, in a band of 10 %, or of the goal
    if figures are percentages."""
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[float, float]]] = {}
    for comparison in comparisons:
        points.setdefault(comparison.row.model, []).append((comparison.published, comparison.simulated))
    title, _, unit = table.title.partition(": ")
    unit = unit or ("MFU" if "MFU" in title else "times")
    band = 100 * table.goal if table.in_points and table.goal is not None else None
    figure = Figure(figsize=(6.4, 5.6))
    panel = figure.subplots()
    everything = [value for pairs in points.values() for pair in pairs for value in pair]
    ends = [min(0.0, *everything), 1.05 * max(everything)]
    panel.plot(ends, ends, color="grey", linewidth=1)
    half = [0.1 * x if band is None else band for x in ends]
    low, high = ([x + sign * width for x, width in zip(ends, half, strict=True)] for sign in (-1, 1))
    panel.fill_between(ends, low, high, color="grey", alpha=0.12)
    for kind, pairs in points.items():
        panel.plot(*zip(*pairs, strict=True), "o", markersize=4, label=kind)
    panel.set(title=title, xlabel=f"published, {unit}", ylabel=f"simulated, {unit}", xlim=ends, ylim=ends)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def draw_timelines(path: Path, title: str, steps: Mapping[str, Sequence[Span]]) -> None:
    """One panel for each step, all over the same seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 1.9 * len(steps) + 0.6))
    axes = figure.subplots(len(steps), 1, sharex=True, squeeze=False)
    for panel, (name, spans) in zip(axes.flat, steps.items(), strict=True):
        for row, kind in enumerate(_KINDS):
            # Tracks of lanes are named by their lane and a stage of it.
            bars = [(span.start, span.end - span.start) for span in spans if span.track.split()[0] == kind]
            panel.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
        panel.set(title=name, yticks=range(len(_KINDS)), yticklabels=_KINDS, ylim=(len(_KINDS) - 0.5, -0.5))
        panel.grid(axis="x", alpha=0.3)
    axes.flat[-1].set_xlabel("seconds")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
