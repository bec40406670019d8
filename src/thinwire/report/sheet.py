"""A table as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from thinwire.units import format_bytes, format_duration

if TYPE_CHECKING:
    from thinwire.plan import RunComparison

_WHOLE = 12
"""Characters up to which a narrow terminal breaks no word and no number with its unit."""


@dataclass(frozen=True)
class Sheet:
    """One table as text.

    Attributes:
        title: Title above the table.
        columns: Names of the columns; the first ones hold words, the others numbers.
        words: Number of columns that hold words.
        rows: Cells of each row.
        faint: Indices of rows that are only shown for comparison.
    """

    title: str
    columns: Sequence[str]
    words: int
    rows: Sequence[Sequence[str]]
    faint: frozenset[int] = frozenset()


def prediction_sheet(comparison: RunComparison, title: str) -> Sheet:
    """What was predicted of a run, and what was measured."""
    shown = {"s": format_duration, "B": format_bytes}
    rows = [
        [q.name, shown[q.unit](q.predicted), shown[q.unit](q.measured), "-" if q.error is None else f"{q.error:+.1%}"]
        for q in comparison.quantities
    ]
    return Sheet(title, ["", "predicted", "measured", "error"], 1, rows)


def rich_table(sheet: Sheet) -> Table:
    """A table for a terminal; rows that end in "missed" or "red" are red.

    Where the terminal is narrow, words go on in the next line. Numbers stay whole.
    """
    table = Table(title=sheet.title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, (name, *cells) in enumerate(zip(sheet.columns, *sheet.rows, strict=True)):
        parts = [part for text in (name, *cells) for part in text.split(" ")]
        if index < sheet.words:
            table.add_column(name, overflow="fold", min_width=min(max(map(len, parts)), _WHOLE))
        else:
            whole = [cell for cell in cells if len(cell) <= _WHOLE]
            table.add_column(name, justify="right", min_width=max(map(len, [*parts, *whole])))
    for index, row in enumerate(sheet.rows):
        style = "dim" if index in sheet.faint else None
        table.add_row(*row, style="red" if row[-1] in {"missed", "red"} else style)
    return table


def print_sheet(console: Console, sheet: Sheet) -> None:
    """Print a table. A terminal that is too narrow for its numbers breaks the lines, and nothing is lost."""
    console.print(rich_table(sheet), crop=False)
