"""A benchmark's tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from thinwire.units import format_bytes
from thinwire_bench.peers.interface import SystemKind
from thinwire_bench.systems.ratios import Ratio
from thinwire_bench.systems.rows import SystemRow

_NUMBERS = (
    "ms/step", "min", "max", "tokens/s", "exposed ms", "link/step", "predicted", "CPU s", "bound ms", "x bound",
    "peak RSS", "loss",
)  # fmt: skip
_STYLES = {SystemKind.PLAN: "bold", SystemKind.PEER: "", SystemKind.CHANGED: "dim", SystemKind.BOUND: "dim"}


def tables(rows: Sequence[SystemRow]) -> list[Table]:
    """One table for every bandwidth and clip, in the order of the rows."""
    made = []
    for bandwidth, clip in dict.fromkeys((row.bandwidth, row.clip) for row in rows):
        table = Table(title=setting_name(bandwidth, clip), title_justify="left", box=None, pad_edge=False)
        table.add_column("system", no_wrap=True)
        for name in _NUMBERS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in rows:
            if (row.bandwidth, row.clip) == (bandwidth, clip):
                _add(table, row)
        made.append(table)
    return made


def goals_table(ratios: Mapping[str, Sequence[Ratio]]) -> Table:
    """Comparisons, one line for each setting."""
    table = Table(title="ours / theirs, below 1 is faster", title_justify="left", box=None, pad_edge=False)
    for name in ("goal", "link", "clip", "plan", "peer"):
        table.add_column(name, no_wrap=True)
    for name in ("ratio of medians", "median of rounds", "min", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    for goal, comparisons in ratios.items():
        for ratio in comparisons:
            numbers = (ratio.of_medians, ratio.median, ratio.smallest, ratio.largest)
            table.add_row(
                goal,
                ratio.bandwidth,
                clip_name(ratio.clip),
                ratio.plan,
                ratio.peer,
                *(f"{number:.3f}" for number in numbers),
            )
    return table


def setting_name(bandwidth: str, clip: float | None) -> str:
    link = "links unshaped" if bandwidth == "none" else f"links of {bandwidth}"
    return f"{link}, {'no clipping' if clip is None else f'gradients clipped to {clip:g}'}"


def clip_name(clip: float | None) -> str:
    """A clip setting as the command line has it."""
    return "none" if clip is None else f"{clip:g}"


def _add(table: Table, row: SystemRow) -> None:
    if row.refused:
        table.add_row(row.system, "REFUSED", *[""] * (len(_NUMBERS) - 2), f"{row.loss:.4f}", style="red")
        return
    table.add_row(
        row.system,
        f"{row.step_ms:.1f}",
        f"{row.step_ms_min:.1f}",
        f"{row.step_ms_max:.1f}",
        f"{row.tokens_per_second:,.0f}",
        "" if row.exposed_ms is None else f"{row.exposed_ms:.1f}",
        format_bytes(row.internode_bytes),
        "" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
        f"{row.cpu_seconds:.3f}",
        f"{row.bound_ms:.1f}",
        f"{row.bound_ratio:.2f}",
        format_bytes(row.peak_rss),
        f"{row.loss:.4f}",
        style=_STYLES[row.kind],
    )
