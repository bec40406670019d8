"""Every command of ``thinwire bench``, as the entry point of this package names it."""

from __future__ import annotations

import sys
from typing import Final

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.lazy import APP_SETTINGS, Command, lazy_group
from thinwire.extras import require
from thinwire_bench.cli.archived import ARCHIVED

_COMMANDS: Final = {
    name: Command(f"thinwire_bench.cli.{name}:{name}")
    for name in ("step", "codecs", "delta", "planner", "convergence", "chaos", "soak")
} | ARCHIVED
"""In the order of the help."""

bench = typer.Typer(
    name="bench",
    cls=lazy_group(_COMMANDS),
    help="Compare plans and codecs with other systems.",
    **APP_SETTINGS,
)


@bench.callback()
def _group() -> None:
    """Compare plans and codecs with other systems."""
    if "--help" not in sys.argv:
        with explained():
            require("bench", "thinwire bench")
