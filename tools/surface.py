"""Counts what a user may write: commands and options that the help shows, and keys of files.

``python tools/surface.py``. Options of earlier releases are hidden, and do not count; a key counts once for each kind
of table that has it, and not in tables that no file names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import typer.main

from thinwire.cli.main import _COMMANDS, app
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.base import Spec, nested
from thinwire.spec.profile import Profile
from thinwire.spec.recipe import Recipe


def options() -> dict[str, int]:
    """How many options and arguments each of thinwire's own commands shows, ``--help`` aside."""
    group: Any = typer.main.get_command(app)
    commands: dict[str, click.Command] = {name: group.commands[name] for name in _COMMANDS}
    return {
        name: sum(not getattr(each, "hidden", False) for each in command.params)
        for name, command in commands.items()
        if not command.hidden
    }


def tables(spec: type[Spec], seen: set[type[Spec]] | None = None) -> Iterator[type[Spec]]:
    """A specification and those of the tables below it, each kind once."""
    seen = set() if seen is None else seen
    if spec in seen:
        return
    seen.add(spec)
    yield spec
    for name, field in spec.model_fields.items():
        below = nested(field.annotation)
        if below is not None and name != "residence":
            yield from tables(below, seen)


def keys() -> dict[str, int]:
    """How many keys each file has."""
    seen: set[type[Spec]] = set()
    roots: dict[str, tuple[type[Spec], ...]] = {
        "plan": (Plan,),
        "recipe": (Recipe,),
        "model and cluster": (ModelSpec, ClusterSpec),
        "profile": (Profile,),
    }
    return {
        name: sum(len(spec.model_fields.keys() - {"residence"}) for root in specs for spec in tables(root, seen))
        for name, specs in roots.items()
    }


if __name__ == "__main__":
    for what, counts in (("options", options()), ("keys", keys())):
        print(f"{sum(counts.values())} {what}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
