"""Counts what a user may write: commands and options that the help shows, and keys of files.

``python tools/surface.py``. Options of earlier releases are hidden, and do not count; a key that several tables have
from one declaration counts once, and one that only stands for others does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import typer.main

from thinwire.cli.main import _COMMANDS, app
from thinwire.spec import ClusterSpec, ModelSpec, Plan
from thinwire.spec.base import Spec, nested
from thinwire.spec.machines.kernels import KernelTable
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
    for field in spec.model_fields.values():
        below = nested(field.annotation)
        if below is not None:
            yield from tables(below, seen)


def keys() -> dict[str, int]:
    """How many keys each file has."""
    seen, kinds = set[type[Spec]](), set[type[Spec]]()
    roots: dict[str, tuple[type[Spec], ...]] = {
        "plan": (Plan,),
        "recipe": (Recipe,),
        "model and cluster": (ModelSpec, ClusterSpec),
        "profile and kernels": (Profile, KernelTable),
    }
    return {
        name: sum(own_keys(spec, seen) for root in specs for spec in tables(root, kinds))
        for name, specs in roots.items()
    }


def own_keys(spec: type[Spec], seen: set[type[Spec]]) -> int:
    """How many keys a table has that none in ``seen`` has from the same declaration; adds to ``seen``."""
    declared = {base: {*base.model_fields} for base in reversed(spec.__mro__) if issubclass(base, Spec)}
    new, known = set[str](), set[str]()
    for base, names in declared.items():
        (known if base in seen else new).update(names - known - new)
        seen.add(base)
    return len(new - {*spec.shorthands})


if __name__ == "__main__":
    for what, counts in (("options", options()), ("keys", keys())):
        print(f"{sum(counts.values())} {what}: {', '.join(f'{name} {count}' for name, count in counts.items())}")
