"""The picture of the GPU check: which share of a device copy's speed each codec reaches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.codecs import GOALS

from thinwire.units import format_bytes

__all__ = ["draw"]

_COLOURS: Final = {"encode": "#1f5fa8", "decode": "#6fa3d8"}
_GOAL: Final = "#c4442b"
_HEIGHT: Final = 0.38


def draw(speeds: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw a panel for every dtype, at the largest size, with a bar for every codec and direction, from speeds as JSON
    holds them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    size = max(each["size"] for each in speeds)
    largest = [each for each in speeds if each["size"] == size]
    codecs = list(dict.fromkeys(each["subject"] for each in largest))
    dtypes = list(dict.fromkeys(each["dtype"] for each in largest))
    figure = Figure(figsize=(2.2 + 3.6 * len(dtypes), 1.4 + 0.42 * len(codecs)), layout="constrained")
    panels = figure.subplots(1, len(dtypes), squeeze=False, sharex=True, sharey=True)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        for each in largest:
            if each["dtype"] == dtype:
                place = codecs.index(each["subject"]) + _HEIGHT * (0.5 if each["direction"] == "decode" else -0.5)
                axes.barh(place, each["share"], height=_HEIGHT, color=_COLOURS[each["direction"]])
        for index, codec in enumerate(codecs):
            if codec in GOALS:
                axes.plot([GOALS[codec]] * 2, [index - _HEIGHT, index + _HEIGHT], color=_GOAL, linewidth=1.5)
        axes.set_title(f"{dtype}, {format_bytes(size)}", fontsize=10)
        axes.set_yticks(range(len(codecs)), codecs)
        axes.set_ylim(len(codecs) - 0.4, -0.6)
        axes.set_xlabel("share of a device copy's speed")
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    handles = [*(Patch(color=colour, label=way) for way, colour in _COLOURS.items()), Patch(color=_GOAL, label="goal")]
    panels[0].set_xlim(left=0)  # of all, once they have their bars
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
