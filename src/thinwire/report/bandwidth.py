"""A picture of a profile: what every collective makes of the links, against the size of its messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.spec.profile import CollectiveRow, Profile

__all__ = ["draw_bandwidth"]

_Shape = tuple[int, int, str]


def draw_bandwidth(profile: Profile, path: Path) -> None:
    """One panel for each shape of group, one line for each collective, quartiles shaded.

    Args:
        profile: A profile with measured collectives.
        path: The PNG file.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    shapes = _by_shape(profile)
    columns = min(3, max(1, len(shapes)))
    lines = -(-len(shapes) // columns) or 1
    figure, axes = plt.subplots(lines, columns, figsize=(5.2 * columns, 3.6 * lines), squeeze=False, sharex=True)
    for panel, (shape, kinds) in zip(axes.flat, shapes.items(), strict=False):
        for kind, rows in kinds.items():
            sizes = [row.sent for row in rows]
            panel.plot(sizes, [_gbits(row.sent, row.seconds) for row in rows], marker="o", markersize=3, label=kind)
            low, high = (
                [_gbits(row.sent, time) for row, time in zip(rows, times, strict=True)] for times in _bounds(rows)
            )
            panel.fill_between(sizes, low, high, alpha=0.15)
        panel.set(
            xscale="log", yscale="log", title=_title(shape), xlabel="bytes a rank sends", ylabel="Gbit/s of a rank"
        )
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(fontsize=7)
    for panel in list(axes.flat)[len(shapes) :]:
        panel.set_visible(False)
    figure.suptitle(f"{profile.nodes} nodes x {profile.gpus_per_node} ranks, {profile.device}, {profile.backend}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _by_shape(profile: Profile) -> Mapping[_Shape, Mapping[str, list[CollectiveRow]]]:
    found: dict[_Shape, dict[str, list[CollectiveRow]]] = {}
    for row in sorted(profile.collectives, key=lambda row: row.sent):
        found.setdefault((row.local, row.nodes, row.groups), {}).setdefault(row.kind, []).append(row)
    return dict(sorted(found.items()))


def _bounds(rows: list[CollectiveRow]) -> tuple[list[float], list[float]]:
    return [row.high for row in rows], [row.low for row in rows]


def _gbits(sent: int, seconds: float) -> float:
    return 8e-9 * sent / seconds


def _title(shape: _Shape) -> str:
    local, nodes, groups = shape
    return f"{local} a node x {nodes} nodes{'' if groups == 'all' else ', one group alone'}"
