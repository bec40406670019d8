"""The page of the GPU check, from the records of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.gpu.chart import draw
from benchmarks.gpu.outcome import Record
from benchmarks.gpu.parts import PARTS

from thinwire.report.sheet import Sheet, insert, markdown_table

__all__ = ["COMMAND", "NO_CARD", "REHEARSED", "markdown", "update"]

COMMAND: Final = "python -m benchmarks.gpu render docs/results/gpu --page docs/gpu.md"
NO_CARD: Final = "**No card has run this check yet.** The tables appear here once one has."
REHEARSED: Final = "**Rehearsal on CPU: it proves the script, not the card.** Sizes are tiny and times mean nothing."


def update(page: Path, records: Mapping[str, Record]) -> None:
    """Rewrite the results of a page, and the picture that it shows.

    Args:
        page: The page, with the marks between which results stand.
        records: Records by part.
    """
    picture = page.parent / "results" / "gpu-codecs.png"
    speeds = records["codecs"].outcome.data.get("speeds") if "codecs" in records else None
    if speeds:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw(speeds, picture)
    text = markdown(records, "results/gpu-codecs.png" if speeds else None)
    page.write_text(insert(page.read_text(encoding="utf-8"), text, COMMAND), encoding="utf-8")


def markdown(records: Mapping[str, Record], picture: str | None) -> str:
    """The results as Markdown.

    Args:
        records: Records by part; a part without one has not run.
        picture: Path of the picture of codec speeds, relative to the page; None if there is none.
    """
    lines = [_headline(records), "", *markdown_table(_overview(records))]
    for part in PARTS:
        record = records.get(part.name)
        if record is None:
            continue
        lines += [f"### {part.name}", ""]
        if record.device == "cpu":
            lines += [REHEARSED, ""]
        if record.error:
            lines += [f"{record.status}:", "", "```text", record.error.strip(), "```", ""]
        if part.name == "codecs" and picture is not None:
            lines += [f"![share of a device copy's speed, by codec]({picture})", ""]
        for sheet in record.outcome.sheets:
            lines += markdown_table(sheet)
        lines += [line for note in record.outcome.notes for line in (note, "")]
        lines += _verdicts(record)
    return "\n".join(lines)


def _headline(records: Mapping[str, Record]) -> str:
    if not any(record.device == "cuda" for record in records.values()):
        return REHEARSED if records else NO_CARD
    dates = sorted(record.date for record in records.values() if record.device == "cuda")
    return f"Parts that ran on a card ended between {dates[0]} and {dates[-1]}."


def _overview(records: Mapping[str, Record]) -> Sheet:
    rows = []
    for part in PARTS:
        record = records.get(part.name)
        state = "not run" if record is None else record.status + (" (rehearsal)" if record.device == "cpu" else "")
        took = "" if record is None or not record.seconds else f"{record.seconds / 60:.1f}"
        rows.append([f"`{part.name}`", part.proves, state, f"{part.minutes:g}", took])
    return Sheet("parts", ("part", "a pass proves", "result", "minutes, expected", "minutes, taken"), 3, rows)


def _verdicts(record: Record) -> list[str]:
    """All checks that are missed; of those that are met the number alone, unless they are few."""
    checks = record.outcome.checks
    shown = [check for check in checks if not check.met or len(checks) <= _FEW]
    lines = []
    if shown:
        rows = [[each.what, each.measured, each.wanted, "met" if each.met else "missed"] for each in shown]
        lines += markdown_table(Sheet("checks", ("what", "measured", "wanted", ""), 4, rows))
    hidden = len(checks) - len(shown)
    return [*lines, f"{hidden} more checks are met.", ""] if hidden else lines


_FEW: Final = 24
