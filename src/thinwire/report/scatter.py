"""A picture of simulated figures over published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["draw_agreement"]


def draw_agreement(
    path: Path, title: str, points: Mapping[str, Sequence[tuple[float, float]]], unit: str, band: float | None = None
) -> None:
    """Published figures across, simulated ones up; what agrees lies on the diagonal, in a band.

    Args:
        path: The PNG file.
        title: Title above the picture.
        points: Pairs ``(published, simulated)``, by kind.
        unit: Unit of both figures.
        band: Half-width of the band around the diagonal, in the unit; ``None`` draws 10 %.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    figure, panel = plt.subplots(figsize=(6.4, 5.6))
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
    plt.close(figure)
