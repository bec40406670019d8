"""Spectra as a picture: how singular values fall, and effective ranks over training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire_bench.study.crossings import KINDS
from thinwire_bench.study.spectra import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = {"dp": "#c4442b", "tp": "#1f5fa8", "pp": "#3f8f5f", "gather": "#444444", "spread": "#8c6bb1"}
_LINES: Final = ("-", "--")
"""The first kind of an axis, and the second."""
_PERCENT: Final = (1, 2, 5, 10, 20, 50, 100)


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Draw medians over all tensors of a kind.

    Args:
        summaries: Summaries; those of parts of the model are left out.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    whole = [each for each in summaries if not each.part]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, [each for each in whole if each.step == max(each.step for each in whole)])
    _draw_ranks(right, whole)
    figure.savefig(path, dpi=130)


def _draw_curves(axes: Axes, last: Sequence[Summary]) -> None:
    for each in last:
        share = [100 * point / (len(each.curve) - 1) for point in range(len(each.curve))]
        colour, line = _style(each.kind)
        axes.semilogy(share, each.curve, line, color=colour, label=f"{KINDS[each.kind].axis}: {each.kind}")
    axes.set_ylim(1e-6, 1.4)  # room for the legend; fp32 values hold no less
    axes.set_xlabel("singular values, largest first (%)")
    axes.set_ylabel("over the largest")
    axes.set_title(f"Singular values at step {last[0].step}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def _draw_ranks(axes: Axes, whole: Sequence[Summary]) -> None:
    for kind in KINDS:
        of_kind = [each for each in whole if each.kind == kind]
        colour, line = _style(kind)
        ranks = [100 * each.median("effective_rank") for each in of_kind]
        axes.loglog([each.step for each in of_kind], ranks, line, marker="o", markersize=4, color=colour)
    steps = sorted({each.step for each in whole})
    axes.set_xticks(steps, [str(step) for step in steps])
    axes.set_xticks([], minor=True)
    axes.set_yticks(_PERCENT, [str(percent) for percent in _PERCENT])
    axes.set_yticks([], minor=True)
    noise = 100 * max(each.median("gaussian_rank") for each in whole)
    axes.axhline(noise, color="#999999", linestyle=":", linewidth=1)
    axes.annotate("normal values", (steps[0], noise), textcoords="offset points", xytext=(0, 3), fontsize=9)
    axes.set_xlabel("step")
    axes.set_ylabel("effective rank (% of the full rank)")
    axes.set_title("Over training", fontsize=11)
    axes.grid(alpha=0.3)


def _style(kind: str) -> tuple[str, str]:
    axis = KINDS[kind].axis
    return _COLOURS[axis], _LINES[[name for name in KINDS if KINDS[name].axis == axis].index(kind)]
