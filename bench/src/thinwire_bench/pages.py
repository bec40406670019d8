"""Tables of results in the pages of the documentation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from thinwire.errors import UsageError
from thinwire.report import Sheet

__all__ = ["insert", "markdown_table"]

_END: Final = "<!-- results: end -->"


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
