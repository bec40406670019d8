"""Spellings of earlier releases: words of a command line are rewritten before they are read, and stderr says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperCommand

_Function = TypeVar("_Function", bound=Callable[..., Any])
_FORMER: Final = "former_options"


def say_moved(old: str, new: str) -> None:
    """Say on stderr, on one rank, how an option or a command of an earlier release is spelled now."""
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"thinwire: {old} is now {new}; the old spelling works until release 0.4", err=True)


def formerly(options: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Let a command read options of an earlier release. By old option: what is written now, as in ``"--memory": "--set
    cluster.memory={}"``; an option without ``{}`` takes no value."""

    def mark(function: _Function) -> _Function:
        setattr(function, _FORMER, options)
        return function

    return mark


def command_class(function: Callable[..., Any]) -> type[TyperCommand]:
    """The class of a command that reads what :func:`formerly` names."""
    options: Mapping[str, str] = getattr(function, _FORMER, {})

    class Reading(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, _renewed(args, options))

    return Reading


def redirected(words: Sequence[str], became: Mapping[str, str]) -> list[str]:
    """A command line, from the name of the command, whose option is a command of its own by now, which takes its value:
    ``profile --kernels FILE`` is ``kernels FILE``."""
    name, *rest = words
    for number, word in enumerate(rest):
        option, equals, value = word.partition("=")
        if option in became and (equals or number + 1 < len(rest)):
            value = value if equals else rest.pop(number + 1)
            del rest[number]
            say_moved(f"thinwire {name} {option} {value}", f"thinwire {became[option]} {value}")
            return [became[option], value, *rest]
    return list(words)


def _renewed(words: Sequence[str], options: Mapping[str, str]) -> list[str]:
    rest, renewed = list(words), list[str]()
    while rest and rest[0] != "--":
        word = rest.pop(0)
        old, equals, value = word.partition("=")
        takes_value = "{}" in options.get(old, "")
        if old not in options or (takes_value and not equals and not rest):
            renewed.append(word)
            continue
        if takes_value and not equals:
            value = rest.pop(0)
        option, _, text = options[old].partition(" ")
        text = text.format(value)
        say_moved(old, f"{option} {text}")
        renewed += [option, text]
    return renewed + rest
