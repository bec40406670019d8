"""Options that several commands share, and commands that take all of their options as one object."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import typer

Options = TypeVar("Options")

Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device; auto uses CUDA if available.")]
Nodes = Annotated[int | None, typer.Option(min=1, help="Number of nodes, if the launcher sees only one machine.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Sequence length in tokens; by default the model's.")]


def expand_options(command: Callable[[Options], None]) -> Callable[..., None]:
    """Give a command that takes one options object the parameters that typer reads.

    The object is a frozen dataclass whose fields are ``Annotated[T, typer.Option(...)]``, with or without a default;
    each becomes one option of the command, in the order of the fields. Returns a function with the name and docstring
    of ``command`` and a keyword parameter for each field, which builds the options object and calls ``command``.
    """
    (options,) = (get_type_hints(command)[name] for name in inspect.signature(command).parameters)
    annotations = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in dataclasses.fields(options)
    ]

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        command(options(**values))

    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return expanded
