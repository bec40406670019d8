"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:  # the module loads pydantic, which `thinwire --help` does not need
    from thinwire.train.directory import RunDirectory

_AXES = ("tp", "pp", "ep", "cp")
"""Axes besides the data-parallel one."""


def summary_table(
    summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]], began: int, directory: RunDirectory
) -> Table:
    """Build the table of a run's results, its communication and the location of its files.

    Args:
        summary: Content of ``summary.json``.
        records: Records of ``metrics.jsonl``.
        began: Number of steps made before the current plan; their communication is left out.
        directory: Directory of the run.

    Returns:
        A table of two columns.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    val_loss, entropy = summary["final_val_loss"], summary["unigram_entropy"]
    table.add_row("validation loss", f"{val_loss:.3f} nats per token")
    table.add_row("unigram entropy", f"{entropy:.3f} nats per token, for comparison: token frequencies alone")
    table.add_row("training loss", f"{summary['final_train_loss']:.3f} after {summary['steps']} steps")
    if summary["tokens_per_second"]:
        table.add_row("speed", f"{summary['tokens_per_second']:,.0f} tokens/s")
    records = [record for record in records if record["step"] > began]
    if records:
        steps = records[-1]["step"] - began
        cut = [axis for axis in _AXES if summary.get("plan", {}).get(axis, 1) > 1]
        table.add_row("sent per step", _sent(records, steps, cut))
        table.add_row("exposed per step", _exposed(records, steps, cut))
        if any(seconds for record in records for seconds in record.get("codec", {}).values()):
            table.add_row("codecs per step", _seconds(records, steps, "codec"))
    table.add_row("files", shown(directory.path))
    for path in (directory.metrics, directory.summary, directory.picture, directory.checkpoints):
        table.add_row("", shown(path))
    return table


def shown(path: Path) -> str:
    """The shortest form of a path.

    Args:
        path: Absolute path.

    Returns:
        The path relative to the working directory if it is below it, otherwise the absolute path.
    """
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _sent(records: Sequence[Mapping[str, Any]], steps: int, cut: Sequence[str]) -> str:
    """Bytes of all ranks per step and kind; kinds that sent nothing are left out.

    Args:
        records: Records of ``metrics.jsonl``; records before a change of the grid may lack an axis.
        steps: Number of steps that the records cover.
        cut: Axes of the run other than the data-parallel one.
    """
    total: dict[str, dict[str, int]] = {}
    for record in records:
        for kind, hops in record["bytes"].items():
            sums = total.setdefault(kind, {"inside": 0, "across": 0})
            for hop in sums:
                sums[hop] += hops[hop]
    parts = [
        f"{kind} {format_bytes(sums['inside'] / steps)} inside nodes, {format_bytes(sums['across'] / steps)} across"
        for kind, sums in total.items()
        if sums["inside"] or sums["across"]
    ]
    parts += [f"{axis} not counted: torch's own group sends it" for axis in cut if axis not in total]
    return "\n".join(parts) or "nothing: there is one rank"


def _exposed(records: Sequence[Mapping[str, Any]], steps: int, cut: Sequence[str]) -> str:
    """Seconds per step that computation waited, by kind, and the axes that were not timed."""
    unknown = [axis for axis in cut if not any(axis in record.get("exposed", {}) for record in records)]
    return _seconds(records, steps, "exposed") + (f", not counting {' and '.join(unknown)}" if unknown else "")


def _seconds(records: Sequence[Mapping[str, Any]], steps: int, what: str) -> str:
    """Seconds per step and kind; kinds without any are left out."""
    total: dict[str, float] = {}
    for record in records:
        for kind, seconds in record.get(what, {}).items():
            total[kind] = total.get(kind, 0.0) + seconds
    parts = [f"{kind} {format_duration(seconds / steps)}" for kind, seconds in total.items() if seconds > 0]
    return ", ".join(parts) or "nothing"
