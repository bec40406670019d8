"""A table as text, for a terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.table import Table

from thinwire.errors import UsageError

_END: Final = "<!-- results: end -->"


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


def rich_table(sheet: Sheet) -> Table:
    """A table for a terminal; rows that end in "missed" or "red" are red."""
    table = Table(title=sheet.title, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(sheet.columns):
        table.add_column(name, justify="left" if index < sheet.words else "right", no_wrap=True)
    for index, row in enumerate(sheet.rows):
        style = "dim" if index in sheet.faint else None
        table.add_row(*row, style="red" if row[-1] in {"missed", "red"} else style)
    return table


def markdown_table(sheet: Sheet) -> list[str]:
    """A table for a Markdown page.

    Args:
        sheet: The table.

    Returns:
        Lines, an empty one last.
    """
    rule = ["---" if index < sheet.words else "---:" for index in range(len(sheet.columns))]
    return [f"**{sheet.title}**", "", *(_row(cells) for cells in (sheet.columns, rule, *sheet.rows)), ""]


def insert(page: str, text: str, command: str) -> str:
    """A page with its results replaced.

    Args:
        page: Text of the page, with the two marks between which the results stand.
        text: Text to put between them.
        command: The command that the first mark names.

    Returns:
        The new page.

    Raises:
        UsageError: the page has no such place.
    """
    begin = f"<!-- results: begin (written by `{command}`) -->"
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(_END)}", re.DOTALL)
    if not pattern.search(page):
        raise UsageError(f"the page has no place for results; mark it with the lines\n{begin}\n{_END}")
    return pattern.sub(lambda match: f"{begin}\n\n{text.strip()}\n\n{_END}", page)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
