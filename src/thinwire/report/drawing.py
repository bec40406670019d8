"""How pictures of a report are drawn: figures of matplotlib, shown as SVG inside the page and also written as PNG.

A page may be read on white or on black, so the colours of an SVG are names that the page's style sheet defines. A PNG
has the light colours on white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from thinwire.program.timeline import COMPUTE, WAITING
from thinwire.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE: Final = {
    # Name in the style sheet: on white, on black.
    "ink": ("#24292f", "#d7dde4"),
    "line": ("#d5dae1", "#39424d"),
    "blue": ("#2563b8", "#6ea8fe"),
    "orange": ("#c2570c", "#f6a15b"),
    "green": ("#2f855a", "#68c79a"),
    "purple": ("#7c4fc4", "#b794f6"),
    "pink": ("#b83280", "#f48fb9"),
    "teal": ("#0e7c86", "#5cc8d0"),
    "brown": ("#8a5a2b", "#d0a679"),
    "grey": ("#6b7480", "#9aa4b0"),
}

HUES: Final = ("blue", "orange", "green", "purple", "pink", "teal", "brown", "grey")
"""Colours of several runs, in their order; with more runs than colours, they begin again."""

KIND_HUES: Final = {
    COMPUTE: "blue",
    WAITING: "grey",
    "gather": "green",
    "reduce": "orange",
    "sync": "purple",
    "spread": "pink",
    "control": "grey",
    "update": "teal",
    "up": "brown",
    "down": "brown",
    "tp": "teal",
    "pp": "brown",
    "ep": "blue",
    "cp": "purple",
}
WIDE: Final = 11.0
"""Inches of a figure that takes the whole width of a page."""


@dataclass(frozen=True)
class Chart:
    """A picture with its title above and its caption below, which says what it shows, in which units."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def wide(self) -> bool:
        """Whether the picture takes the whole width of a page."""
        return bool(self.figure.get_figwidth() == WIDE)


def inline_svg(chart: Chart, prefix: str) -> str:
    """An ``<svg>`` element for a page that defines the palette as ``--ink``, ``--line`` and so on. Every id has a
    prefix, which starts with a letter, so that no two pictures of a page share one."""
    import matplotlib as mpl

    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        chart.figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    svg = text[text.index("<svg") :]
    for name, (light, _) in PALETTE.items():
        svg = svg.replace(light, f"var(--{name})")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", svg)
    # The page's style sheet sets the width, and viewBox keeps the shape.
    svg = re.sub(r'^(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'^(<svg[^>]*?) (?:height|width)="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-labelledby="{prefix}-title"', 1).strip()


def write_png(chart: Chart, path: Path) -> None:
    """Write a picture on white. This fixes its layout: the SVG that follows reuses it."""
    chart.figure.savefig(path, dpi=130, facecolor="white")
    chart.figure.set_layout_engine("none")  # the layout takes most of the time and would be the same


def new_figure(width: float = 6.4, height: float = 3.0) -> Figure:
    """An empty figure; width and height are inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def new_axes(width: float = 6.4, height: float = 3.0) -> tuple[Figure, Axes]:
    """A figure with one pair of axes."""
    figure = new_figure(width, height)
    return figure, figure.add_subplot()


def dress(axes: Axes, x_name: str, y_name: str) -> None:
    """Name the axes, and give spines, ticks and grid the colours of the page."""
    ink, line = light("ink"), light("line")
    axes.set_xlabel(x_name, color=ink, fontsize=9)
    axes.set_ylabel(y_name, color=ink, fontsize=9)
    axes.tick_params(colors=ink, labelsize=8, length=3)
    for place, spine in axes.spines.items():
        spine.set_color(line)
        spine.set_visible(place in ("left", "bottom"))
    axes.grid(visible=True, color=line, linewidth=0.6)
    axes.set_axisbelow(True)


def dress_rows(axes: Axes, x_name: str, names: Sequence[str], **text: Any) -> None:
    """Name the rows of a picture of bars, the first on top, and its x axis."""
    axes.set_yticks(range(len(names)), names, **text)
    axes.set_ylim(len(names) - 0.5, -0.5)
    dress(axes, x_name, "")
    axes.grid(visible=False, axis="y")


def add_legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, labelcolor=light("ink"))


def mark_restarts(axes: Axes, run: RunRecord) -> None:
    """Draw a dotted line at every step from which the run continued."""
    for start in run.starts:
        if start.get("step"):
            axes.axvline(start["step"], color=light("grey"), linestyle=":", linewidth=1)


def light(name: str) -> str:
    """A colour of the palette as it is on white."""
    return PALETTE[name][0]


def strength(track: str) -> float:
    """The opacity of a track of a timeline: across nodes is strong, inside a node weaker, codecs weakest."""
    if track in (COMPUTE, WAITING):
        return 0.85
    return 1.0 if "across" in track else 0.6 if "inside" in track else 0.35


def points_of(run: RunRecord, key: str, across: str = "step") -> list[tuple[float, float]]:
    """Where the run logged both: the record's ``across`` and its ``key``."""
    return [
        (float(record[across]), float(record[key]))
        for record in run.records
        if record.get(key) is not None and record.get(across) is not None
    ]


def columns_of(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The x and the y values of points."""
    return [x for x, _ in points], [y for _, y in points]


def byte_scale(most: float) -> tuple[float, str]:
    """The unit for amounts up to ``most`` bytes: its bytes and its name."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if most >= size:
            return float(size), unit
    return 1.0, "bytes"
