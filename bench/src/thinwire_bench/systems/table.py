"""A benchmark's tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from thinwire.report import Sheet, rich_table
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
        here = [row for row in rows if (row.bandwidth, row.clip) == (bandwidth, clip)]
        sheet = Sheet(setting_name(bandwidth, clip), ("system", *_NUMBERS), 1, [_cells(row) for row in here])
        made.append(rich_table(sheet))
        for shown, row in zip(made[-1].rows, here, strict=True):
            shown.style = "red" if row.refused else _STYLES[row.kind]
    return made


def goals_table(ratios: Mapping[str, Sequence[Ratio]]) -> Table:
    """Comparisons, one line for each setting."""
    columns = ("goal", "link", "clip", "plan", "peer", "ratio of medians", "median of rounds", "min", "max")
    cells = [
        [
            goal, each.bandwidth, "none" if each.clip is None else f"{each.clip:g}", each.plan, each.peer,
            *(f"{number:.3f}" for number in (each.of_medians, each.median, each.smallest, each.largest)),
        ]
        for goal, comparisons in ratios.items()
        for each in comparisons
    ]  # fmt: skip
    return rich_table(Sheet("ours / theirs, below 1 is faster", columns, 5, cells))


def setting_name(bandwidth: str, clip: float | None) -> str:
    link = "links unshaped" if bandwidth == "none" else f"links of {bandwidth}"
    return f"{link}, {'no clipping' if clip is None else f'gradients clipped to {clip:g}'}"


def _cells(row: SystemRow) -> list[str]:
    if row.refused:
        return [row.system, "REFUSED", *[""] * (len(_NUMBERS) - 2), f"{row.loss:.4f}"]
    return [
        row.system, f"{row.step_ms:.1f}", f"{row.step_ms_min:.1f}", f"{row.step_ms_max:.1f}",
        f"{row.tokens_per_second:,.0f}", "" if row.exposed_ms is None else f"{row.exposed_ms:.1f}",
        format_bytes(row.internode_bytes), "" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
        f"{row.cpu_seconds:.3f}", f"{row.bound_ms:.1f}", f"{row.bound_ratio:.2f}", format_bytes(row.peak_rss),
        f"{row.loss:.4f}",
    ]  # fmt: skip
