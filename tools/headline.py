"""Draws the picture of the README: how fast each system trains over a link, as a share of its speed without a network.

    python tools/headline.py docs/speed.svg

Every point is a median of interleaved rounds in docs/results/compressed.json; docs/results.md has the command that
measured them. The share of a system is the step time of a system that sends nothing, in the same rounds, divided by its
own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LABELLED = 200
"""The only link at which every point has its figure; at others the figures would overlap."""

MBIT = {"1gbit": 1000, "200mbit": 200, "50mbit": 50}
SYSTEMS = {
    "tw:thinwire": ("thinwire", "#c2410c", "o", 2.6, 11),
    "tw:zeropp": ("thinwire, everything sharded", "#f59e0b", "s", 2.0, -11),
    "ddp": ("PyTorch DDP", "#64748b", "^", 1.6, 10),
    "fsdp2": ("PyTorch FSDP2", "#334155", "D", 1.6, -11),
}
"""Label, color, marker, line width, and height of the figure above a point, by system."""


def rows() -> list[dict[str, Any]]:
    """Measured rows of links with a limit."""
    measured = json.loads((RESULTS / "compressed.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in measured if row["bandwidth"] in MBIT and row["refused"] is None]


def shares() -> dict[str, dict[int, float]]:
    """Shares of the speed without a network, by system and by the link's Mbit/s."""
    measured = rows()
    local = {row["bandwidth"]: row["step_ms"] for row in measured if row["system"] == "local"}
    return {
        system: {
            MBIT[row["bandwidth"]]: local[row["bandwidth"]] / row["step_ms"]
            for row in measured
            if row["system"] == system
        }
        for system in SYSTEMS
    }


def draw(path: Path) -> None:
    """Draw one line for each system."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text as paths: readers do not need the font. Without date and random ids, equal data makes equal files.
    with mpl.rc_context({"svg.hashsalt": "thinwire", "svg.fonttype": "path"}):
        figure = Figure(figsize=(7.6, 3.6), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for system, points in shares().items():
            label, color, marker, width, above = SYSTEMS[system]
            links = sorted(points)
            percent = [100 * points[link] for link in links]
            axes.plot(links, percent, color=color, marker=marker, linewidth=width, label=label)
            for link, share in zip(links, percent, strict=True):
                if link != LABELLED:
                    continue
                axes.annotate(
                    f"{share:.0f} %", (link, share), (0, above), textcoords="offset points",
                    ha="center", va="center", color=color, fontsize=8.5,
                )  # fmt: skip
        axes.set(xscale="log", xlim=(32, 1300), ylim=(-6, 100))
        axes.set_xticks(list(MBIT.values()), ["1 Gbit/s", "200 Mbit/s", "50 Mbit/s"])
        axes.minorticks_off()
        axes.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
        axes.set_ylabel("speed, of that without a network")
        axes.set_xlabel("link between two nodes")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left", fontsize=9)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
