"""Groups of commands that are imported on first use: ``thinwire plan`` loads no other command, and no plug-in."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperGroup

from thinwire.cli.terminal.former import command_class, redirected

APP_SETTINGS: Final[Mapping[str, Any]] = {
    "no_args_is_help": True,
    "add_completion": False,
    "rich_markup_mode": "rich",
    "pretty_exceptions_enable": False,
}
"""Arguments of every :class:`typer.Typer` of the command line."""


@dataclass(frozen=True)
class Command:
    """Where a command is defined.

    Attributes:
        target: ``module:attribute``; the attribute is a function, or a :class:`typer.Typer` of several commands.
        context_settings: Settings of the command's context, as click names them.
        hidden: Whether no list has it, as a command of an earlier release.
        became: Options that are commands of their own by now; see :func:`~thinwire.cli.terminal.former.redirected`.
    """

    target: str
    context_settings: Mapping[str, Any] | None = None
    hidden: bool = False
    became: Mapping[str, str] = field(default_factory=dict)


def lazy_group(
    commands: Mapping[str, Command], plugins: Callable[[], Mapping[str, Command]] = dict
) -> type[TyperGroup]:
    """A class for the argument ``cls`` of a :class:`typer.Typer`, which then imports its commands on first use.

    Calling a command imports that command; the help of the group imports all of them, because it shows their summaries,
    in the order of ``commands``. Further commands, of ``plugins``, are asked for by the help and for an unknown name.
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = _Commands(commands, plugins)

        def main(self, *arguments: Any, **settings: Any) -> Any:
            open_closed_streams()
            with output_may_fail():
                return super().main(*arguments, **settings)

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            declared = commands.get(args[0])
            return super().resolve_command(ctx, redirected(args, declared.became) if declared else args)

    return LazyGroup


class _Commands(UserDict[str, Any]):
    """Commands by name. A value is a :class:`Command` inside and the built command of typer outside.

    Hidden ones are found by their names, and no list has them.
    """

    def __init__(self, commands: Mapping[str, Command], plugins: Callable[[], Mapping[str, Command]]) -> None:
        super().__init__(commands)
        self._plugins: Callable[[], Mapping[str, Command]] | None = plugins

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        if isinstance(self.data[name], Command):
            self.data[name] = _build(name, self.data[name])
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            self._add_plugins()
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        self._add_plugins()
        return (name for name, command in self.data.items() if not command.hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _add_plugins(self) -> None:
        if self._plugins is not None:
            plugins, self._plugins = self._plugins, None
            for name, command in plugins().items():
                self.data.setdefault(name, command)  # a plug-in replaces no command of thinwire itself


def _build(name: str, command: Command) -> Any:
    """The command that typer runs. One that cannot be imported says so in the help, and fails when it is called."""
    module, _, attribute = command.target.partition(":")
    parent = typer.Typer(**APP_SETTINGS)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        function = _unavailable(name, command, str(error))
    if isinstance(function, typer.Typer):
        parent.add_typer(function, name=name)
    else:
        settings = dict(command.context_settings) if command.context_settings else None
        parent.command(name, cls=command_class(function), context_settings=settings, hidden=command.hidden)(function)
    parent.callback()(lambda: None)  # makes a group of the parent even where it has one command
    return typer.main.get_group(parent).commands[name]


def _unavailable(name: str, command: Command, reason: str) -> Callable[[], None]:
    def unavailable() -> None:
        typer.echo(f"thinwire {name} comes from {command.target}, which does not load: {reason}", err=True)
        raise typer.Exit(1)

    unavailable.__doc__ = f"Not available: {reason}"
    return unavailable


# -- standard streams that are closed, or whose disk is full --------------------------------------------------------


def open_closed_streams() -> None:
    """Open what the caller has closed of descriptors 0 to 2 on the null device. Otherwise the next file or socket gets
    the number, and whatever prints writes into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, also in ranks
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115, for the life of the process


@contextlib.contextmanager
def output_may_fail() -> Iterator[None]:
    """Turn output that the disk has no room for into a sentence on stderr and exit status 1. Where its reader has left,
    as ``head`` does, the status says so."""
    try:
        try:
            yield
        finally:
            _flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        _drop_output()
        with contextlib.suppress(OSError):
            print(f"thinwire: the output cannot be written: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from error


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        _drop_output()
        raise SystemExit(1) from error


def _drop_output() -> None:
    """Let the interpreter write to the null device what is left at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
