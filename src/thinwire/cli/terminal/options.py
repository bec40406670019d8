"""Options that several commands share, and commands that take all of their options as one object."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")

_REQUIRED: Final = inspect.Parameter.empty
"""Stands for the default of an option that has none."""

Seq = Annotated[int | None, typer.Option(min=1, help="Sequence length in tokens; by default the model's.")]


def expand_options(command: Callable[[Options], None]) -> Callable[..., None]:
    """Give a command that takes one options object the parameters that typer reads.

    The object is a frozen dataclass whose fields are ``Annotated[T, typer.Option(...)]``, with or without a default;
    each becomes one option of the command, in the order of the fields. A field whose type is itself such a dataclass
    groups options that several commands share: its fields take its place, and its default holds theirs.

    Args:
        command: The function behind the command. Its only parameter is annotated with the dataclass.

    Returns:
        A function with the same name and docstring and one keyword parameter for each field. It builds the options
        object and calls ``command``.
    """
    (options,) = (get_type_hints(command)[name] for name in inspect.signature(command).parameters)
    parameters = list(_parameters(options, _REQUIRED))

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        command(_build(options, values, _REQUIRED))

    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded


def _parameters(options: type, defaults: object) -> Iterator[inspect.Parameter]:
    """The parameters of a command for the fields of its dataclass, groups expanded in place."""
    for name, annotation, default in _fields(options, defaults):
        if dataclasses.is_dataclass(annotation):
            yield from _parameters(annotation, default)  # type: ignore[arg-type]
        else:
            yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _build(options: type[Options], values: dict[str, Any], defaults: object) -> Options:
    """An options object from the values of its fields and of the fields of its groups, all by name."""
    fields: dict[str, Any] = {}
    for name, annotation, default in _fields(options, defaults):
        if dataclasses.is_dataclass(annotation):
            fields[name] = _build(annotation, values, default)  # type: ignore[arg-type]
        elif name in values or default is not _REQUIRED:
            fields[name] = values.get(name, default)
    return options(**fields)


def _fields(options: type, defaults: object) -> Iterator[tuple[str, Any, Any]]:
    """Name, annotation and default of each field; ``defaults`` is an instance whose values replace the defaults."""
    annotations = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        if defaults is not _REQUIRED:
            default = getattr(defaults, field.name)
        else:
            default = _REQUIRED if field.default is dataclasses.MISSING else field.default
        yield field.name, annotations[field.name], default
