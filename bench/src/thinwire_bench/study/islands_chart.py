"""The picture of the study of islands: validation loss over what crosses a link, and over time on each link.

Lines show the lowest loss so far: between two exchanges, islands validate with parameters of their own, and their
losses rise until the next. A dot marks where an arm reaches the loss whose time is compared, and a list says when.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire.units import format_bandwidth, parse_bandwidth
from thinwire_bench.study.arms import StudySpec
from thinwire_bench.study.curves import Curve
from thinwire_bench.study.islands import ArmTime, reached_steps
from thinwire_bench.study.power import half_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_OURS: Final = ("#1f5fa8", "#3f8f5f", "#c4442b", "#8c6bb1", "#6f9bd1")
"""Colors of thinwire's arms, in the order of the study."""

_THEIRS: Final = ("#444444", "#999999", "#c9a227", "#b08968", "#777777")
"""Colors of the peers."""


def draw(spec: StudySpec, curves: Sequence[Curve], times: Sequence[ArmTime], target: float | None, path: Path) -> None:
    """Draw losses: the mean over seeds, and its 95 % interval as a band.

    Args:
        spec: Specification of the study; arms with ``shown = false`` are left out.
        curves: Curves of its finished runs.
        times: Times of its arms.
        target: The loss whose time is compared, in nats per token.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    links = sorted({time.bandwidth for time in times}, key=parse_bandwidth)
    figure = Figure(figsize=(4.2 * (1 + len(links)), 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(1, 1 + len(links), sharey=True, squeeze=False)[0])
    styles, losses = _styles(spec), {arm.name: _lowest_losses(curves, arm.name) for arm in spec.arms}
    by_key = {(time.arm, time.bandwidth): time for time in times}
    sent = {time.arm: time.sent / 1e6 for time in times}
    crossings = {} if target is None else _crossings(curves, target)
    _panel(panels[0], styles, losses, sent, "megabytes sent by a node")
    _mark(panels[0], styles, crossings, sent, target, "MB")
    panels[0].set_title("what crosses the network", fontsize=11)
    for link, axes in zip(links, panels[1:], strict=True):
        seconds = {arm: by_key[arm, link].seconds for arm in styles if (arm, link) in by_key}
        _panel(axes, styles, losses, seconds, "seconds of training")
        _mark(axes, styles, crossings, seconds, target, "s")
        axes.set_title(f"links of {format_bandwidth(parse_bandwidth(link))}", fontsize=11)
    for axes in panels:
        if target is not None:
            axes.axhline(target, color="#444444", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel("lowest validation loss so far, nats per token")
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high + 0.45 * (high - low))  # room for the lists
    figure.savefig(path, dpi=150)


def _panel(
    axes: Axes,
    styles: Mapping[str, tuple[str, str]],
    losses: Mapping[str, Mapping[int, list[float]]],
    per_step: Mapping[str, float],
    label: str,
) -> None:
    """Losses of every arm over an amount that grows with its steps."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for arm, (colour, line) in styles.items():
        if arm not in per_step or not losses[arm]:
            continue
        places = [step * per_step[arm] for step in losses[arm]]
        means = [statistics.fmean(values) for values in losses[arm].values()]
        widths = [half_width(values) if len(values) > 1 else 0.0 for values in losses[arm].values()]
        axes.plot(places, means, line, color=colour, linewidth=1.8, label=arm)
        low = [mean - width for mean, width in zip(means, widths, strict=True)]
        high = [mean + width for mean, width in zip(means, widths, strict=True)]
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def _mark(
    axes: Axes,
    styles: Mapping[str, tuple[str, str]],
    crossings: Mapping[str, float],
    per_step: Mapping[str, float],
    target: float | None,
    unit: str,
) -> None:
    """Dots where arms reach the target, and a list of the amounts until then, the least first."""
    if target is None:
        return
    known = [arm for arm in styles if arm in per_step]
    reached = sorted((crossings[arm] * per_step[arm], arm) for arm in known if arm in crossings)
    for place, arm in reached:
        axes.plot([place], [target], "o", color=styles[arm][0], markersize=6, zorder=5)
    lines = [(arm, f"{place:.3g} {unit}") for place, arm in reached]
    lines += [(arm, "not reached") for arm in known if arm not in crossings]
    for number, (arm, amount) in enumerate(lines):
        axes.annotate(
            f"{arm}  {amount}", (1, 1), (-6, -8 - 12.5 * number), xycoords="axes fraction", textcoords="offset points",
            ha="right", va="top", fontsize=9, color=styles[arm][0],
        )  # fmt: skip


def _crossings(curves: Sequence[Curve], target: float) -> dict[str, float]:
    """Steps until an arm reaches the target, as a mean over its runs; only arms of which all runs do."""
    steps: dict[str, list[float | None]] = {}
    for curve in curves:
        steps.setdefault(curve.arm, []).append(reached_steps(curve, target))
    return {
        arm: statistics.fmean(known)
        for arm, found in steps.items()
        if len(known := [one for one in found if one is not None]) == len(found)
    }


def _styles(spec: StudySpec) -> dict[str, tuple[str, str]]:
    """Color and line of every arm that is shown: thinwire's are solid, those of peers dashed."""
    styles, ours, theirs = {}, 0, 0
    for arm in spec.arms:
        if not arm.shown:
            continue
        if arm.loop is None or arm.loop.system == "plan":
            styles[arm.name] = (_OURS[ours % len(_OURS)], "-")
            ours += 1
        else:
            styles[arm.name] = (_THEIRS[theirs % len(_THEIRS)], "--")
            theirs += 1
    return styles


def _lowest_losses(curves: Sequence[Curve], arm: str) -> dict[int, list[float]]:
    """The lowest validation losses of an arm until each step after the trunk, one for each seed that has finished."""
    points: dict[int, list[float]] = {}
    for curve in curves:
        lowest = math.inf
        for record in curve.records if curve.arm == arm else ():
            step = record["step"] - curve.trunk_steps
            if record["val_loss"] is not None and step > 0:
                lowest = min(lowest, record["val_loss"])
                points.setdefault(step, []).append(lowest)
    return points
