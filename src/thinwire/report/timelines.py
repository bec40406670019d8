"""A picture of what runs when in one step under several engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.program.timeline import Span

__all__ = ["draw_timelines"]

_KINDS = ("compute", "gather", "reduce", "sync", "spread", "waiting")
"""Rows of a panel, from above: computation, lanes, and computation standing still."""


def draw_timelines(path: Path, title: str, steps: Mapping[str, Sequence[Span]]) -> None:
    """One panel for each step, all over the same seconds.

    Args:
        path: The PNG file.
        title: Title above the picture.
        steps: Spans of each step, by its name.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    figure, axes = plt.subplots(len(steps), 1, figsize=(9.0, 1.9 * len(steps) + 0.6), sharex=True, squeeze=False)
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
    plt.close(figure)
