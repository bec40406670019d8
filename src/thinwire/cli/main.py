"""``thinwire``: the commands. Each lives in a module of its own, which is imported when the command runs.

Other packages add commands by an entry point of the group ``thinwire.commands``: its name is the command's, its object
a function or a :class:`typer.Typer` of several.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

import thinwire
from thinwire.cli.terminal.lazy import APP_SETTINGS, Command, lazy_group

_COMMANDS: Final = {
    "train": Command("thinwire.cli.training.train:train"),
    "lighthouse": Command("thinwire.cli.lighthouse:lighthouse"),
    "plan": Command("thinwire.cli.planning.plan:plan"),
    "sim": Command("thinwire.cli.planning.sim:sim"),
    "profile": Command(
        "thinwire.cli.measuring.profile:profile", became={"--kernels": "kernels", "--topology": "topology"}
    ),
    "kernels": Command("thinwire.cli.measuring.kernels:kernels"),
    "topology": Command("thinwire.cli.measuring.topology:topology"),
    "report": Command("thinwire.cli.report:report"),
    "convert": Command("thinwire.cli.convert:convert"),
    "export": Command("thinwire.cli.export:export"),
    "follow": Command("thinwire.cli.weights:follow"),
    "serve-weights": Command("thinwire.cli.weights:serve_weights"),
    "keys": Command("thinwire.cli.keys:keys"),
    "doctor": Command("thinwire.cli.checking.doctor:doctor"),
    "memory": Command("thinwire.cli.planning.memory:memory", hidden=True),
    # Everything after the name of the lab's own command belongs to that command.
    "lab": Command("thinwire.cli.lab:lab", context_settings={"allow_interspersed_args": False}),
}
"""In the order of the help."""

_ANYTHING: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_APART: Final = {
    name: Command("thinwire.cli.main:apart", context_settings=_ANYTHING, hidden=True) for name in ("bench", "reproduce")
}
"""What runs where the distribution of these commands is not installed."""


def apart(context: typer.Context) -> None:
    """Say which distribution brings a command that was thinwire's own until 0.2."""
    where = "the distribution thinwire-bench, not installed here: pip install ./bench in a checkout of thinwire"
    typer.echo(f"thinwire: thinwire {context.info_name} comes from {where}", err=True)
    raise typer.Exit(1)


def _plugins() -> dict[str, Command]:
    from importlib.metadata import entry_points

    points = sorted(entry_points(group="thinwire.commands"), key=lambda point: point.name)
    return _APART | {point.name: Command(point.value) for point in points}


app = typer.Typer(
    name="thinwire",
    cls=lazy_group(_COMMANDS, _plugins),
    help="Train large language models over slow networks.",
    **APP_SETTINGS,
)


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
