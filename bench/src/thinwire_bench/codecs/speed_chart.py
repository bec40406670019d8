"""A run as a picture: how much of memcpy's speed each codec reaches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from thinwire.units import format_bytes
from thinwire_bench.codecs.jobs import DIRECTIONS
from thinwire_bench.codecs.study import CodecStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = {"encode": "#1f5fa8", "decode": "#6fa3d8", "decode_add": "#c3d7ec"}
_LINE: Final = "#c4442b"
_LINES: Final = (0.8, 0.5)
_HEIGHT: Final = 0.27


def draw(study: CodecStudy, path: Path) -> None:
    """Draw a panel for every dtype and size, a bar for every codec and direction; peers have none."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    timed = [each for each in study.speeds if each.subject in study.codecs]
    dtypes = list(dict.fromkeys(each.dtype for each in timed)) or ["float32"]
    sizes = list(dict.fromkeys(each.size for each in timed)) or [0]
    codecs = [codec for codec in study.codecs if any(each.subject == codec for each in timed)]
    height = 0.42 * len(codecs) + 0.9
    figure = Figure(figsize=(1.8 + 4.2 * len(sizes), height * len(dtypes) + 0.7), layout="constrained")
    panels = figure.subplots(len(dtypes), len(sizes), squeeze=False, sharex=True, sharey=True)
    for dtype, line in zip(dtypes, panels, strict=True):
        for size, axes in zip(sizes, line, strict=True):
            _panel(axes, study, codecs, dtype, size)
            axes.set_title(f"{dtype}, {format_bytes(size)}", fontsize=10)
    panels[0][0].set_ylim(max(1, len(codecs)) - 0.5, -0.5)
    for axes in panels[-1]:
        axes.set_xlabel("share of memcpy")
    handles = [Patch(color=_COLOURS[direction]) for direction in DIRECTIONS]
    figure.legend(handles, DIRECTIONS, loc="outside lower center", ncols=len(DIRECTIONS), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, study: CodecStudy, codecs: list[str], dtype: str, size: int) -> None:
    here = [each for each in study.speeds if (each.dtype, each.size) == (dtype, size)]
    for each in here:
        if each.subject not in codecs or each.direction not in DIRECTIONS:
            continue
        position = codecs.index(each.subject) + _HEIGHT * (DIRECTIONS.index(each.direction) - 1)
        spread = [[each.share - min(each.share, each.share_min)], [max(each.share, each.share_max) - each.share]]
        axes.barh(position, each.share, height=_HEIGHT, color=_COLOURS[each.direction])
        axes.errorbar(each.share, position, xerr=spread, color="#333333", linewidth=0.8, fmt="none")
    for share in _LINES:
        axes.axvline(share, color=_LINE, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(codecs)), codecs)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
