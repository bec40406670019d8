"""``thinwire keys``: makes the keys by which the ranks of a job recognise each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.collectives.gateway.keys import DAYS, make_keys


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write.")],
    days: Annotated[int, typer.Option(min=1, max=36_500, help="Days for which they are valid.")] = DAYS,
) -> None:
    """Make keys for `cluster.keys`: the traffic between hosts is encrypted, and strangers are kept out."""
    with explained():
        made = make_keys(directory, days)
        typer.echo(f"{made.directory}: keys for {days} days. Copy the directory to every host, and set cluster.keys.")
