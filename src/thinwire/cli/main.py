"""``thinwire``: the commands. Each lives in a module of its own and imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

import thinwire
from thinwire.cli.bench import bench
from thinwire.cli.bench_codecs import codecs
from thinwire.cli.bench_convergence import convergence
from thinwire.cli.bench_gains import kernels, stages, techniques
from thinwire.cli.bench_hybrid import hybrid
from thinwire.cli.bench_overlap import overlap
from thinwire.cli.bench_planner import planner
from thinwire.cli.bench_reductions import reductions
from thinwire.cli.bench_spectra import spectra
from thinwire.cli.doctor import doctor
from thinwire.cli.export import export
from thinwire.cli.lab import lab
from thinwire.cli.plan import plan
from thinwire.cli.profile import profile
from thinwire.cli.report import report
from thinwire.cli.reproduce import reproduce
from thinwire.cli.sim import sim
from thinwire.cli.train import train

app = typer.Typer(
    name="thinwire",
    help="Train large language models over slow networks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(train)
app.command()(plan)
app.command()(sim)
app.command()(reproduce)
app.command()(profile)
app.command()(report)
app.command()(export)
app.command()(doctor)
app.command(context_settings={"allow_interspersed_args": False})(lab)
bench.command()(overlap)
bench.command()(codecs)
bench.command()(convergence)
bench.command()(reductions)
bench.command()(spectra)
bench.command()(hybrid)
bench.command()(techniques)
bench.command()(kernels)
bench.command()(stages)
bench.command()(planner)
app.add_typer(bench)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"thinwire {thinwire.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    del version


if __name__ == "__main__":
    app()
