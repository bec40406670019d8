"""The pictures that show several runs together: loss, throughput, time of a step, bytes across nodes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.record import RunRecord
from thinwire.report.drawing import (
    HUES,
    KIND_HUES,
    WIDE,
    Chart,
    add_legend,
    byte_scale,
    columns_of,
    dress,
    dress_rows,
    light,
    new_axes,
    new_figure,
    points_of,
)
from thinwire.report.figures import smoothed, thinned

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compared_charts(runs: Sequence[RunRecord], numbers: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Pictures that show several runs together; runs without records are left out."""
    pairs = [(run, of_run) for run, of_run in zip(runs, numbers, strict=True) if run.records]
    if not pairs:
        return []
    return [_losses([run for run, _ in pairs]), _speeds([run for run, _ in pairs]), _steps(pairs), _traffic(pairs)]


def _losses(runs: Sequence[RunRecord]) -> Chart:
    figure = new_figure(width=WIDE, height=3.6)
    left, right = figure.subplots(1, 2)
    across = _common_axis(runs)
    for run, hue in zip(runs, itertools.cycle(HUES), strict=False):
        trained = points_of(run, "loss", across)
        if trained:
            left.plot(*columns_of(thinned(smoothed(trained))), color=light(hue), linewidth=1.5, label=run.name)
        validated = points_of(run, "val_loss", across)
        if validated:
            right.plot(*columns_of(validated), "o-", color=light(hue), markersize=4, linewidth=1.3, label=run.name)
    dress(left, across, "training, smoothed, nats per token")
    dress(right, across, "validation, nats per token")
    for axes in (left, right):
        add_legend(axes)
    why = " Runs take different numbers of tokens a step, so tokens are the common axis." if across == "tokens" else ""
    return Chart("compared-loss", "Loss", f"Left: training loss, smoothed. Right: validation loss.{why}", figure)


def _speeds(runs: Sequence[RunRecord]) -> Chart:
    figure, axes = new_axes(width=WIDE, height=3.0)
    across = _common_axis(runs)
    for run, hue in zip(runs, itertools.cycle(HUES), strict=False):
        points = points_of(run, "tokens_per_second", across)
        if points:
            axes.plot(*columns_of(thinned(points)), color=light(hue), linewidth=1.2, label=run.name)
    axes.set_ylim(bottom=0)
    dress(axes, across, "tokens/s")
    add_legend(axes)
    return Chart("compared-throughput", "Throughput", "Tokens per second of all ranks, without validation.", figure)


def _steps(pairs: Sequence[tuple[RunRecord, Mapping[str, Any]]]) -> Chart:
    def parts(numbers: Mapping[str, Any]) -> dict[str, float]:
        exposed = {kind: 1e3 * seconds for kind, seconds in numbers["exposed_seconds"].items()}
        rest = max(0.0, 1e3 * (numbers["step_seconds"] or 0.0) - sum(exposed.values()))
        return {"computation and the rest": rest, **{f"waiting for {kind}": ms for kind, ms in exposed.items()}}

    figure = _stacked([run.name for run, _ in pairs], [parts(numbers) for _, numbers in pairs], "ms of a step, mean")
    caption = "Time of a step: computation and the rest, and what computation waits for, mean over ranks and steps."
    return Chart("compared-step", "Time of a step", caption, figure)


def _traffic(pairs: Sequence[tuple[RunRecord, Mapping[str, Any]]]) -> Chart:
    across = [
        {kind: hops["across"] for kind, hops in numbers["bytes_per_step"].items() if hops["across"]}
        for _, numbers in pairs
    ]
    scale, unit = byte_scale(max([sum(kinds.values()) for kinds in across], default=0.0))
    scaled = [{kind: amount / scale for kind, amount in kinds.items()} for kinds in across]
    figure = _stacked([run.name for run, _ in pairs], scaled, f"{unit} of a step across nodes, all ranks")
    caption = "Encoded bytes that cross nodes in a step, by lane (tp and pp: by axis)."
    return Chart("compared-bytes", "Bytes across nodes", caption, figure)


def _stacked(names: Sequence[str], tables: Sequence[Mapping[str, float]], unit: str) -> Figure:
    figure, axes = new_axes(height=1.2 + 0.42 * len(names), width=WIDE)
    begun = [0.0] * len(names)
    for part in dict.fromkeys(part for table in tables for part in table):
        widths = [table.get(part, 0.0) for table in tables]
        hue = KIND_HUES.get(part.removeprefix("waiting for "), "blue")
        alpha = 0.35 if part.startswith("computation") else 1.0
        axes.barh(range(len(names)), widths, left=begun, height=0.6, color=light(hue), alpha=alpha, label=part)
        begun = [start + width for start, width in zip(begun, widths, strict=True)]
    dress_rows(axes, unit, names)
    add_legend(axes)
    return figure


def _common_axis(runs: Sequence[RunRecord]) -> str:
    """Steps where all runs take the same tokens a step, else tokens."""
    sizes = {run.records[-1].get("tokens", 0) / max(1, run.last_step) for run in runs}
    return "step" if len(sizes) == 1 else "tokens"
