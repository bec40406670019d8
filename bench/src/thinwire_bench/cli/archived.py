"""Commands whose studies have said what they had to say: their names stay, and say where the rest is."""

from __future__ import annotations

from typing import Final

import typer

from thinwire.cli.terminal.errors import explained
from thinwire.cli.terminal.lazy import Command
from thinwire.errors import UsageError

TAG: Final = "evidence-0.2"
COMMIT: Final = "25a50cb"
"""The commit of the tag: the last one that has these commands."""

_STUDIES: Final = (
    "backward", "checkpoint", "data", "emit", "hybrid", "islands", "islands-chaos", "kernels",
    "mutations", "overlap", "placement", "planning-time", "reductions", "spectra", "stages", "start", "techniques",
    "units",
)  # fmt: skip

_ANYTHING: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

ARCHIVED: Final = {name: Command(f"{__name__}:archived", context_settings=_ANYTHING, hidden=True) for name in _STUDIES}
"""Archived commands by name; the help does not list them."""


def archived(context: typer.Context) -> None:
    """Say where the command is; its old options change nothing."""
    with explained():
        raise UsageError(
            f"thinwire bench {context.info_name} was archived after 0.2, with its study and results; in a checkout of "
            f"thinwire, `git worktree add ../evidence {TAG}` (commit {COMMIT}) brings it back"
        )
