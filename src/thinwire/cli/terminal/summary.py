"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:  # these load pydantic, which `thinwire --help` does not need
    from thinwire.record import RunRecord
    from thinwire.train.directory import RunDirectory


def summary_table(run: RunRecord, directory: RunDirectory) -> Table:
    """Build the table of a run's results, its communication and the location of its files."""
    from thinwire.report.figures import figures

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    assert run.summary is not None, "it is complete"
    summary, numbers = run.summary, figures(run)
    table.add_row("validation loss", _loss(summary.get("final_val_loss"), "nats per token"))
    entropy = f"{summary['unigram_entropy']:.3f} nats per token"
    table.add_row("unigram entropy", f"{entropy}, for comparison: token frequencies alone")
    table.add_row("training loss", _loss(summary.get("final_train_loss"), f"after {summary['steps']} steps"))
    if numbers["tokens_per_second"]:
        table.add_row("speed", f"{numbers['tokens_per_second']:,.0f} tokens/s")
    if run.records:
        sent, exposed, codec = (numbers[name] for name in ("bytes_per_step", "exposed_seconds", "codec_seconds"))
        cut = [axis for axis in ("tp", "pp", "ep", "cp") if getattr(run.plan, axis) > 1]
        lines = [
            f"{kind} {format_bytes(hops['inside'])} inside nodes, {format_bytes(hops['across'])} across"
            for kind, hops in sent.items()
        ]
        lines += [f"{axis} not counted: torch's own group sends it" for axis in cut if axis not in sent]
        table.add_row("sent per step", "\n".join(lines) or "nothing: there is one rank")
        known = {axis for record in run.records for axis in record.get("exposed") or {}}
        unknown = " and ".join(axis for axis in cut if axis not in known)
        table.add_row("exposed per step", _seconds(exposed) + (f", not counting {unknown}" if unknown else ""))
        if codec:
            table.add_row("codecs per step", _seconds(codec))
    table.add_row("files", shown(directory.path))
    for path in (directory.metrics, directory.summary, directory.picture, directory.checkpoints):
        table.add_row("", shown(path))
    return table


def shown(path: Path) -> str:
    """The shortest form of an absolute path: relative to the working directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _loss(value: float | None, what: str) -> str:
    """A loss; the last one that a summary knows may not have been finite."""
    return "no finite number" if value is None else f"{value:.3f} {what}"


def _seconds(by_kind: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {format_duration(seconds)}" for kind, seconds in by_kind.items()) or "nothing"
