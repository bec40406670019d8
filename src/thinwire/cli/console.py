"""Where commands print tables, and what the user typed."""

from __future__ import annotations

import shlex
import sys

from rich.console import Console

__all__ = ["command_line", "wide_console"]

_PIPED_WIDTH = 200
"""Columns where output goes to a file or a pipe: tables are not cut to 80."""


def wide_console(*, as_json: bool = False) -> Console:
    """A console for tables and sentences.

    Args:
        as_json: whether stdout is for JSON; then people read stderr.
    """
    plain = Console(stderr=as_json, highlight=False)
    return (
        plain if plain.is_terminal else Console(stderr=as_json, highlight=False, width=max(plain.width, _PIPED_WIDTH))
    )


def command_line() -> str:
    """What the user typed."""
    return shlex.join(["thinwire", *sys.argv[1:]])
