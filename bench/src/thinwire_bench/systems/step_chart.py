"""A benchmark as a picture: a panel for every bandwidth and clip, a bar for every system."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire_bench.peers.interface import SystemKind
from thinwire_bench.systems.rows import SystemRow
from thinwire_bench.systems.table import setting_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_COLOURS: Final = {
    SystemKind.PLAN: "#1f5fa8",
    SystemKind.PEER: "#9db7d5",
    SystemKind.CHANGED: "#d9cbe6",
    SystemKind.BOUND: "#bbbbbb",
}
_NAMES: Final = {
    SystemKind.PLAN: "thinwire",
    SystemKind.PEER: "peers",
    SystemKind.CHANGED: "peers that change the optimisation",
    SystemKind.BOUND: "computation alone",
}
_FLOOR: Final = "#c4442b"


def draw(rows: Sequence[SystemRow], path: Path) -> None:
    """Draw medians with whiskers from the fastest to the slowest round, and each system's own bound; refused rows get
    no bar."""
    from matplotlib.figure import Figure

    bandwidths = list(dict.fromkeys(row.bandwidth for row in rows))
    clips = list(dict.fromkeys(row.clip for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    height = 0.34 * len(systems) + 0.8
    figure = Figure(figsize=(1.2 + 4.4 * len(bandwidths), height * len(clips) + 0.9), layout="constrained")
    panels = figure.subplots(len(clips), len(bandwidths), squeeze=False, sharey=True)
    for clip, line in zip(clips, panels, strict=True):
        for bandwidth, axes in zip(bandwidths, line, strict=True):
            _panel(axes, [row for row in rows if (row.bandwidth, row.clip) == (bandwidth, clip)])
            axes.set_title(setting_name(bandwidth, clip), fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("milliseconds per step")
    handles, names = _legend({row.kind for row in rows})
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, rows: Sequence[SystemRow]) -> None:
    """One bar for each row, the first on top."""
    widest = max((row.step_ms_max for row in rows if row.refused is None), default=1.0)
    for position, row in enumerate(rows):
        if row.refused:
            axes.text(0.01 * widest, position, "refused: its losses differ", va="center", fontsize=8, color=_FLOOR)
            continue
        spread = [[row.step_ms - row.step_ms_min], [row.step_ms_max - row.step_ms]]
        axes.barh(position, row.step_ms, height=0.7, color=_COLOURS[row.kind])
        axes.errorbar(row.step_ms, position, xerr=spread, color="#333333", linewidth=1, capsize=2.5, fmt="none")
        axes.plot([row.bound_ms] * 2, [position - 0.35, position + 0.35], color=_FLOOR, linewidth=1.6)
        axes.text(row.step_ms_max + 0.015 * widest, position, f"{row.step_ms:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row.system for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * widest)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _legend(kinds: set[SystemKind]) -> tuple[list[Artist], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [kind for kind in SystemKind if kind in kinds]
    handles: list[Artist] = [Patch(color=_COLOURS[kind]) for kind in shown]
    handles.append(Line2D([], [], color=_FLOOR, linewidth=1.6))
    handles.append(Line2D([], [], color="#333333", linewidth=1))
    return handles, [
        *(_NAMES[kind] for kind in shown),
        "bound: processor time over cores, or bytes over the link",
        "fastest and slowest round",
    ]
