"""A picture of how one figure changes with another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["draw_sweep"]


def draw_sweep(path: Path, x_name: str, x: Sequence[float], lines: Mapping[str, Sequence[float]], title: str) -> None:
    """One panel for each line, all over the same axis.

    Args:
        path: The PNG file.
        x_name: Name of the quantity that changes.
        x: Its values.
        lines: A figure for each value, by the name of the line.
        title: Title above the picture.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    figure, axes = plt.subplots(1, len(lines), figsize=(4.6 * len(lines), 3.6), squeeze=False)
    wide = min(x) > 0 and max(x) >= 8 * min(x)
    for panel, (name, values) in zip(axes.flat, lines.items(), strict=True):
        panel.plot(x, values, marker="o")
        panel.set(xlabel=x_name, ylabel=name, ylim=(0, None))
        if wide:
            panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
