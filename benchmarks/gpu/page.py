"""The page of the GPU check, from the records of its parts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from benchmarks.gpu.chart import draw
from benchmarks.gpu.outcome import Check, Record, place
from benchmarks.gpu.parts import PARTS

from thinwire.report.sheet import Sheet
from thinwire_bench.pages import insert, markdown_table

__all__ = ["COMMAND", "NO_CARD", "REHEARSED", "markdown", "update"]

COMMAND: Final = "python -m benchmarks.gpu render docs/results/gpu --page docs/gpu.md"
NO_CARD: Final = "**No card has run this check yet.** The tables appear here once one has."
REHEARSED: Final = "**Rehearsal on CPU: it proves the script, not the card.** Sizes are tiny and times mean nothing."

_ERROR: Final = re.compile(r"[\w.]+(Error|Exception): \S")
_FEW: Final = 6
"""Met checks are shown one by one where there are no more than this."""

Cards = Mapping[str, Mapping[str, Record]]
"""Records by card and part; a part without one has not run on that card."""


def update(page: Path, cards: Cards) -> None:
    """Rewrite the results of a page, and the pictures that it shows.

    Args:
        page: The page, with the marks between which results stand.
        cards: Records by card and part.
    """
    for card, records in cards.items():
        if speeds := _speeds(records):
            picture = page.parent / _picture(card)
            picture.parent.mkdir(parents=True, exist_ok=True)
            draw(speeds, picture)
    page.write_text(insert(page.read_text(encoding="utf-8"), markdown(cards), COMMAND), encoding="utf-8")


def markdown(cards: Cards) -> str:
    """The results as Markdown."""
    if not cards:
        return "\n".join([NO_CARD, "", *markdown_table(_overview({}))])
    return "\n".join(line for card, records in cards.items() for line in _of_card(card, records))


def _of_card(card: str, records: Mapping[str, Record]) -> list[str]:
    is_rehearsed = all(record.device == "cpu" for record in records.values())
    dates = sorted(case.date for record in records.values() for case in record.cases.values())
    lines = [f"### {'Rehearsal' if is_rehearsed else card}", ""]
    lines += [REHEARSED if is_rehearsed else f"Cases ended between {dates[0]} and {dates[-1]}.", ""]
    lines += markdown_table(_overview(records))
    for name, record in records.items():
        lines += [f"#### {name}", ""]
        for case, ended in record.cases.items():
            if ended.error:
                # The record has the lines that led to it.
                lines += [f"{case} {ended.status}: `{_named(ended.error)}`", ""]
        if record.left:
            lines += [f"Not run yet: {', '.join(record.left)}.", ""]
        if name == "codecs" and _speeds(records):
            lines += [f"![share of a device copy's speed, by codec]({_picture(card)})", ""]
        outcomes = [case.outcome for case in record.cases.values()]
        for sheet in _joined(sheet for outcome in outcomes for sheet in outcome.sheets):
            lines += markdown_table(sheet)
        for note in dict.fromkeys(note for outcome in outcomes for note in outcome.notes):
            lines += [note, ""]
        lines += _verdicts(record.checks)
    return lines


def _named(error: str) -> str:
    """The line that names an error: the last one that ends a traceback, or else the first."""
    lines = error.strip().splitlines()
    return next((line for line in reversed(lines) if _ERROR.match(line)), lines[0])


def _joined(sheets: Iterable[Sheet]) -> list[Sheet]:
    """Tables with the same title and columns become one."""
    rows: dict[tuple[str, tuple[str, ...], int], list[list[str]]] = {}
    for sheet in sheets:
        rows.setdefault((sheet.title, tuple(sheet.columns), sheet.words), []).extend(map(list, sheet.rows))
    return [Sheet(title, columns, words, cells) for (title, columns, words), cells in rows.items()]


def _speeds(records: Mapping[str, Record]) -> list[Mapping[str, object]]:
    return records["codecs"].data("speeds") if "codecs" in records else []


def _picture(card: str) -> str:
    """Path of the picture of codec speeds, relative to the page."""
    return f"{place(Path('results/gpu'), card)}/codecs.png"


def _overview(records: Mapping[str, Record]) -> Sheet:
    rows = []
    for part in PARTS:
        record = records.get(part.name)
        state, took = "not run", ""
        if record is not None:
            state = f"{record.status} (rehearsal)" if record.device == "cpu" else record.status
            took = f"{record.seconds / 60:.1f}" if record.seconds else ""
        rows.append([f"`{part.name}`", part.proves, state, took])
    return Sheet("parts", ("part", "a pass proves", "result", "minutes"), 3, rows)


def _verdicts(checks: tuple[Check, ...]) -> list[str]:
    """All checks that are missed; of those that are met the number alone, unless they are few."""
    shown = [check for check in checks if not check.met or len(checks) <= _FEW]
    lines = []
    if shown:
        rows = [[each.what, each.measured, each.wanted, "met" if each.met else "missed"] for each in shown]
        lines += markdown_table(Sheet("checks", ("what", "measured", "wanted", ""), 4, rows))
    hidden = len(checks) - len(shown)
    return [*lines, f"{hidden} more checks are met.", ""] if hidden else lines
