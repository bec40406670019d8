"""``thinwire``: the commands. Each lives in a module of its own and imports what it needs when it runs.

Other packages add commands by an entry point of the group ``thinwire.commands``: its name is the command's, its object
a function or a :class:`typer.Typer` of several.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

import thinwire
from thinwire.cli.doctor import doctor
from thinwire.cli.export import export
from thinwire.cli.lab import lab
from thinwire.cli.plan import plan
from thinwire.cli.profile import profile
from thinwire.cli.report import report
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
app.command()(profile)
app.command()(report)
app.command()(export)
app.command()(doctor)
app.command(context_settings={"allow_interspersed_args": False})(lab)


def _add_plugin(point: EntryPoint) -> None:
    try:
        command = point.load()
    except ImportError as error:
        reason = str(error)

        @app.command(point.name, help=f"Not available: {reason}")
        def unavailable() -> None:
            typer.echo(f"thinwire {point.name} comes from {point.value}, which does not load: {reason}", err=True)
            raise typer.Exit(1)

        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=point.name)
    else:
        app.command(point.name)(command)


for _point in sorted(entry_points(group="thinwire.commands"), key=lambda point: point.name):
    _add_plugin(_point)


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
