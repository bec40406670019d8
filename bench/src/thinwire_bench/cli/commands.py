"""Every command of ``thinwire bench``, as the entry point of this package names it."""

from __future__ import annotations

import sys
from typing import Final

import typer

from thinwire.cli.errors import explained
from thinwire.cli.lazy import APP_SETTINGS, Command, lazy_group
from thinwire.extras import require

__all__ = ["bench"]

_COMMANDS: Final = {
    "step": Command("thinwire_bench.cli.step:step"),
    "start": Command("thinwire_bench.cli.start:start"),
    "overlap": Command("thinwire_bench.cli.overlap:overlap"),
    "codecs": Command("thinwire_bench.cli.codecs:codecs"),
    "convergence": Command("thinwire_bench.cli.convergence:convergence"),
    "islands": Command("thinwire_bench.cli.islands:islands"),
    "islands-chaos": Command("thinwire_bench.cli.islands_chaos:islands_chaos"),
    "reductions": Command("thinwire_bench.cli.reductions:reductions"),
    "spectra": Command("thinwire_bench.cli.spectra:spectra"),
    "hybrid": Command("thinwire_bench.cli.hybrid:hybrid"),
    "techniques": Command("thinwire_bench.cli.gains:techniques"),
    "kernels": Command("thinwire_bench.cli.gains:kernels"),
    "stages": Command("thinwire_bench.cli.gains:stages"),
    "backward": Command("thinwire_bench.cli.gains:backward"),
    "units": Command("thinwire_bench.cli.units:units"),
    "placement": Command("thinwire_bench.cli.placement:placement"),
    "checkpoint": Command("thinwire_bench.cli.checkpoint:checkpoint"),
    "data": Command("thinwire_bench.cli.data:data"),
    "planner": Command("thinwire_bench.cli.planner:planner"),
    "chaos": Command("thinwire_bench.cli.chaos:chaos"),
    "mutations": Command("thinwire_bench.cli.mutations:mutations"),
    "soak": Command("thinwire_bench.cli.soak:soak"),
    "planning-time": Command("thinwire_bench.cli.planning_time:planning_time"),
    "emit": Command("thinwire_bench.cli.emit:emit"),
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
