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
    "step": Command("thinwire_bench.cli.step:step"),
    "codecs": Command("thinwire_bench.cli.codecs:codecs"),
    "delta": Command("thinwire_bench.cli.delta:delta"),
    "planner": Command("thinwire_bench.cli.planner:planner"),
    "convergence": Command("thinwire_bench.cli.convergence:convergence"),
    "chaos": Command("thinwire_bench.cli.chaos:chaos"),
    "soak": Command("thinwire_bench.cli.soak:soak"),
    **ARCHIVED,
}
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
