"""A picture of the bandwidth between pairs of hosts, leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["draw_pairs"]

_MOST_NAMES = 64
"""Hosts up to which the axes name each of them."""


def draw_pairs(leaves: Mapping[str, Sequence[str]], gbps: Mapping[tuple[str, str], float], path: Path) -> None:
    """Draw a square for each pair of hosts, with lines between leaves.

    Args:
        leaves: Hosts of each leaf.
        gbps: Gbit/s of pairs of hosts, in either order; pairs that were not measured are missing.
        path: The PNG file.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("agg")
    hosts = [host for names in leaves.values() for host in names]
    rates = [[gbps.get((one, other), gbps.get((other, one), math.nan)) for other in hosts] for one in hosts]
    side = max(4.0, min(12.0, 0.3 * len(hosts) + 2.5))
    figure, panel = plt.subplots(figsize=(side + 1.0, side))
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
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
