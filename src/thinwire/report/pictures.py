"""Pictures that commands draw into a file: bandwidth of a profile, pairs of hosts, and how figures change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from thinwire.spec.profile import CollectiveRow, Profile

_MOST_NAMES: Final = 64
"""Hosts up to which the axes name each of them."""

_Shape = tuple[int, int, str]


def draw_bandwidth(profile: Profile, path: Path) -> None:
    """Draw what every collective makes of the links, against the size of its messages: one panel for each shape of
    group, one line for each collective, quartiles shaded."""
    shapes = _by_shape(profile)
    columns = min(3, max(1, len(shapes)))
    lines = -(-len(shapes) // columns) or 1
    figure = _figure(5.2 * columns, 3.6 * lines)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for panel, (shape, kinds) in zip(axes.flat, shapes.items(), strict=False):
        for kind, rows in kinds.items():
            sizes = [row.sent for row in rows]
            panel.plot(sizes, [_gbits(row.sent, row.seconds) for row in rows], marker="o", markersize=3, label=kind)
            low, high = ([_gbits(row.sent, getattr(row, end)) for row in rows] for end in ("high", "low"))
            panel.fill_between(sizes, low, high, alpha=0.15)
        panel.set(
            xscale="log", yscale="log", title=_title(shape), xlabel="bytes a rank sends", ylabel="Gbit/s of a rank"
        )
        panel.grid(True, which="major", alpha=0.3)
        panel.legend(fontsize=7)
    for panel in list(axes.flat)[len(shapes) :]:
        panel.set_visible(False)
    figure.suptitle(f"{profile.nodes} nodes x {profile.gpus_per_node} ranks, {profile.device}, {profile.backend}")
    figure.savefig(path, dpi=110)


def draw_pairs(leaves: Mapping[str, Sequence[str]], gbps: Mapping[tuple[str, str], float], path: Path) -> None:
    """Draw the bandwidth between hosts, Gbit/s of each measured pair: a square for each pair, with lines between
    leaves."""
    hosts = [host for names in leaves.values() for host in names]
    rates = [[gbps.get((one, other), gbps.get((other, one), math.nan)) for other in hosts] for one in hosts]
    side = max(4.0, min(12.0, 0.3 * len(hosts) + 2.5))
    figure = _figure(side + 1.0, side)
    panel = figure.subplots()
    shown = panel.imshow(rates, cmap="viridis", vmin=0.0)
    figure.colorbar(shown, label="Gbit/s of a pair, all pairs at once, each way", shrink=0.8)
    border = -0.5
    for names in [*leaves.values()][:-1]:
        border += len(names)
        panel.axhline(border, color="white", linewidth=1.5)
        panel.axvline(border, color="white", linewidth=1.5)
    if len(hosts) <= _MOST_NAMES:
        panel.set_xticks(range(len(hosts)), hosts, rotation=90, fontsize=7)
        panel.set_yticks(range(len(hosts)), hosts, fontsize=7)
    panel.set_title(f"{len(hosts)} hosts below {len(leaves)} {'leaf' if len(leaves) == 1 else 'leaves'}")
    figure.savefig(path, dpi=110)


def draw_sweep(path: Path, x_name: str, x: Sequence[float], lines: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw how figures change with another: one panel for each line, all over the same axis."""
    figure = _figure(4.6 * len(lines), 3.6)
    wide = min(x) > 0 and max(x) >= 8 * min(x)
    for panel, (name, values) in zip(figure.subplots(1, len(lines), squeeze=False).flat, lines.items(), strict=True):
        panel.plot(x, values, marker="o")
        panel.set(xlabel=x_name, ylabel=name, ylim=(0, None))
        if wide:
            panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="tight")


def _by_shape(profile: Profile) -> Mapping[_Shape, Mapping[str, list[CollectiveRow]]]:
    found: dict[_Shape, dict[str, list[CollectiveRow]]] = {}
    for row in sorted(profile.collectives, key=lambda row: row.sent):
        found.setdefault((row.local, row.nodes, row.groups), {}).setdefault(row.kind, []).append(row)
    return dict(sorted(found.items()))


def _gbits(sent: int, seconds: float) -> float:
    return 8e-9 * sent / seconds


def _title(shape: _Shape) -> str:
    local, nodes, groups = shape
    return f"{local} a node x {nodes} nodes{'' if groups == 'all' else ', one group alone'}"
