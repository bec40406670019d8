"""Tables of results in the pages of the documentation."""

from __future__ import annotations

import re
from typing import Final

from thinwire.errors import UsageError
from thinwire.report import Sheet

_END: Final = "<!-- results: end -->"


def markdown_table(sheet: Sheet) -> list[str]:
    """The lines of a table for a Markdown page, an empty one last."""
    rule = ["---" if index < sheet.words else "---:" for index in range(len(sheet.columns))]
    lines = [f"| {' | '.join(cells)} |" for cells in (sheet.columns, rule, *sheet.rows)]
    return [f"**{sheet.title}**", "", *lines, ""]


def insert(page: str, text: str, command: str) -> str:
    """A page with the results replaced that stand between its two marks, the first of which names the command.

    Raises:
        UsageError: the page has no such place.
    """
    begin = f"<!-- results: begin (written by `{command}`) -->"
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(_END)}", re.DOTALL)
    if not pattern.search(page):
        raise UsageError(f"the page has no place for results; mark it with the lines\n{begin}\n{_END}")
    return pattern.sub(lambda match: f"{begin}\n\n{text.strip()}\n\n{_END}", page)
