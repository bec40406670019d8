"""A study as a picture: how the arms learn, and how far each ends from the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire_bench.study.arms import StudySpec
from thinwire_bench.study.curves import Curve
from thinwire_bench.study.outcome import ArmOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#444444", "#9db7d5", "#6f9bd1", "#e0a458", "#c4442b", "#e58f7b", "#8c6bb1", "#1f5fa8", "#3f8f5f")
"""Colors of the arms, in the order of the study; with more arms than colors, they begin again."""


def draw(spec: StudySpec, curves: Sequence[Curve], arm_outcomes: Sequence[ArmOutcome], path: Path) -> None:
    """Draw validation losses over tokens, and final losses over the baseline's, seed by seed.

    Args:
        spec: Specification of the study.
        curves: Curves of its finished runs.
        arm_outcomes: The outcome of each arm.
        path: The PNG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_curves(left, spec, curves)
    _draw_ends(right, spec, arm_outcomes)
    figure.savefig(path, dpi=130)


def _draw_curves(axes: Axes, spec: StudySpec, curves: Sequence[Curve]) -> None:
    """Validation loss over the baseline's at the same step, mean over seeds: the losses themselves lie on one line."""
    base = {curve.seed: _validations(curve) for curve in curves if curve.arm == spec.baseline}
    for index, arm in enumerate(spec.arms):
        points: dict[int, list[float]] = {}
        for curve in curves:
            if curve.arm == arm.name and curve.seed in base:
                for tokens, loss in _validations(curve).items():
                    if tokens in base[curve.seed]:
                        points.setdefault(tokens, []).append(100 * (loss / base[curve.seed][tokens] - 1))
        means = [statistics.fmean(values) for values in points.values()]
        axes.plot([tokens / 1e6 for tokens in points], means, "o-", markersize=3, color=_colour(index), label=arm.name)
    axes.set_xlabel("million tokens")
    axes.set_ylabel(f"validation loss over {spec.baseline}'s (%), mean over seeds")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def _draw_ends(axes: Axes, spec: StudySpec, arm_outcomes: Sequence[ArmOutcome]) -> None:
    for index, outcome in enumerate(arm_outcomes):
        values = list(outcome.excess.values())
        axes.plot(values, [index] * len(values), "o", color=_colour(index), alpha=0.6)
        if outcome.mean_excess is not None:
            axes.plot([outcome.mean_excess], [index], "|", markersize=22, markeredgewidth=2.5, color=_colour(index))
    axes.set_yticks(range(len(arm_outcomes)), [outcome.arm for outcome in arm_outcomes])
    axes.set_ylim(len(arm_outcomes) - 0.5, -0.5)
    axes.axvline(0, color="#444444", linewidth=1)
    axes.set_xlabel(f"final validation loss over {spec.baseline}'s (%): each seed, and the mean")
    axes.grid(axis="x", alpha=0.3)


def _validations(curve: Curve) -> dict[int, float]:
    return {record["tokens"]: record["val_loss"] for record in curve.records if record["val_loss"] is not None}


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
