"""Tables on narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from thinwire.report import Sheet, print_sheet

_COLUMNS = ["", "P", "codecs", "batch", "step s", "waiting s", "memory"]
_ROWS = [
    ["1", "4x1", "-", "4 x 16", "27.003", "0.116", "74.4 GiB"],
    ["15 zeropp", "8x4", "secondary 8x1 gather int8:256 inside int4:256", "4 x 16", "27.568", "0.107", "51.1 GiB"],
]


@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_a_narrow_terminal_breaks_words_and_no_number(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_sheet(console, Sheet("Plans", _COLUMNS, 4, _ROWS))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed
    for row in _ROWS:
        assert all(cell in printed for cell in row[4:])
        assert all(word in printed for cell in row[:4] for word in cell.split())
    if width >= 60:
        assert max(map(len, printed.splitlines())) <= width
