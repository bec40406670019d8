"""Every command of ``thinwire bench``, as the entry point of this package names it."""

from __future__ import annotations

import sys

import typer

from thinwire.cli.errors import explained
from thinwire.extras import require
from thinwire_bench.cli.codecs import codecs
from thinwire_bench.cli.convergence import convergence
from thinwire_bench.cli.gains import kernels, stages, techniques
from thinwire_bench.cli.hybrid import hybrid
from thinwire_bench.cli.overlap import overlap
from thinwire_bench.cli.planner import planner
from thinwire_bench.cli.reductions import reductions
from thinwire_bench.cli.spectra import spectra
from thinwire_bench.cli.step import step

__all__ = ["bench"]

bench = typer.Typer(name="bench", help="Measure plans and codecs beside other systems.", no_args_is_help=True)

for _command in (step, overlap, codecs, convergence, reductions, spectra, hybrid, techniques, kernels, stages, planner):
    bench.command()(_command)


@bench.callback()
def _group() -> None:
    """Measure plans and codecs beside other systems."""
    if "--help" not in sys.argv:
        with explained():
            require("bench", "thinwire bench")
