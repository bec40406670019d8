"""The console on which commands print tables, paths as it shows them, and the command line that the user typed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from rich.console import Console

_PIPED_WIDTH = 200
"""Columns of output to a file or a pipe, so that tables are not cut to 80 columns."""


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints text as it is: ``runs/[a]`` is a path and no markup."""
    return Console(stderr=stderr, width=width, highlight=False, markup=False)


def wide_console(*, as_json: bool = False) -> Console:
    """A console for tables and sentences, which go to stderr where stdout is for JSON."""
    plain = plain_console(stderr=as_json)
    return plain if plain.is_terminal else plain_console(stderr=as_json, width=max(plain.width, _PIPED_WIDTH))


def say(console: Console, *lines: str) -> None:
    """Print sentences, which a terminal breaks where it likes."""
    for line in lines:
        console.print(line, soft_wrap=True)


def command_line() -> str:
    """The command line that the user typed, quoted for a shell."""
    return shlex.join(["thinwire", *sys.argv[1:]])


def shown(path: Path) -> str:
    """The shortest form of an absolute path: relative to the working directory if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
